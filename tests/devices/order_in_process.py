"""The collectives of four workers, which run one after the other with echoes for the others."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from dat.attacks import PGD
from dat.core import devices
from dat.data import ImageData
from dat.distributed import CONCRETE_PROTOCOLS, Buckets, World, exchange, reducer
from dat.objectives import OBJECTIVES
from dat.train import checkpoint
from dat.train.checkpointer import Checkpointer
from tests.devices.echo_group import Collective, echo_world
from tests.devices.order import SCHEDULES, deadlock, first_mismatch
from tests.devices.traced import TracedDevice, build
from tests.trainers import make_trainer

WORKERS = len(SCHEDULES)
CPU = torch.device("cpu")


def model() -> nn.Module:
    """Two batch norms, which are synchronized between the buckets of the gradient."""
    return nn.Sequential(
        nn.Flatten(),
        *(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.ReLU()),
        *(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()),
        nn.Linear(8, 3),
    )


class SmallBuckets(exchange._Parallel):
    """A bucket for each parameter."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options | {"bucket_cap_mb": 1e-5})


def issued_by_all(root: Path, device: torch.device, **given: Any) -> dict[int, list[Collective]]:
    """The collectives of a run with synchronized batch norms, subgroups, a quantized exchange with
    error feedback, gathered statistics, evaluation, and a checkpoint after each step. Each worker's
    threads have another schedule."""
    logs = {}
    for rank, schedule in enumerate(SCHEDULES):
        torch.manual_seed(0)
        with (
            echo_world(rank, WORKERS, ("cpu", "traced")) as log,
            replace(schedule).applied(),
            patch.object(exchange, "_Parallel", SmallBuckets),
            patch.object(checkpoint, "_wait_for_workers"),  # the others write none
        ):
            train(World(rank, WORKERS, device, "echo", False), root / str(rank), given)
        logs[rank] = list(log)
    return logs


def train(world: World, root: Path, given: dict[str, Any]) -> None:
    images, labels = torch.rand(60, 3, 2, 2), torch.arange(60) % 3
    settings = dict(given)
    if "shard" not in given:  # what a sharded model does not support
        settings |= {"objective": OBJECTIVES["smooth"](), "team": 2, "bn": "sync"}
        settings["quantizer"] = Buckets(bits=8, error_feedback=given["protocol"] != "hybrid")
        inside = {"inside": 2} if given["protocol"] == "hybrid" else {}
        settings["protocol"] = CONCRETE_PROTOCOLS[given["protocol"]](**inside)
    trainer = make_trainer(
        model=model().to(world.device),
        data=ImageData.of(images[:48], labels[:48]),
        holdout=ImageData.of(images[48:], labels[48:]),
        world=world,
        epochs=1,
        batch=24,
        attack=PGD(steps=1),
        callbacks=[Checkpointer(root, every=1)],
        **settings,
    )
    trainer.fit()


# Faults


@contextmanager
def lanes_share_a_group() -> Iterator[None]:
    """Both stages of a protocol in the same process group."""

    class Shared:
        def __init__(self) -> None:
            self.group: Any = None

        def __getattr__(self, name: str) -> Any:
            return getattr(dist, name)

        def new_group(self, **given: Any) -> Any:
            last, self.group = self.group, None
            if last is None:
                self.group = last = dist.new_group(**given)
            return last

        def destroy_process_group(self, group: Any) -> None:
            """Left to the default group."""

    with patch.object(reducer, "dist", Shared()):
        yield


@contextmanager
def the_writer_of_checkpoints_waits_for_the_others() -> Iterator[None]:
    """A collective in the thread that writes checkpoints."""
    write = checkpoint.write_worker

    def wait_and_write(*given: Any, **options: Any) -> None:
        dist.barrier()
        write(*given, **options)

    with patch.object(checkpoint, "write_worker", wait_and_write):
        yield


class ThreadOnAccelerator(reducer._Enqueuer):
    """The reducer as it was: on accelerators too, a thread issues the collectives."""

    def __init__(self, world: World, ledger: Any) -> None:
        super().__init__(world, ledger)
        self._queue = vars(reducer)["queue"].SimpleQueue()  # the schedule's
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def put(self, job: Any) -> None:
        self._queue.put((job, devices.record_event(job.gradient.device)))

    def _serve(self) -> None:
        while (item := self._queue.get()) is not None:
            job, ready = item
            ready.wait()
            super().put(job)

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()
        super().close()


def threads_on_accelerators() -> Any:
    return patch.object(reducer, "_Enqueuer", ThreadOnAccelerator)


# Checks on the traced device


def run(check: str, *details: Any) -> None:
    torch.set_num_threads(1)
    torch.compiler.set_stance("force_eager")
    globals()[check](TracedDevice(build()).device, *details)


def accelerators_take_the_program_s_order(
    device: torch.device, root: Path, given: dict[str, Any]
) -> None:
    logs = issued_by_all(root, device, **given)
    assert first_mismatch(logs) == ""
    assert deadlock(logs) == ""
    threads = {issued.thread for log in logs.values() for issued in log}
    own = {thread for thread in threads if thread.startswith("Dummy")}  # of autograd
    assert threads - own == {"MainThread"}, threads
    assert own or "shard" in given


def a_thread_on_accelerators_is_a_deadlock(device: torch.device, root: Path) -> None:
    with threads_on_accelerators():
        logs = issued_by_all(root, device, protocol="chunked")
    assert first_mismatch(logs) == ""  # each group by itself is in order
    stuck = deadlock(logs)
    assert "waits for" in stuck, stuck
    assert len({words.split("group ")[1][0] for words in stuck.split(";")}) > 1, stuck


def a_collective_of_the_writer_is_found(device: torch.device, root: Path) -> None:
    with the_writer_of_checkpoints_waits_for_the_others():
        logs = issued_by_all(root, device, protocol="chunked")
    assert deadlock(logs)
    assert first_mismatch(logs)
