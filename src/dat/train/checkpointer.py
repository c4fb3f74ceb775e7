"""Saves a run's checkpoints in the background, and resumes from them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dat.distributed import TensorShard, shard_of
from dat.train import checkpoint
from dat.train.callbacks import Callback
from dat.train.checkpoint import InvalidCheckpoint, Tensors
from dat.train.errors import Preempted
from dat.train.exchange import ErrorFeedback
from dat.train.inner import inner_class
from dat.train.records import EpochRecord, EpochTally
from dat.train.resharding import local_shards, reshard_optimizer, reshard_weights
from dat.train.worker import never

if TYPE_CHECKING:
    from dat.train.step import StepReport
    from dat.train.trainer import Trainer


def state_of(trainer: Trainer) -> dict[str, Any]:
    """The state that is the same on all workers."""
    return {
        "workers": trainer.world.size,
        "shard": trainer.exchange.sharding.size if trainer.sharded else None,
        "batch": trainer.batch,
        "samples": trainer.samples,
        "updates": trainer.updates,
        "discarded_seconds": trainer.discarded_seconds,
        "records": [record._asdict() for record in trainer.records],
        "tally": trainer.tally.state_dict(),
        "model": trainer.model.state_dict(),
        "optimizer": trainer.worker.optimizer.state_dict(),
    } | trainer.parts.state_dict(trainer)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was read and verified."""

    state: dict[str, Any]
    worker_files: dict[str, Path]
    """The workers' own files, by name."""
    folder: Path

    @classmethod
    def last(cls, root: Path, report: Callable[[str], None]) -> Checkpoint | None:
        """The last valid checkpoint of a run; invalid ones are reported and skipped."""
        for folder in checkpoint.all_checkpoints(root):
            try:
                state, files = checkpoint.read(folder)
                return cls(state, {path.name: path for path in files}, folder)
            except (InvalidCheckpoint, OSError) as error:
                report(f"{error}; going back to the checkpoint before it")
        return None

    @property
    def updates(self) -> int:
        return int(self.state["updates"])

    def changes(self, trainer: Trainer) -> list[str]:
        """What differs from the run that was interrupted."""
        before, now = self.state["workers"], trainer.world.size
        if before == now:
            return []
        notes = ""
        if self.worker_files and trainer.exchange.quantizer.error_feedback:
            notes += ErrorFeedback.dropped
        if self.worker_files:
            notes += inner_class(trainer.attack).dropped
        return [
            f"resumed on {now} workers instead of {before}: the global batch of {trainer.batch} "
            f"and the order of the data do not change{notes}"
        ]

    def restore(self, trainer: Trainer) -> None:
        """Load the state into a trainer whose workers have joined."""
        state = self.state
        if (state["batch"], state["samples"]) != (trainer.batch, trainer.samples):
            raise InvalidCheckpoint(
                f"{self.folder}: belongs to a run on {state['samples']} images in batches of "
                f"{state['batch']}, not {trainer.samples} and {trainer.batch}"
            )
        model, optimizer = trainer.model, trainer.worker.optimizer
        model.load_state_dict(reshard_weights(state["model"], model.state_dict()))
        optimizer.load_state_dict(reshard_optimizer(state["optimizer"], optimizer))
        _restore_memory_format(optimizer)
        trainer.records[:] = [EpochRecord(**record) for record in state["records"]]
        trainer.tally = EpochTally.of(state["tally"])
        trainer.updates = state["updates"]
        trainer.discarded_seconds = state["discarded_seconds"]
        try:
            trainer.parts.call("load_state_dict", state, trainer)
        except ValueError as error:
            raise InvalidCheckpoint(f"{self.folder}: {error}") from None
        self._restore_workers(trainer)

    def _restore_workers(self, trainer: Trainer) -> None:
        """Load each worker's own state, or redistribute it to another number of workers."""
        if self.state["workers"] != trainer.world.size:
            for part in trainer.parts:
                part.load_worker_states(map(checkpoint.read_worker, self.worker_files.values()))
            return
        path = self.worker_files.get(f"worker-{trainer.world.rank}.safetensors")
        trainer.parts.call("load_worker_state", checkpoint.read_worker(path) if path else {})


