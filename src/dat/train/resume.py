"""What a run is at a moment, written down in the background, and taken up again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dat.attacks import PGD, Free
from dat.comm import Part, Traffic, part_of
from dat.optim import EMA
from dat.train import checkpoint
from dat.train.checkpoint import Refused, Tensors
from dat.train.growth import Growth
from dat.train.parted import fit_moments, fit_weights, split
from dat.train.records import EpochRecord, Tally
from dat.train.sentinel import Collapse, Snapshot

if TYPE_CHECKING:
    from dat.train.trainer import Trainer


class Preempted(Exception):
    """The run was asked to stop, and has left a checkpoint; every worker raises it alike."""

    everywhere = True
    resumable = True


def state_of(trainer: Trainer) -> dict[str, Any]:
    """Everything that all workers have alike."""
    tally, watch = trainer.tally, trainer.watch
    return {
        "workers": trainer.world.size,
        "shard": trainer.shard if trainer.sharded else None,
        "batch": trainer.batch,
        "growth": [list(trainer.growth.at), trainer.growth.by],
        "samples": trainer.samples,
        "updates": trainer.updates,
        "discarded_seconds": trainer.discarded_seconds,
        "left_out": trainer.left_out,
        "records": [record._asdict() for record in trainer.records],
        "tally": {
            "step": tally.step,
            "taken": tally.taken,
            "loss": tally.loss,
            "right": tally.right,
            "traffic": list(tally.traffic),
            "seconds": tally.elapsed if tally.step else 0.0,
            "attack": tally.attack,
            "update": tally.update,
        },
        "model": trainer.model.state_dict(),
        "optimizer": trainer.worker.optimizer.state_dict(),
        "averaged": trainer._averaged.state_dict() if trainer._averaged else None,
        "best": trainer.best.state(trainer.models()),
        "seen": watch.seen,
        "collapses": [list(collapse) for collapse in watch.collapses],
        "rescued": trainer.worker.attack is not trainer.attack,
        "good": asdict(watch.good) if watch.good else None,
    }


def own_of(trainer: Trainer) -> Tensors:
    """What a worker has for itself: what rounding left over, the images of free AT, perturbations
    that are carried along."""
    worker = trainer.worker
    memories = enumerate(worker.exchange.memories)
    own = {f"left/{number}": memory.left for number, memory in memories}
    own |= {f"replayed/{i}": it for i, it in enumerate(worker.replayed)}
    return own | (worker.carried.state() if worker.carried else {})


@dataclass(frozen=True)
class Resumption:
    """A checkpoint that was read and verified."""

    state: dict[str, Any]
    own: dict[str, Path]
    """The workers' own files, by name."""
    place: Path

    @classmethod
    def last(cls, root: Path, tell: Callable[[str], None]) -> Resumption | None:
        """The last whole checkpoint of a run; those that are not are named and passed over."""
        for place in checkpoint.all_checkpoints(root):
            try:
                state, own = checkpoint.read(place)
                return cls(state, {path.name: path for path in own}, place)
            except (Refused, OSError) as error:
                tell(f"{error}; going back to the checkpoint before it")
        return None

    @property
    def updates(self) -> int:
        return int(self.state["updates"])

    def changes(self, trainer: Trainer) -> list[str]:
        """What is not as it was."""
        before, now = self.state["workers"], trainer.world.size
        if before == now:
            return []
        notes = ""
        if self.own and trainer.quantizer.error_feedback:
            notes += "; what rounding had left over at each worker is dropped"
        if self.own and isinstance(trainer.attack, Free):
            notes += "; the batch that was being replayed begins at its images"
        if self.own and isinstance(trainer.attack, PGD) and trainer.attack.carry:
            notes += "; carried perturbations go to the workers that have their images now"
        return [
            f"resumed on {now} workers instead of {before}: the global batch of {trainer.batch} "
            f"and the order of the data stay{notes}"
        ]

    def restore(self, trainer: Trainer) -> None:
        """Bring a trainer, whose workers have met, to where it was."""
        state = self.state
        if (state["batch"], state["samples"]) != (trainer.batch, trainer.samples):
            raise Refused(
                f"{self.place}: is of a run on {state['samples']} images in batches of "
                f"{state['batch']}, not {trainer.samples} and {trainer.batch}"
            )
        self._check_growth(trainer)
        model, optimizer, averaged = trainer.model, trainer.worker.optimizer, trainer._averaged
        model.load_state_dict(fit_weights(state["model"], model.state_dict()))
        optimizer.load_state_dict(fit_moments(state["optimizer"], optimizer))
        _lay_out(optimizer)
        if averaged and state["averaged"]:
            averaged.load_state_dict(_fit_average(state["averaged"], averaged))
        trainer.records[:] = [EpochRecord(**record) for record in state["records"]]
        tally = state["tally"]
        trainer.tally = Tally(**tally | {"traffic": Traffic(*tally["traffic"])})
        trainer.updates = state["updates"]
        trainer.discarded_seconds = state["discarded_seconds"]
        before = [it for it in state["left_out"] if it not in trainer.left_out]
        trainer.left_out[:] = before + trainer.left_out  # what a rollback has just added stays
        watch = trainer.watch
        watch.seen[:] = state["seen"]
        watch.collapses[:] = [Collapse(*it) for it in state["collapses"]]
        watch.good = _fit_good(state["good"], trainer) if state["good"] else None
        if state["rescued"]:
            trainer.use_attack(trainer.sentinel.rescue)
        trainer.best.restore(_fit_best(state["best"], trainer), trainer.models())
        if state["workers"] == trainer.world.size:
            self._restore_own(trainer)
        elif trainer.worker.carried and self.own:
            trainer.worker.carried.restore(map(checkpoint.read_own, self.own.values()))

    def _check_growth(self, trainer: Trainer) -> None:
        """Steps that were taken must be as large as they were; those to come may be others."""
        at, by = self.state.get("growth", [[], 2])
        before, epoch = Growth(tuple(at), by), len(self.state["records"])
        factors = before.factor(epoch), trainer.growth.factor(epoch)
        if self.state["tally"]["step"] and factors[0] != factors[1]:
            raise Refused(
                f"{self.place}: is in the midst of an epoch whose updates take {factors[0]} "
                f"batches, not {factors[1]}; leave train.grow and train.grow_by as they were"
            )

    def _restore_own(self, trainer: Trainer) -> None:
        path = self.own.get(f"worker-{trainer.world.rank}.safetensors")
        own = checkpoint.read_own(path) if path else {}
        device = trainer.world.device
        if trainer.worker.carried:
            trainer.worker.carried.restore([own])
        for number, memory in enumerate(trainer.worker.exchange.memories):
            memory.left.copy_(own[f"left/{number}"])
        replayed = [own[key].to(device) for key in sorted(own) if key.startswith("replayed/")]
        trainer.worker.replayed[:] = replayed


