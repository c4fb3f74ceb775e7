"""The training job: a config in, a run's folder and its figures out."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dat.attacks import FGSM, NFGSM, PGD, YOPO, Free, NoAttack
from dat.build import accuracy_of, figures, make_trainer, make_world
from dat.comm import Auto, World, choose, protocol_name, quantizer_name
from dat.config import DataConfig, RunConfig
from dat.data import ImageData, Parts, Splits, is_known, load
from dat.examination import examine
from dat.finetune import settle
from dat.loggers import make_loggers
from dat.objectives import (
    MART,
    TRADES,
    Adversarial,
    GradAlign,
    LogitPairing,
    Noisy,
    Smooth,
)
from dat.optim import LSGD, SGD
from dat.report import Progress, gauge
from dat.report.page import write_page
from dat.train import EpochRecord, Resumption, RunFolder, Saver, Trainer
from dat.train.checkpoint import clear
from dat.train.folder import CHECKPOINTS, PAGE, RESULT
from dat.train.log import WorkerLog, log, worker_log
from dat.train.logged import Logged
from dat.train.remarks import guessing, left_out, overfitting


def train(
    asked: RunConfig,
    recipe: str,
    out: Path,
    *,
    overwrite: bool = False,
    quiet: bool = False,
    resume: bool = False,
    resolution: Callable[[], int | None] | None = None,
) -> dict[str, Any] | None:
    """Train on all workers, measure the best weights on the test set, leave a run's folder.

    The first worker gets the result that is in the folder; the others get none. To `resume` is to
    go on from the last checkpoint in that folder. `resolution` is that of the pre-trained network,
    if there is one.
    """
    with make_world(asked) as world, ExitStack() as stack:
        config, trainer, facts = world.together(lambda: _prepare(asked, world, resolution))
        found = world.together(lambda: _last(out, world)) if resume else None
        folder = world.together(lambda: _folder(out, world, overwrite, found))
        stack.enter_context(worker_log(out, world))
        trainer.stopping = asked_to_stop()
        trainer.listeners = [WorkerLog()]
        trainer.saver = Saver(
            out / CHECKPOINTS,
            every=config.train.save_every,
            keep=config.train.save_keep,
            tell=_tell if world.first else log.warning,
        )
        if world.first and not quiet:
            for line in facts.lines:
                print(line, file=sys.stderr)
        settle_protocol(trainer, quiet=quiet)
        if folder:
            resolved = replace(
                config,
                data=_resolved(config, trainer, on_disk=facts.in_parts),
                quantizer=trainer.quantizer,
                protocol=trainer.protocol,
            )
            described = {"recipe": recipe} | resolved.dump()
            if not found:
                folder.describe(described, world)
            logged = Logged(out, make_loggers(config.train.log), described, result_follows=True)
            stack.callback(logged.close)
            trainer.listeners += [logged, folder, *([] if quiet else [Progress(str(out))])]
            for change in found.changes(trainer) if found else ():
                _tell(change)
        records = trainer.fit(found)
        result = _result(config, recipe, trainer, records, facts.test)
        if folder:
            folder.finish(result)
            logged.close(result)
        _report(config, trainer, facts.test, out, quiet=quiet)
        return result if world.first else None


def _report(
    config: RunConfig, trainer: Trainer, test: ImageData, out: Path, *, quiet: bool
) -> None:
    """Look closely at the best weights, by all workers, and write the run's page."""
    world, images = trainer.world, config.evaluate.report
    if not images:
        return
    with gauge("looking closely", show=world.first and not quiet) as progress:
        found = examine(
            config, trainer.best_model(""), test, world, images=images, progress=progress
        )
    if found:
        found.write(out)
        write_page([out], out / PAGE)


def settle_protocol(trainer: Trainer, *, quiet: bool = False) -> None:
    """What the default or a measurement decides is decided once, and written down with the run."""
    length = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    asked, world = trainer.protocol, trainer.world
    trainer.quantizer, trainer.protocol = choose(trainer.quantizer, asked, world, length)
    if isinstance(asked, Auto) and world.first and not quiet:
        chosen = f"{protocol_name(trainer.protocol)}, {trainer.quantizer.bits} bits"
        print(f"protocol auto: {chosen}, as measured", file=sys.stderr)


