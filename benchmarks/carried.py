"""Fewer gradients for the same robustness: perturbations carried along, early exits, one step.

    python benchmarks/fashion.py fashion.npz
    python benchmarks/carried.py fashion.npz [--seeds 2] [--images 500]

The task of methods.yaml with a narrower CNN and twice the epochs, the last weights, one thread.
Gradients counts passes of one image, forward and backward, in one update with its attack, as they
were in the run. Other work on the machine disturbs what a run takes, so the epochs are timed once
more at the end: from the trained weights, the methods in turns, by the processor's own clock.
AutoAttack is last, as it takes longest. It goes on with the results that there are.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from runs import RESULTS, mean_and_spread, save, table
from torch import Tensor, nn

from dat.config.build import make_model, make_trainer, make_world
from dat.config.recipes import read
from dat.config.schema import RunConfig, parse_edits
from dat.data import ImageData, Splits, load
from dat.distributed import World
from dat.evaluation import assess
from dat.report import Chart, line_charts
from dat.train import Callback, Trainer

RECIPE = str(Path(__file__).with_name("methods.yaml"))
TASK = ("model.width=8", "data.holdout=0", "train.sentinel=off", "comm.threads=1")
EPOCHS = 20
FREE = 4
METHODS: dict[str, tuple[str, ...]] = {
    "PGD-10": ("attack.steps=10",),
    "PGD-2": ("attack.steps=2",),
    "FGSM": ("attack.name=fgsm",),
    "N-FGSM": ("attack.name=n-fgsm",),
    "free AT, m = 4": (
        "attack.name=free",
        f"attack.replays={FREE}",
        f"train.epochs={EPOCHS // FREE}",
    ),
    "PGD-10, patience 1": ("attack.steps=10", "attack.patience=1"),
    "carried PGD-1": ("attack.steps=1", "attack.carry=true"),
    "carried PGD-2": ("attack.steps=2", "attack.carry=true"),
}
ROUNDS = 3
SHORT = 1000
"""Images in an epoch that is timed."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--images", type=int, default=500, help="for AutoAttack")
    parser.add_argument("--weights", type=Path, default=Path("carried-weights"))
    parser.add_argument("--plot", type=Path, default=RESULTS / "carried.png")
    arguments = parser.parse_args()
    arguments.weights.mkdir(exist_ok=True)
    kept = RESULTS / "carried.json"
    results: dict[str, dict[str, Any]] = json.loads(kept.read_text()) if kept.exists() else {}
    splits = load(str(arguments.data))
    runs = [(seed, name) for seed in range(arguments.seeds) for name in METHODS]
    with make_world(config_of("PGD-10", arguments.data, 0)) as world:
        for seed, name in runs:
            found = results.setdefault(name, {}).setdefault(str(seed), {})
            if "ra" not in found:
                config = config_of(name, arguments.data, seed)
                found |= trained(config, splits, world, place(arguments.weights, name, seed))
                show(results, arguments.plot)
        if not all("epoch" in results[name] for name in METHODS):
            for name, seconds in in_turns(arguments, splits, world).items():
                results[name]["epoch"] = seconds
            show(results, arguments.plot)
        for seed, name in runs:
            found = results[name][str(seed)]
            if "aa" not in found:
                config = config_of(name, arguments.data, seed)
                model = make_model(config, splits)
                model.load_state_dict(torch.load(place(arguments.weights, name, seed)))
                test = spread(splits.test, arguments.images)
                judged = assess(
                    model, test, threat=config.threat, world=world, check=False, batch=500
                )
                found["aa"], found["aa_images"] = judged.ra("autoattack"), judged.images
                show(results, arguments.plot)


def place(folder: Path, name: str, seed: int) -> Path:
    return folder / f"{name.replace(' ', '-').replace(',', '')}-{seed}.pt"