def _lay_out(optimizer: torch.optim.Optimizer) -> None:
    """Moments in their parameter's order in memory (channels last, perhaps), which files do not
    keep: norms are summed in that order, and another one rounds otherwise."""
    for parameter, moments in optimizer.state.items():
        if part_of(parameter) is not None:
            continue  # parts lie in one order only
        for name, value in moments.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                moments[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def _fit_average(saved: dict[str, Any], averaged: EMA) -> dict[str, Any]:
    return saved | {"module": fit_weights(saved["module"], averaged.module.state_dict())}


def _fit_best(saved: dict[str, Any], trainer: Trainer) -> dict[str, Any]:
    live = trainer.models()
    return {
        name: kept | {"weights": fit_weights(kept["weights"], live[name].state_dict())}
        if kept["weights"] is not None
        else kept
        for name, kept in saved.items()
    }


def _fit_good(saved: dict[str, Any], trainer: Trainer) -> Snapshot:
    averages = saved["averages"]
    if averages and trainer._averaged:
        averages = _fit_average(averages, trainer._averaged)
    return Snapshot(
        epoch=saved["epoch"],
        weights=fit_weights(saved["weights"], trainer.model.state_dict()),
        optimizer=fit_moments(saved["optimizer"], trainer.worker.optimizer),
        averages=averages,
    )


class Saver:
    """Writes checkpoints while training goes on; a failure is told, and the last good one stays."""

    def __init__(
        self, root: Path, *, every: int = 0, keep: int = 2, tell: Callable[[str], None] = print
    ) -> None:
        self.root, self.every, self.keep, self.tell = root, every, keep, tell
        self._writing: threading.Thread | None = None
        self._failed: str | None = None

    def step_ended(self, trainer: Trainer, *, stop: bool) -> None:
        due = self.every and trainer.updates % self.every == 0
        if stop or due:
            self.save(trainer)
        if stop:
            self.close()
            raise Preempted(
                f"stopped after epoch {len(trainer.records) + 1}, step {trainer.tally.step}, as "
                f"asked; go on with: dat train --resume {self.root.parent}"
            )

    def epoch_ended(self, trainer: Trainer) -> None:
        self.save(trainer)

    def save(self, trainer: Trainer) -> None:
        """Take a copy now, write it in the background; one at a time."""
        self._wait()
        trainer.read_times()
        step, rank, first = trainer.updates, trainer.world.rank, trainer.world.first
        own, tensors, packed = own_of(trainer), Tensors(), None
        parts: dict[str, Part] = {}
        if first or trainer.sharded:
            packed = checkpoint.pack(state_of(trainer), tensors)
        if trainer.sharded:
            mine, parts = split(tensors)
            tensors = {name: value for name, value in tensors.items() if name not in parts}
            if rank < (trainer.shard or 0):  # others have the same parts
                own |= mine
            else:
                parts = {}
        own, tensors = checkpoint.copied(own), checkpoint.copied(tensors if first else {})
        writes = bool(own) or trainer.sharded
        owners = trainer.world.size if writes else 0
        kind = checkpoint.SHARDED if trainer.sharded else checkpoint.FORMAT
        best = trainer.best.found.get("", (None, None))[1]

        def write() -> None:
            try:
                if writes:
                    checkpoint.write_own(self.root, step, rank, own, parts)
                if first:
                    checkpoint.write(self.root, step, packed, tensors, owners, kind=kind)
                    checkpoint.tidy(self.root, self.keep, partial(_ended_with, epoch=best))
                self._failed = None
            except OSError as error:
                self._failed = error.strerror or str(error)

        self._writing = threading.Thread(target=write, name="checkpoint")
        self._writing.start()

    def go_back(self, trainer: Trainer) -> None:
        """To the last checkpoint, or if there is none to the beginning of the epoch."""
        self._wait()
        trainer.world.meet()
        last = Resumption.last(self.root, self.tell if trainer.world.first else silent)
        if last is None:
            raise Refused(f"{self.root}: no checkpoint to go back to yet; use train.guard=skip")
        last.restore(trainer)
        trainer.tally.start()

    def _wait(self) -> None:
        if self._writing is None:
            return
        self._writing.join()
        self._writing = None
        if self._failed:
            last = next(iter(checkpoint.all_checkpoints(self.root)), None)
            kept = f"the last good one is {last}" if last else "there is none yet"
            self.tell(f"warning: a checkpoint could not be written ({self._failed}); {kept}")

    def close(self) -> None:
        """Wait for what is being written."""
        self._wait()


def _ended_with(state: Any, epoch: int | None) -> bool:
    """Whether this is what a run was at the end of that epoch."""
    return len(state["records"]) == epoch and state["tally"]["step"] == 0


def silent(message: str) -> None:
    """Leaves it to the first worker to tell."""