def method_name(config: RunConfig, workers: int) -> str:
    """What the paper would call this: AT, Fast AT, DAT-PGD, DAT-FGSM w/o LALR, DAT-LSGD, ..."""
    if isinstance(config.objective, Noisy):
        return _noisy_name(config, workers)
    if isinstance(config.attack, NoAttack):
        return "Standard"
    plain = isinstance(config.objective, Adversarial)
    carried = ", carried" if isinstance(config.attack, PGD) and config.attack.carry else ""
    objective = "" if plain else f" {OBJECTIVE_NAMES.get(type(config.objective), 'own')}"
    awp = (" + AWP" if config.train.awp else "") + carried
    if workers == 1:
        return (AT_NAMES.get(type(config.attack), "AT") if plain else objective[1:]) + awp
    if isinstance(config.optimizer, LSGD):
        return f"DAT-LSGD{objective}{awp}"
    oracle = f"DAT-{type(config.attack).__name__}{objective}{awp}"
    return f"{oracle}{' w/o LALR' if isinstance(config.optimizer, SGD) else ''}"


AT_NAMES = {PGD: "AT", FGSM: "Fast AT", NFGSM: "N-FGSM", Free: "Free AT", YOPO: "YOPO"}


OBJECTIVE_NAMES = {TRADES: "TRADES", MART: "MART", LogitPairing: "ALP", GradAlign: "GradAlign"}


def _noisy_name(config: RunConfig, workers: int) -> str:
    assert isinstance(config.objective, Noisy)
    copies = f"N = {config.objective.copies}"
    if not isinstance(config.objective, Smooth):
        return f"Stability ({copies})"
    if isinstance(config.attack, NoAttack):
        return f"Gaussian ({copies})"
    return f"Smooth-{'AT' if workers == 1 else 'DAT'} ({copies})"


def _folder(out: Path, world: World, overwrite: bool, found: Resumption | None) -> RunFolder | None:
    if not world.first:
        return None
    if found is None:
        return RunFolder.create(out, overwrite=overwrite)
    clear(out / CHECKPOINTS)  # else a worker's file from before counts as that of now
    return RunFolder(out)


def _last(out: Path, world: World) -> Resumption:
    """The checkpoint to go on from; all workers find the same."""
    if (out / RESULT).is_file():
        raise ValueError(f"{out}: the run is complete; there is nothing to resume")
    found = Resumption.last(out / CHECKPOINTS, _tell if world.first else log.warning)
    if found is None:
        raise ValueError(f"{out}: no checkpoint to resume from")
    return found


def _tell(message: str) -> None:
    """The first worker tells; the others write it into their logs."""
    log.warning(message)
    print(message, file=sys.stderr)


def asked_to_stop() -> Callable[[], bool]:
    """Whether a scheduler has sent SIGTERM since."""
    asked = threading.Event()
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda number, frame: asked.set())
    return asked.is_set


def _prepare(
    config: RunConfig, world: World, resolution: Callable[[], int | None] | None = None
) -> tuple[RunConfig, Trainer, Facts]:
    """The config with what pre-trained weights decide; the trainer, which keeps its own part of the
    training set; what else is needed of the data."""
    if world.first:
        make_loggers(config.train.log)  # a missing package shows before anything is written
    data = load(config.data.name, config.data.reading())
    config = settle(config, data, resolution)
    trainer = make_trainer(config, data, world)
    lines = data_lines(config.data.name, data, trainer)
    return config, trainer, Facts(data.test, lines, isinstance(data.training, Parts))


class Facts(NamedTuple):
    """Of the data, what is needed after the workers have taken their parts of it."""

    test: ImageData
    lines: list[str]
    """What a person wants to know before training."""
    in_parts: bool