def spread(data: ImageData, count: int) -> ImageData:
    """So many images, of all classes: the file has one class after the other."""
    return data.take(torch.arange(count) * len(data) // count)


def config_of(name: str, data: Path, seed: int) -> RunConfig:
    words = (*TASK, f"data.name={data}", f"seed={seed}", f"train.epochs={EPOCHS}", *METHODS[name])
    return read(RECIPE, parse_edits(words))


class Counted(Callback):
    """How many images went through a network, or the copy of it that is attacked, while gradients
    were asked for."""

    images = 0

    def on_fit_start(self, trainer: Trainer) -> None:
        for network in {trainer.model, trainer.worker.engine.target(eval_mode=True)}:
            network.register_forward_hook(self._see)

    def _see(self, model: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        self.images += len(output) * torch.is_grad_enabled()


def trained(config: RunConfig, splits: Splits, world: World, weights: Path) -> dict[str, Any]:
    """One run, what it took, and RA on all test images."""
    trainer = make_trainer(config, splits, world)
    counted = Counted()
    trainer.callbacks = (*trainer.callbacks, counted)
    start = time.process_time()
    records = trainer.fit()
    seconds = time.process_time() - start
    gradients = counted.images / (trainer.updates * config.train.batch)
    torch.save(trainer.model.state_dict(), weights)
    judged = assess(
        trainer.model, splits.test, ("pgd-20",), threat=config.threat, world=world, check=False
    )
    found = {
        "ta": judged.ta,
        "ra": judged.ra("pgd-20"),
        "images": judged.images,
        "updates": trainer.updates,
        "gradients": gradients,
        "cost": config.attack.cost(),
        "cpu_seconds": seconds,
        "wall_seconds": sum(record.seconds for record in records),
    }
    print(config.attack, found, flush=True)
    return found


def in_turns(arguments: argparse.Namespace, splits: Splits, world: World) -> dict[str, list[float]]:
    """Seconds of the processor for an epoch of a thousand images at the first seed's weights."""
    short = replace(splits, training=spread(splits.train, SHORT))
    seconds: dict[str, list[float]] = {name: [] for name in METHODS}
    for turn in range(ROUNDS + 1):
        for name in METHODS:
            config = config_of(name, arguments.data, 0)
            trainer = make_trainer(config, short, world)
            trainer.epochs = 1
            trainer.model.load_state_dict(torch.load(place(arguments.weights, name, 0)))
            start = time.process_time()
            trainer.fit()
            took = (time.process_time() - start) / trainer.updates
            if turn:  # the first warms up
                seconds[name].append(took)
    return seconds


def show(results: dict[str, dict[str, Any]], plot: Path) -> None:
    rows = []
    points: dict[str, dict[str, tuple[list[float], list[float]]]] = {"RA (%)": {}, "AA (%)": {}}
    base: list[float] = results.get("PGD-10", {}).get("epoch", [])
    for name in METHODS:
        found = results.get(name, {})
        runs = [it for key, it in found.items() if key.isdecimal() and "ra" in it]
        if not runs:
            continue
        gradients, seconds = (
            statistics.mean(it[key] for it in runs) for key in ("gradients", "cpu_seconds")
        )
        timed = base and "epoch" in found
        epoch = statistics.median(found["epoch"]) / statistics.median(base) if timed else None
        costs = [f"{gradients:.1f}", f"{seconds:.0f}", f"{epoch:.2f}" if epoch else ""]
        cells = [cell([it[key] for it in runs if key in it]) for key in ("ta", "ra", "aa")]
        rows.append([name, *costs, *cells])
        for axis, key in (("RA (%)", "ra"), ("AA (%)", "aa")):
            reached = [it[key] for it in runs if key in it]
            if reached:
                points[axis][name] = ([seconds], [statistics.mean(reached)])
    headers = ["Attack in training", "Gradients", "CPU (s)", "Epoch, x PGD-10"]
    save(Path(__file__), results, table([*headers, *("TA (%)", "RA (%)", "AA (%)")], rows))
    charts = [
        Chart(lines, x_axis="training (CPU s)", y_axis=axis, from_zero=False)
        for axis, lines in points.items()
        if lines
    ]
    line_charts(plot, charts)


def cell(values: list[float]) -> str:
    """With the number of seeds."""
    return f"{mean_and_spread(values)} ({len(values)})" if values else ""


if __name__ == "__main__":
    main()
