"""The profiling job: a recipe in, a table of its steps out.

The steps are those of a run, taken by the trainer; whoever watches is told by `dat.stages` when a
part of one begins and ends. The first steps are watched for memory, the next for time, the last by
torch's own profiler, so that none disturbs another.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from dat.build import make_trainer, make_world
from dat.comm import Traffic, World
from dat.config import RunConfig
from dat.data import Splits, load
from dat.finetune import settle
from dat.profiling.watchers import REST, Stopwatch, Tidemark, nothing, trace
from dat.stages import Watch, watched
from dat.train import Listener, StepReport, Trainer
from dat.training import settle_protocol

STAGES = (
    *("data", "attack/forward", "attack/backward", "attack"),
    *("update/forward", "update/backward", "exchange", "optimizer", REST),
)
"""In the order of a step; `attack` is the attack without the network: start, step, projection."""
WARMUP = 3
"""Steps before time is taken: DDP cuts its buckets anew after the first, and optimizers make their
state. Memory is watched in them."""
TRACED = 2
"""Steps in the trace."""
QUARTILES = (0.25, 0.5, 0.75)


class Enough(Exception):
    """All steps that were asked for are taken."""


class Plan(Listener):
    """Watches so many steps in one way and then in another, and ends the run."""

    def __init__(self, steps: int, file: Path | None, world: World) -> None:
        self.steps, self.file, self.world = steps, file, world
        cuda = world.device.type == "cuda"
        self.memory = Tidemark(world.device)
        self.time = Stopwatch(synchronize=torch.cuda.synchronize if cuda else nothing)
        self.watch: Watch = self.memory
        self.traffic: list[Traffic] = []
        self._taken = 0
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
        self._profiler = profile(activities=kinds, profile_memory=True)

    def step_ended(self, trainer: Trainer, epoch: int, report: StepReport) -> None:
        self._taken += 1
        timed, end = WARMUP + self.steps, WARMUP + self.steps + (TRACED if self.file else 0)
        if self._taken <= WARMUP:
            self.memory.step_ended()
        elif self._taken <= timed:
            self.time.step_ended()
            self.traffic.append(report.traffic)
        if self._taken == WARMUP:
            self.watch = self.time
            self.time.skip()
        if self._taken == timed and self.file:
            self.watch = trace
            if self.world.first:
                with _hushed():
                    self._profiler.start()
        if self._taken == end:
            if self.file and self.world.first:
                with _hushed():
                    self._profiler.stop()
                self._profiler.export_chrome_trace(str(self.file))
            raise Enough

    def epoch_ended(self, trainer: Trainer, record: object) -> None:
        self.time.skip()


@contextmanager
def _hushed() -> Iterator[None]:
    """torch's profiler tells of its beginning and end on standard error, whoever listens."""
    sys.stderr.flush()
    kept, silence = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(silence)


def profile_steps(
    config: RunConfig,
    recipe: str,
    *,
    steps: int = 10,
    file: Path | None = None,
    data: Splits | None = None,
) -> dict[str, Any] | None:
    """Take steps on all workers; the first gets what they came to. No run's folder is left. With a
    `file`, two more steps are traced by torch's profiler; with `data`, that is trained on."""
    with make_world(config) as world:
        trainer = world.together(lambda: _make(config, steps, world, data))
        settle_protocol(trainer, quiet=True)
        plan = Plan(steps, file, world)
        trainer.listeners = [plan]
        with watched(lambda name: plan.watch(name)), suppress(Enough):
            trainer.fit()
        trainer.worker.exchange.close()
        times, memory = _times(plan), _memory(plan)
        return _report(plan, trainer, recipe, times, memory) if world.first else None


def _make(config: RunConfig, steps: int, world: World, data: Splits | None) -> Trainer:
    """Nothing is held out, so nothing is measured between epochs, and there are epochs enough; the
    batch is that of the beginning."""
    epochs = max(config.train.epochs, WARMUP + steps + TRACED)
    alike = replace(
        config,
        data=replace(config.data, holdout=0.0),
        train=replace(config.train, sentinel="off", epochs=epochs, grow=()),
    )
    data = data or load(alike.data.name, alike.data.reading())
    return make_trainer(settle(alike, data), data, world)


def _times(plan: Plan) -> dict[str, Any]:
    """Means over steps and workers, which add up; all workers call this."""
    laps = zip(plan.time.laps, plan.traffic, strict=True)
    rows = [[_sorted(*lap)[name] for name in STAGES] for lap in laps]
    seconds = plan.world.gather(torch.tensor(rows, dtype=torch.float64))  # worker, step, stage
    talk = [(it.busy, it.exposed, it.sent) for it in plan.traffic]
    traffic = plan.world.gather(torch.tensor(talk, dtype=torch.float64)).mean((0, 1)).tolist()
    spread = seconds.sum(2).flatten().quantile(torch.tensor(QUARTILES, dtype=torch.float64))
    return {
        "stages": seconds.mean((0, 1)).tolist(),
        "total": float(seconds.sum(2).mean()),
        "quartiles": spread.tolist(),
        "exchange": dict(zip(("busy_seconds", "exposed_seconds", "bytes"), traffic, strict=True)),
    }


def _sorted(lap: dict[str, float], traffic: Traffic) -> dict[str, float]:
    """Known stages, the others as rest. What the backward pass waited for the exchange after its
    last bucket is counted there."""
    found = dict.fromkeys(STAGES, 0.0)
    for name, taken in lap.items():
        found[name if name in found else REST] += taken
    waited = min(traffic.exposed, found["update/backward"])
    found["update/backward"] -= waited
    found["exchange"] += waited
    return found


def _memory(plan: Plan) -> Sequence[tuple[int | None, int | None]]:
    """For each stage the highest peak and the largest growth of any worker, and for the whole at
    the end; all workers call this."""
    mark = plan.memory
    rows = [(mark.highest.get(it, 0), mark.grown.get(it, 0)) for it in STAGES]
    rows.append((max(mark.highest.values()), sum(mark.grown.values())))
    most = plan.world.gather(torch.tensor(rows)).amax(0).tolist()
    return [(peak if mark.works else None, grown) for peak, grown in most]


def _report(
    plan: Plan,
    trainer: Trainer,
    recipe: str,
    times: dict[str, Any],
    memory: Sequence[tuple[int | None, int | None]],
) -> dict[str, Any]:
    total, batch = times["total"], trainer.batch
    *stages, whole = memory
    return {
        "recipe": recipe,
        "workers": plan.world.size,
        "device": plan.world.device.type,
        "threads": torch.get_num_threads(),
        "batch": batch,
        "steps": len(plan.traffic),
        "seconds": total,
        "seconds_quartiles": times["quartiles"],
        "images_per_second": batch / total,
        "stages": [
            {
                "stage": name,
                "seconds": taken,
                "share": taken / total,
                "seconds_per_image": taken / batch,
                "peak_bytes": peak,
                "grown_bytes": grown,
            }
            for name, taken, (peak, grown) in zip(STAGES, times["stages"], stages, strict=True)
        ],
        "exchange": times["exchange"],
        "peak_bytes": whole[0],
        "grown_bytes": whole[1],
        "trace": str(plan.file) if plan.file else None,
    }