def _restore_memory_format(optimizer: torch.optim.Optimizer) -> None:
    """Give moments the memory format of their parameter (e.g. channels last), which files do not
    save: norms are summed in memory order, and another order rounds differently."""
    for parameter, moments in optimizer.state.items():
        if shard_of(parameter) is not None:
            continue  # shards are always contiguous
        for name, value in moments.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                moments[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


class Checkpointer(Callback):
    """Saves checkpoints in the background. A failure is reported, and the last good one is kept.

    Every worker has one, as its last callback."""

    def __init__(
        self,
        root: Path,
        *,
        every: int = 0,
        keep: int = 2,
        report: Callable[[str], None] = print,
        code: Sequence[str] = (),
        stopping: Callable[[], bool] = never,
    ) -> None:
        """`code` lists the settings that name code, which the command to resume has to repeat;
        `stopping` returns whether the run received a request to stop."""
        self.root, self.every, self.keep = root, every, keep
        self.report, self.code, self.stopping = report, code, stopping
        self._number = 0
        self._writer: threading.Thread | None = None
        self._error: str | None = None

    def should_stop(self) -> bool:
        return self.stopping()

    def on_step_end(self, trainer: Trainer, epoch: int, report: StepReport) -> None:
        due = self.every and trainer.updates % self.every == 0
        if report.stop or due:
            self.save(trainer)
        if report.stop:
            self.close()
            arguments = " ".join([str(self.root.parent), *self.code])
            raise Preempted(
                f"stopped on request after epoch {len(trainer.records) + 1}, step "
                f"{trainer.tally.step}\nresume with: dat train --resume {arguments}"
            )

    def on_epoch_end(self, trainer: Trainer, record: EpochRecord) -> None:
        self.save(trainer)

    def on_fit_end(self, trainer: Trainer) -> None:
        self.close()

    def save(self, trainer: Trainer) -> None:
        """Copy the state now and write it in the background, one checkpoint at a time."""
        self._wait()
        self._number += 1
        trainer.read_times()
        number = self._number
        step, rank, first = trainer.updates, trainer.world.rank, trainer.world.first
        own, tensors, packed = trainer.parts.worker_state(), Tensors(), None
        shards: dict[str, TensorShard] = {}
        if first or trainer.sharded:
            packed = checkpoint.pack(state_of(trainer), tensors)
        if trainer.sharded:
            local, shards = local_shards(tensors)
            tensors = {name: value for name, value in tensors.items() if name not in shards}
            if rank < (trainer.exchange.sharding.size or 0):  # other ranks hold the same shards
                own |= local
            else:
                shards = {}
        own, tensors = checkpoint.copy_to_cpu(own), checkpoint.copy_to_cpu(tensors if first else {})
        writes = bool(own) or trainer.sharded
        owners = trainer.world.size if writes else 0
        kind = checkpoint.SHARDED if trainer.sharded else checkpoint.FORMAT
        best, timeout = trainer.best_epoch(), trainer.world.timeout

        def write_files() -> None:
            try:
                if writes:
                    checkpoint.write_worker(self.root, step, rank, own, shards, number=number)
                if first:
                    write = partial(checkpoint.write, kind=kind, number=number, timeout=timeout)
                    write(self.root, step, packed, tensors, owners)
                    spare = partial(_is_end_of, epoch=best)
                    checkpoint.prune(self.root, self.keep, spare, number=number)
                self._error = None
            except OSError as error:
                self._error = error.strerror or str(error)

        self._writer = threading.Thread(target=write_files, name="checkpoint")
        self._writer.start()

    def roll_back(self, trainer: Trainer) -> None:
        """Return to the last checkpoint; a collective call."""
        self._wait()
        trainer.world.barrier()
        last = Checkpoint.last(self.root, self.report if trainer.world.first else _ignore)
        if last is None:
            raise InvalidCheckpoint(
                f"{self.root}: no checkpoint to roll back to yet; use train.guard=skip"
            )
        last.restore(trainer)
        trainer.tally.start()

    def _wait(self) -> None:
        if self._writer is None:
            return
        self._writer.join()
        self._writer = None
        if self._error:
            last = next(iter(checkpoint.all_checkpoints(self.root)), None)
            kept = f"the last good one is {last}" if last else "the run has none yet"
            self.report(f"warning: a checkpoint could not be written ({self._error}); {kept}")

    def close(self) -> None:
        """Wait until the current checkpoint is written."""
        self._wait()


def _is_end_of(state: Any, epoch: int | None) -> bool:
    """Whether a checkpoint was saved at the end of this epoch."""
    return len(state["records"]) == epoch and state["tally"]["step"] == 0


def _ignore(message: str) -> None:
    """Rank 0 reports it."""