def data_lines(name: str, data: Splits, trainer: Trainer) -> list[str]:
    """What is trained on: how many images, of which size, in which classes and parts."""
    train, (channels, height, width) = data.training, data.test.shape
    lines = [
        f"{name}: {len(train):,} training and {len(data.test):,} test images of "
        f"{channels} x {height} x {width}, {data.test.classes} classes"
    ]
    counts = train.counts() if isinstance(train, ImageData) else torch.tensor(train.totals)
    if len(counts):
        low, high = int(counts.min()), int(counts.max())
        lines[0] += f" with {low:,} to {high:,} each" if low < high else f" with {low:,} each"
        if low == 0:
            empty = (counts == 0).nonzero().squeeze(1).tolist()
            names = [train.names[it] if train.names else str(it) for it in empty]
            lines.append(f"warning: no training image of class {', '.join(names)}")
    if isinstance(train, ImageData):
        return lines
    plan = trainer.supply.sources[0].plan
    rounds = [plan.steps * plan.batch / len(plan.sizes) / size for size in plan.sizes]
    lines.append(
        f"in {len(plan.sizes)} parts of {min(plan.sizes):,} to {max(plan.sizes):,} images: in an "
        f"epoch the smallest is gone round {max(rounds):.2f} times, the largest {min(rounds):.2f}"
    )
    return lines


def _resolved(config: RunConfig, trainer: Trainer, *, on_disk: bool) -> DataConfig:
    """What a default or the current folder decided, written down, so the run can be repeated."""
    data = config.data
    return replace(
        data,
        name=_anchored(data.name),
        unlabelled=data.unlabelled and _anchored(data.unlabelled),
        pseudo_labels=data.pseudo_labels and _anchored(data.pseudo_labels),
        parts=trainer.parts if on_disk else len(trainer.supply.sources[0].plan.sizes),
    )


def _anchored(name: str) -> str:
    """A path of a file or folder as seen from anywhere; other names as they are."""
    path = Path(name)
    if is_known(name) or name == "rest":
        return name
    files = (".npz", ".npy", ".parquet")
    return str(path.resolve()) if path.suffix in files or path.is_dir() else name


def _result(
    config: RunConfig,
    recipe: str,
    trainer: Trainer,
    records: list[EpochRecord],
    test: ImageData,
) -> dict[str, Any]:
    world, epochs, best = trainer.world, len(records), trainer.best_accuracy()
    found = {
        name: figures(
            config, accuracy_of(config, trainer.best_model(name), test, world, check=False)
        )
        for name in trainer.models()
    }
    result: dict[str, Any] = {
        "recipe": recipe,
        "method": method_name(config, world.size),
        "workers": world.size,
        "batch": config.train.batch,
        "last_batch": trainer.batch_in(epochs - 1),
        "quantizer": quantizer_name(trainer.quantizer),
        "bits": trainer.quantizer.bits,
        "protocol": protocol_name(trainer.protocol),
        "epochs": epochs,
        "steps": trainer.updates,
        **found[""],
        "best_epoch": trainer.best_epoch(),
        "holdout_ta": best.ta if best else None,
        "holdout_ra": best.ra if best else None,
        "last_holdout_ra": records[-1].holdout_ra,
        "collapses": [str(it) for it in trainer.watch.collapses],
        "warnings": [
            *left_out(trainer),
            *overfitting(trainer, records),
            *guessing(found[""]["ta"], found[""]["images"], test),
        ],
        "comm_seconds_per_epoch": sum(r.comm_seconds for r in records) / epochs,
        "exposed_seconds_per_epoch": sum(r.exposed_seconds for r in records) / epochs,
        "train_seconds_per_epoch": sum(r.seconds for r in records) / epochs,
        "train_seconds": sum(r.seconds for r in records) + trainer.discarded_seconds,
        "mb_per_step": sum(r.mb_per_step for r in records) / epochs,
        "mb_busiest": sum(r.mb_busiest for r in records) / epochs,
        "mb_between": sum(r.mb_between for r in records) / epochs,
        "mb_per_epoch": sum(r.mb_epoch for r in records) / epochs,
    }
    if "ema-" in found:
        result |= {
            f"ema_{key}": found["ema-"][key] for key in ("ta", "ra", "aa") if key in found["ema-"]
        }
    return result
