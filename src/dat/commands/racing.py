"""Commands that measure contestants in turns: `dat bench attack`, `step`, `optimizer`, ..."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from dat.commands.arguments import (
    Commands,
    count,
    images_argument,
    measuring_arguments,
    positive,
    subject_arguments,
    words_of,
)

if TYPE_CHECKING:
    from torch import nn

    from dat.bench import Race
    from dat.data import ImageData


def add(bench: Commands) -> None:
    attack = bench.add(
        "attack",
        _attack,
        "images a second under PGD: ours, a plain loop, torchattacks, foolbox, ART",
        "  dat bench attack --against plain,torchattacks,foolbox,art\n"
        "  dat bench attack --width 64 --batch 64 --plot attack.png",
    )
    _scene_arguments(attack)
    _racing_arguments(attack, "plain")
    step = bench.add(
        "step",
        _step,
        "a whole step of adversarial training: images a second, memory, overhead",
        "  dat bench step\n"
        "  dat bench step --attack fgsm --width 64 --batch 64\n"
        "  dat bench step --clean --against bare,paper     the clean loss as well, as the paper",
    )
    _scene_arguments(step)
    step.add_argument("--clean", action="store_true", help="train on the clean images as well")
    step.add_argument("--no-memory", action="store_true", help="do not measure memory")
    _racing_arguments(step, "bare,plain,paper")
    optimizer = bench.add(
        "optimizer",
        _optimizer,
        "one step of LAMB and of LARS: ours, torch's AdamW and SGD, timm, pytorch_optimizer",
        "  dat bench optimizer --against adamw,sgd,timm,pytorch_optimizer",
    )
    optimizer.add_argument("--model", default="resnet50", help="whose parameters (resnet50)")
    optimizer.add_argument("--width", type=positive, metavar="N", help="of the model (its own)")
    _racing_arguments(optimizer, "adamw,sgd")
    evaluate = bench.add(
        "evaluate",
        _evaluate,
        "TA and RA of a run, of a model or of an untrained network: ours, a plain loop",
        "  dat bench evaluate --images 512\n"
        "  dat bench evaluate runs/cifar --images 1000 --attack pgd-20",
    )
    evaluate.add_argument("mixed", nargs="*", metavar="RUN|key=value", help="a run; settings")
    subject_arguments(evaluate)
    images_argument(evaluate)
    _scene_arguments(evaluate, model=False)
    _racing_arguments(evaluate, "plain")
    loader = bench.add(
        "loader",
        _loader,
        "cropped and flipped batches: ours, torch's DataLoader in the process and beside it",
        "  dat bench loader --data cifar10\n  dat bench loader --batch 1024 --threads 1",
    )
    loader.add_argument("--batch", type=positive, default=128, metavar="B", help="(128)")
    loader.add_argument("--data", metavar="NAME", help="a set (random images)")
    loader.add_argument(
        "--images", type=count, default=10_000, metavar="N", help="how many random images (1e4)"
    )
    _racing_arguments(loader, "dataloader,dataloader-2")
    startup = bench.add(
        "startup",
        _startup,
        "how long until there is work: import torch, import dat, dat --help, dat train",
        "  dat bench startup --repeats 10\n  dat bench startup --against dat,help",
    )
    _racing_arguments(startup, "torch,dat,help,train")


def _scene_arguments(parser: argparse.ArgumentParser, *, model: bool = True) -> None:
    if model:
        parser.add_argument("--model", default="preact-resnet18", help="(preact-resnet18)")
    parser.add_argument("--width", type=positive, default=16, metavar="N", help="channels (16)")
    parser.add_argument("--batch", type=positive, default=128, metavar="B", help="(128)")
    parser.add_argument("--size", type=positive, default=32, metavar="N", help="pixels (32)")
    parser.add_argument("--attack", default="pgd-10", help="pgd-10, fgsm (pgd-10)")


def _racing_arguments(parser: argparse.ArgumentParser, against: str) -> None:
    parser.add_argument(
        "--against", type=words_of, default=words_of(against), metavar="LIST", help=f"({against})"
    )
    measuring_arguments(parser)
    parser.add_argument(
        "--seconds", type=float, default=0.0, metavar="S", help="go on for at least so long (0)"
    )


def _attack(arguments: argparse.Namespace, words: list[str]) -> int:
    from dat.bench import Scene, bench_attack

    _check(arguments)
    scene = Scene(**_taken(arguments, *SCENE))
    return _show(arguments, bench_attack(scene, **_taken(arguments, *HOW)))


def _step(arguments: argparse.Namespace, words: list[str]) -> int:
    from dat.bench import StepScene, bench_step

    _check(arguments)
    scene = StepScene(**_taken(arguments, *SCENE, "clean"))
    found = bench_step(scene, weigh=not arguments.no_memory, **_taken(arguments, *HOW))
    return _show(arguments, found)


def _optimizer(arguments: argparse.Namespace, words: list[str]) -> int:
    from dat.bench import bench_optimizer

    _check(arguments)
    return _show(arguments, bench_optimizer(**_taken(arguments, "model", "width", *HOW)))


def _evaluate(arguments: argparse.Namespace, words: list[str]) -> int:
    from dat.bench import Scene, bench_evaluate

    _check(arguments)
    settings = _taken(arguments, "width", "batch", "size", "attack")
    subject = None
    if arguments.mixed or arguments.model or arguments.data:
        subject, known = _subject(arguments)
        settings |= known
    options = _taken(arguments, "images", *HOW)
    return _show(arguments, bench_evaluate(Scene(**settings), subject=subject, **options))


def _subject(
    arguments: argparse.Namespace,
) -> tuple[tuple[nn.Module, ImageData], dict[str, Any]]:
    """A model with its test images, and what is known of both."""
    from dat.commands.measuring import subject_of
    from dat.config import parse_edits
    from dat.data import load
    from dat.objectives import Noisy

    subject = subject_of(arguments, parse_edits(arguments.settings))
    config = subject.config
    if isinstance(config.objective, Noisy):
        raise ValueError(f"{subject.name}: a smoothed classifier; give a run of another objective")
    if config.threat.norm != "linf":
        raise ValueError(f"{subject.name}: threat.norm must be linf, which the plain loop attacks")
    data = load(config.data.name, config.data.reading())
    known = {"model": config.model.name, "width": config.model.width}
    sizes = {"size": data.test.shape[1], "eps": config.threat.eps}
    return (subject.make(data), data.test), {**known, **sizes}


def _loader(arguments: argparse.Namespace, words: list[str]) -> int:
    from dat.bench import bench_loader

    _check(arguments)
    return _show(arguments, bench_loader(**_taken(arguments, "batch", "data", "images", *HOW)))


def _startup(arguments: argparse.Namespace, words: list[str]) -> int:
    from dat.bench import bench_startup

    _check(arguments)
    return _show(arguments, bench_startup(**_taken(arguments, *HOW)))


SCENE = ("model", "width", "batch", "size", "attack")
HOW = ("against", "repeats", "seconds", "threads")


def _taken(arguments: argparse.Namespace, *names: str) -> dict[str, Any]:
    return {name: getattr(arguments, name) for name in names}


def _check(arguments: argparse.Namespace) -> None:
    from dat.report import check_picture

    if arguments.plot:
        check_picture(arguments.plot)


def _show(arguments: argparse.Namespace, race: Race) -> int:
    from dat.bench import show_race

    show_race(race, as_json=arguments.json, plot=arguments.plot)
    return 0
