"""Runs repeat themselves to the last bit, also when they are interrupted and resumed."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from dat.attacks import PGD
from dat.core.threat import ThreatModel
from dat.data import ImageData
from dat.distributed import Buckets, World
from dat.optim import LAMB
from dat.tools.selftest.replicas import digest
from dat.tools.selftest.result import Context, Result, failed, passed
from dat.train import Checkpoint, Checkpointer, GradientExchange, Preempted, Trainer

EPOCHS, STEPS = 2, 3
"""Epochs, and steps per epoch."""
STOP_AFTER = 4
"""Steps after which a run is interrupted: in the middle of the second epoch."""
ADVICE = "runs with this seed cannot be repeated here; attach this report to an issue"


def determinism(context: Context) -> Result:
    """Two runs, and a run that is interrupted and resumed, end with the same bits."""
    expected = _run(context)
    if different := context.same_on_all_workers(expected):
        return failed(
            f"workers {', '.join(map(str, different))} end with different weights", ADVICE
        )
    again = _run(context)
    if context.same_on_all_workers(int(again == expected)) or again != expected:
        return failed("the same run ends with different weights the second time", ADVICE)
    world = context.world
    if world.local_size < world.size:
        return passed("repeated: same bits (not resumed: several nodes may have no common folder)")
    resumed = _interrupted_run(context)
    if context.same_on_all_workers(int(resumed == expected)) or resumed != expected:
        return failed("a resumed and an uninterrupted run end with different weights", ADVICE)
    return passed(f"repeated, and resumed after step {STOP_AFTER} of {EPOCHS * STEPS}: same bits")


def _run(context: Context) -> int:
    """The digest of the weights after a run."""
    trainer = _trainer(context)
    trainer.fit()
    return digest(trainer.model)


def _interrupted_run(context: Context) -> int:
    """The same for a run that stops in between and is resumed."""
    with _common_folder(context.world) as folder:
        checkpointer = Checkpointer(folder, stopping=lambda: trainer.updates >= STOP_AFTER - 1)
        trainer = _trainer(context, checkpointer)
        stopped = False
        try:
            trainer.fit()
        except Preempted:
            stopped = True
        assert stopped and trainer.updates == STOP_AFTER
        trainer.worker.exchange.close()
        context.world.barrier()  # rank 0 has written the checkpoint
        checkpoint = Checkpoint.last(folder, print)
        assert checkpoint is not None and checkpoint.updates == STOP_AFTER
        resumed = _trainer(context)
        resumed.fit(checkpoint)
    return digest(resumed.model)


def _trainer(context: Context, *callbacks: Checkpointer) -> Trainer:
    """A network with batch norm, an attack, and quantized gradients with error feedback."""
    world = context.world
    count = 4 * STEPS * world.size
    generator = context.generator("determinism")
    images = ImageData.of(
        torch.rand(count, 3, 8, 8, generator=generator), torch.arange(count) % 4, classes=4
    )
    return Trainer(
        model=_network(context),
        data=images,
        threat=ThreatModel(eps=0.1),
        attack=PGD(steps=2),
        optimizer=LAMB(lr=0.05),
        epochs=EPOCHS,
        batch=count // STEPS,
        exchange=GradientExchange(quantizer=Buckets(bits=4, error_feedback=True)),
        seed=context.seed,
        world=world,
        callbacks=callbacks,
    )


def _network(context: Context) -> nn.Module:
    """A small network with batch norm."""
    with context.seeded("determinism"):
        return nn.Sequential(
            *(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
            *(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
            *(nn.Flatten(), nn.Linear(32 * 4 * 4, 4)),
        )


@contextmanager
def _common_folder(world: World) -> Iterator[Path]:
    """A temporary folder of rank 0 that all workers of a node know."""
    with tempfile.TemporaryDirectory(prefix="dat-selftest-") as own:
        name = own.encode().ljust(512, b"\0")
        rows = world.gather(torch.frombuffer(bytearray(name), dtype=torch.uint8))
        yield Path(bytes(rows[0].tolist()).rstrip(b"\0").decode())
        world.barrier()
