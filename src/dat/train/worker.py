"""A worker: everything one step of Algorithm 1 needs, and how each part of it is computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from dat.core.tracing import staged
from dat.distributed import BaseExchange, ScopedBatchNorm, WorkerSubgroup
from dat.objectives import Batch, Objective, Outcome
from dat.train.engine import Engine
from dat.train.inner import InnerMaximization
from dat.train.part import Parts
from dat.train.sampling import Sampler


def never() -> bool:
    """The default `should_stop`: train to the end."""
    return False


@dataclass
class Worker:
    """The components of worker i."""

    sampler: Sampler
    inner: InnerMaximization
    objective: Objective
    exchange: BaseExchange
    engine: Engine
    """Memory layout, precision and compilation of the network."""
    norms: ScopedBatchNorm
    """Which images batch normalization takes its statistics from."""
    optimizer: torch.optim.Optimizer
    parts: Parts = field(default_factory=lambda: Parts(()))
    should_stop: Callable[[], bool] = never
    """Whether this worker received a request to stop."""

    @property
    def subgroup(self) -> WorkerSubgroup:
        """The subgroup of workers that hold the same images."""
        return self.sampler.subgroup

    @staged("data")
    def draw(self, epoch: int, step: int) -> Batch:
        """The worker's share of a global batch, in the network's memory layout."""
        batch = self.sampler.draw(epoch, step)
        for change in self.parts.hooks("on_batch"):
            batch = change(self, batch, epoch, step)
        return replace(batch, x=self.engine.to_memory_format(batch.x))

    @staged("attack")
    def perturb(self, batch: Batch, epoch: int, step: int) -> Tensor:
        """Adversarial examples of a batch."""
        return self.inner.perturb(self, batch, epoch, step)

    def pieces(self, batch: Batch) -> list[tuple[slice, Batch]]:
        """The micro-batches that are computed one after the other. A batch that has grown needs no
        more memory than before, and batch norms see no more images at a time."""
        lengths = batch.lengths or (len(batch.y),)
        most = self.engine.compute.pieces
        if most > 1:
            most = self.norms.min_over_subgroup(min(most, max(min(lengths), 1)))
        cuts, first = list[slice](), 0
        for count in lengths:
            rows = self.engine.pieces(count, most)
            cuts += [slice(first + cut.start, first + cut.stop) for cut in rows]
            first += count
        return [(rows, batch.select(rows) if len(cuts) > 1 else batch) for rows in cuts]

    @staged("update/forward")
    def forward(self, batch: Batch, x_adv: Tensor) -> Outcome:
        """The objective on the worker's share of the batch. With several pieces, all but the last
        also run their backward pass, without communication."""
        self.optimizer.zero_grad()
        x_adv.grad = None  # that of free AT, from AWP's own pass
        *early, (rows, last) = self.pieces(batch)
        done = []
        for cut, piece in early:
            with self.exchange.no_sync():
                outcome = self._outcome(piece, x_adv[cut])
                self.backward(outcome, piece)
            done.append(Outcome(outcome.loss.detach(), outcome.logits.detach()))
        done.append(self._outcome(last, x_adv[rows] if early else x_adv))
        return done[0] if not early else Outcome(*map(torch.cat, zip(*done, strict=True)))

    def _outcome(self, piece: Batch, x_adv: Tensor) -> Outcome:
        network, model = self.engine.cast(self.exchange), self.exchange.module
        with self.norms.patch(model, len(piece.y)), self.engine.updating():
            return self.objective.loss(network, piece, x_adv)

    @staged("update/backward")
    def backward(self, outcome: Outcome, batch: Batch) -> None:
        """The worker's share of the mean loss's gradient, which the exchange sums. The exchange
        also divides it by the loss scale."""
        share = (outcome.loss * batch.weight).sum() / batch.total
        (share * self.exchange.loss_scale).backward()
