"""The profiling job: profile some training steps of a recipe.

The trainer takes the steps as in a run, and `dat.core.tracing` notifies the meters when a stage
begins and ends. The first steps are measured for memory, the next for time, and the last are traced
by torch's profiler, so that the measurements do not disturb each other.
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
from torch.profiler import profile

from dat.config.build import make_trainer, make_world
from dat.config.finetune import resolve_finetuning
from dat.config.schema import RunConfig
from dat.core import devices
from dat.core.tracing import Watch, watched
from dat.data import Splits, load
from dat.distributed import Traffic, World
from dat.jobs.train import resolve_protocol
from dat.tools.profiling.meters import REST, MemoryMeter, Stopwatch, trace
from dat.train import Callback, Options, StepReport, Trainer

STAGES = (
    *("data", "attack/forward", "attack/backward", "attack"),
    *("update/forward", "update/backward", "exchange", "optimizer", REST),
)
"""In the order of a step; `attack` is the attack without its passes: start, step, projection."""
WARMUP = 3
"""Steps before time is measured: DDP rebuilds its buckets after the first, and optimizers create
their state. Memory is measured in them."""
TRACED = 2
"""Steps in the trace."""
QUARTILES = (0.25, 0.5, 0.75)


class ProfilingDone(Exception):
    """All steps to profile have been taken."""


class StepProfiler(Callback):
    """Measures memory, then time, then records a trace, and ends the run."""

    def __init__(self, steps: int, file: Path | None, world: World, *, warmup: int) -> None:
        self.steps, self.file, self.world, self.warmup = steps, file, world, warmup
        self.memory = MemoryMeter(world.device)
        self.time = Stopwatch(synchronize=lambda: devices.synchronize(world.device))
        self.watch: Watch = self.memory
        self.traffic: list[Traffic] = []
        self._taken = 0
        activities = devices.profiler_activities(world.device)
        self._profiler = profile(activities=activities, profile_memory=True)

    def on_step_end(self, trainer: Trainer, epoch: int, report: StepReport) -> None:
        self._taken += 1
        timed = self.warmup + self.steps
        end = timed + (TRACED if self.file else 0)
        if self._taken <= self.warmup:
            self.memory.step_ended()
        elif self._taken <= timed:
            self.time.step_ended()
            self.traffic.append(report.traffic)
        if self._taken == self.warmup:
            self.watch = self.time
            self.time.skip()
        if self._taken == timed and self.file:
            self.watch = trace
            if self.world.first:
                with _silenced():
                    self._profiler.start()
        if self._taken == end:
            if self.file and self.world.first:
                with _silenced():
                    self._profiler.stop()
                self._profiler.export_chrome_trace(str(self.file))
            raise ProfilingDone

    def on_epoch_end(self, trainer: Trainer, record: object) -> None:
        self.time.skip()


@contextmanager
def _silenced() -> Iterator[None]:
    """Hide what torch's profiler prints to standard error when it starts and stops."""
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
    warmup: int = WARMUP,
    file: Path | None = None,
    data: Splits | None = None,
) -> dict[str, Any] | None:
    """Profile `steps` steps on all workers, after `warmup` others; the first worker returns the
    result, the others None. Nothing is written, except a trace of two more steps if `file` is
    given. `data` replaces the recipe's data."""
    with make_world(config) as world:
        trainer = world.run_or_fail_together(lambda: _make(config, warmup + steps, world, data))
        resolve_protocol(trainer, quiet=True)
        profiler = StepProfiler(steps, file, world, warmup=warmup)
        trainer.callbacks = [profiler]
        with watched(lambda name: profiler.watch(name)), suppress(ProfilingDone):
            trainer.fit()
        trainer.worker.exchange.close()
        times, memory = _times(profiler), _memory(profiler)
        return _report(profiler, trainer, recipe, times, memory) if world.first else None


def _make(config: RunConfig, steps: int, world: World, data: Splits | None) -> Trainer:
    """A trainer without a holdout set, so that there is no evaluation between epochs, with enough
    epochs and the initial batch size."""
    epochs = max(config.train.epochs, steps + TRACED)
    config = replace(
        config,
        data=replace(config.data, holdout=0.0),
        train=replace(config.train, epochs=epochs, options=_plain(config.train.options)),
    )
    data = data or load(config.data.name, config.data.reading())
    return make_trainer(resolve_finetuning(config, data), data, world)


def _plain(options: Options) -> Options:
    """Options that make all steps the same, without a monitor."""
    monitor = replace(options.overfitting_monitor, action="off")
    schedule = replace(options.batch_schedule, epochs=())
    return replace(options, overfitting_monitor=monitor, batch_schedule=schedule)


def _times(profiler: StepProfiler) -> dict[str, Any]:
    """Means over steps and workers, which add up; a collective."""
    laps = zip(profiler.time.laps, profiler.traffic, strict=True)
    rows = [[_by_stage(*lap)[name] for name in STAGES] for lap in laps]
    seconds = profiler.world.gather(torch.tensor(rows, dtype=torch.float64))  # worker, step, stage
    exchanges = [(step.busy, step.exposed, step.sent) for step in profiler.traffic]
    mine = torch.tensor(exchanges, dtype=torch.float64)
    traffic = profiler.world.gather(mine).mean((0, 1)).tolist()
    spread = seconds.sum(2).flatten().quantile(torch.tensor(QUARTILES, dtype=torch.float64))
    return {
        "stages": seconds.mean((0, 1)).tolist(),
        "total": float(seconds.sum(2).mean()),
        "quartiles": spread.tolist(),
        "exchange": dict(zip(("busy_seconds", "exposed_seconds", "bytes"), traffic, strict=True)),
    }


def _by_stage(lap: dict[str, float], traffic: Traffic) -> dict[str, float]:
    """Seconds by stage; unknown stages count as the rest. The time that the backward pass waits for
    the exchange after its last bucket counts as exchange."""
    seconds = dict.fromkeys(STAGES, 0.0)
    for name, taken in lap.items():
        seconds[name if name in seconds else REST] += taken
    waited = min(traffic.exposed, seconds["update/backward"])
    seconds["update/backward"] -= waited
    seconds["exchange"] += waited
    return seconds


def _memory(profiler: StepProfiler) -> Sequence[tuple[int | None, int | None]]:
    """The highest peak and the largest growth of any worker, for each stage and finally for the
    whole step; a collective."""
    memory = profiler.memory
    rows = [(memory.highest.get(stage, 0), memory.grown.get(stage, 0)) for stage in STAGES]
    rows.append((max(memory.highest.values()), sum(memory.grown.values())))
    most = profiler.world.gather(torch.tensor(rows)).amax(0).tolist()
    return [(peak if memory.has_peaks else None, grown) for peak, grown in most]


def _report(
    profiler: StepProfiler,
    trainer: Trainer,
    recipe: str,
    times: dict[str, Any],
    memory: Sequence[tuple[int | None, int | None]],
) -> dict[str, Any]:
    total, batch = times["total"], trainer.batch
    *stages, whole = memory
    return {
        "recipe": recipe,
        "workers": profiler.world.size,
        "device": profiler.world.device.type,
        "threads": torch.get_num_threads(),
        "batch": batch,
        "steps": len(profiler.traffic),
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
        "trace": str(profiler.file) if profiler.file else None,
    }
