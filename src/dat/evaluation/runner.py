"""Run rounds of attacks on a dataset, on all workers, resumable.

Images are independent of each other: the random numbers of an image derive from the seed and its
index, and it is attacked until an attack breaks it. Whether it is broken is decided by the model as
given, not by the faster copy under attack. Before each round, the remaining images are distributed
again and packed into full batches, so all workers stay equally busy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from dat.attacks import AttackTarget, attack_mode
from dat.attacks.suites import Round, attack_names
from dat.core.deprecation import RenamedAttribute
from dat.core.precision import PRECISIONS, in_precision
from dat.core.progress import Progress, silent
from dat.core.rng import Streams, seeded
from dat.core.short_repr import short_repr
from dat.core.threat import ThreatModel, per_sample
from dat.data import ImageData
from dat.distributed import World
from dat.evaluation.progress_file import Cost, EvaluationPart, SuiteProgress
from dat.models import lies_contiguous

FIXED_BATCH = 64
"""The largest batch if results must not depend on the number of workers, not even by rounding."""
BACKWARD = 2
"""Cost of a backward pass, in forward passes."""


@dataclass
class SuiteResult:
    """Which attack of a suite broke which image."""

    attacks: tuple[str, ...]
    broken_by: Tensor
    """Per image, the number (from 1) of the attack that broke it; 0 if it is robust, -1 if it was
    not attacked."""
    costs: dict[str, Cost] = field(default_factory=dict)
    examples: Tensor | None = None
    """Adversarial examples of broken images; elsewhere the image itself."""

    fell = RenamedAttribute("broken_by")
    standing = RenamedAttribute("robust")
    fallen = RenamedAttribute("broken")

    __repr__ = short_repr

    @property
    def robust(self) -> Tensor:
        """Which images survived all attacks."""
        return self.broken_by == 0

    def broken(self) -> dict[str, list[int]]:
        """The images that each attack broke."""
        numbered = enumerate(self.attacks, 1)
        return {name: (self.broken_by == i).nonzero().squeeze(1).tolist() for i, name in numbered}

    def counts(self) -> dict[str, int]:
        """The number of images that each attack broke."""
        return {name: len(images) for name, images in self.broken().items()}


class CountingNetwork:
    """A network that counts forward and backward passes."""

    def __init__(
        self, network: Callable[[Tensor], Tensor], precision: str, on_work: Callable[[int], None]
    ) -> None:
        self.network, self.on_work = in_precision(network, PRECISIONS[precision]), on_work
        self.forwards = self.backwards = 0

    def __call__(self, x: Tensor) -> Tensor:
        backward = x.requires_grad and torch.is_grad_enabled()
        self.forwards += len(x)
        self.backwards += len(x) * backward
        logits: Tensor = self.network(x)
        self.on_work(len(x) * (1 + BACKWARD * backward))
        return logits


@dataclass
class Runner:
    """Runs rounds of attacks on one model and dataset."""

    model: nn.Module
    """As given: it decides whether an image is broken."""
    network: nn.Module
    """What the attacks work on, possibly a faster copy."""
    data: ImageData
    threat: ThreatModel
    world: World
    batch: int = 256
    seed: int = 0
    precision: str = "float32"
    """Of the network under attack; the deciding model keeps its own."""
    progress: Progress = silent
    """Gets the work in forward passes of one sample."""
    keep: bool = False
    """Keep the adversarial examples."""
    fixed_batches: bool = False
    """Attack the same batches with any number of workers: sums inside a network are rounded in
    another order if the size of the batch changes, and the last bits of an adversarial example with
    them."""
    pending: int = 0
    """Estimated work of the suites that have not started yet."""

    def __post_init__(self) -> None:
        self._contiguous = lies_contiguous(self.model) or lies_contiguous(self.network)
        self._work = _WorkCounter(lambda done, total: self.progress(done, total + self.pending))

    def expect(self, rounds: Sequence[Round], images: int) -> None:
        """Announce future work to the progress report."""
        self.pending += -(-images // self.world.size) * sum(map(_cost, rounds))

    def run(
        self,
        rounds: Sequence[Round],
        candidates: Tensor,
        progress_file: SuiteProgress | None = None,
    ) -> SuiteResult:
        """Attack the images marked by `candidates`. All workers call this, and all get the same
        result, including the adversarial examples if they are kept."""
        names = attack_names(rounds)
        result = SuiteResult(names, torch.zeros(len(self.data), dtype=torch.int64))
        result.broken_by[~candidates] = -1
        share = -(-int(candidates.sum()) // self.world.size)
        self.pending = max(self.pending - share * sum(map(_cost, rounds)), 0)
        # every worker reads before any writes, so none mistakes new batches for earlier progress
        earlier = self.world.run_or_fail_together(
            lambda: list(progress_file.read()) if progress_file else []
        )
        batches = list(earlier) if self.world.first else []
        with attack_mode(self.model), attack_mode(self.network):
            for number, turn in enumerate(rounds):
                attack_number = 1 + names.index(turn.name)
                done = [batch for batch in earlier if batch.round == number]
                for batch in done:
                    result.broken_by[batch.rows[batch.broken]] = attack_number
                later = sum(_cost(other) for other in rounds[number + 1 :])
                remaining = _without(result.robust, done)
                new = self._round(number, turn, remaining, later, progress_file)
                batches += new
                result.broken_by[self._broken(new)] = attack_number
        self._work.finish()
        result.costs = self._costs(rounds, batches)
        if self.keep:
            result.examples = self._examples(batches)
        return result

    def _round(
        self,
        number: int,
        turn: Round,
        remaining: Tensor,
        later: int,
        progress_file: SuiteProgress | None,
    ) -> list[EvaluationPart]:
        """This worker's share of a round; `later` is the cost per image of the rounds after it."""
        mine = self._share(remaining.nonzero().squeeze(1))
        self._work.remaining = sum(map(len, mine)) * (_cost(turn) + later)
        batches = []
        for rows in mine:
            with self._work.batch(len(rows) * _cost(turn)):
                batch = self._attack(turn, number, rows)
            self._work.remaining -= int(batch.broken.sum()) * later
            batches.append(batch)
            if progress_file:
                progress_file.write(batch)
        return batches

    def _share(self, rows: Tensor) -> Sequence[Tensor]:
        """This worker's batches."""
        if self.fixed_batches:
            return rows.split(self.batch)[self.world.rank :: self.world.size] if len(rows) else ()
        return _batches(rows.tensor_split(self.world.size)[self.world.rank], self.batch)

    def _broken(self, batches: list[EvaluationPart]) -> Tensor:
        """Which images were broken, on any worker."""
        broken = torch.zeros(len(self.data), dtype=torch.int64)
        for batch in batches:
            broken[batch.rows[batch.broken]] = 1
        return self.world.sum(broken) > 0

    def _costs(self, rounds: Sequence[Round], batches: list[EvaluationPart]) -> dict[str, Cost]:
        names = attack_names(rounds)
        totals = torch.zeros(len(names), len(Cost._fields), dtype=torch.float64)
        for batch in batches:
            cost = torch.tensor(batch.cost, dtype=torch.float64)
            totals[names.index(rounds[batch.round].name)] += cost
        seconds, *counts = self.world.sum(totals).T.tolist()
        rows = zip(names, seconds, *(map(int, row) for row in counts), strict=True)
        return {name: Cost(*row) for name, *row in rows}

    def _attack(self, turn: Round, number: int, rows: Tensor) -> EvaluationPart:
        start = time.perf_counter()
        network = CountingNetwork(self.network, self.precision, self._work.add)
        device = self.world.device
        x, y = self.data.batch(rows, device)
        if x.dim() == 4 and not self._contiguous:
            x = x.contiguous(memory_format=torch.channels_last)
        draws = Streams.of(self.seed, "evaluate", index=self.data.number(rows).to(device)).fork(
            "restart", turn.turn
        )
        with seeded(device, self.seed, f"model/{turn.name}", turn.turn, int(rows[0])):
            x_adv = turn.attack(AttackTarget(network, y, until_broken=True), x, self.threat, draws)
            with torch.no_grad():
                broken = AttackTarget(self.model, y).misclassified(self.model(x_adv)).cpu()
        examples = x_adv.cpu()[broken].contiguous() if self.keep else None
        seconds = time.perf_counter() - start
        cost = Cost(seconds, network.forwards + len(rows), network.backwards)
        return EvaluationPart(number, rows, broken, cost, examples)

    def _examples(self, batches: list[EvaluationPart]) -> Tensor:
        """The examples of all workers: each contributes its own, and zeros elsewhere."""
        images, _ = self.data.batch(torch.arange(len(self.data)), torch.device("cpu"))
        examples = torch.zeros_like(images)
        for batch in batches:
            assert batch.examples is not None
            examples[batch.rows[batch.broken]] = batch.examples
        broken = per_sample(self._broken(batches), images)
        return torch.where(broken, self.world.sum(examples), images)


class _WorkCounter:
    """Work done and remaining on this worker."""

    def __init__(self, progress: Progress) -> None:
        self.progress, self.done, self.remaining, self._batch = progress, 0, 0, 0

    @contextmanager
    def batch(self, cost: int) -> Iterator[None]:
        """A batch of at most that cost; images that are broken early make it cheaper."""
        self.remaining, self._batch = self.remaining - cost, cost
        yield
        self._batch = 0

    def finish(self) -> None:
        """The remaining work has turned out to be unnecessary."""
        self.remaining = 0
        self.add(0)

    def add(self, count: int) -> None:
        self.done += count
        self._batch = max(self._batch - count, 0)
        self.progress(self.done, self.done + self._batch + self.remaining)


def _without(rows: Tensor, done: list[EvaluationPart]) -> Tensor:
    rows = rows.clone()
    for batch in done:
        rows[batch.rows] = False
    return rows


def _cost(turn: Round) -> int:
    return turn.attack.cost() + 1


def _batches(rows: Tensor, batch: int) -> Sequence[Tensor]:
    """Full batches of nearly equal size."""
    return rows.tensor_split(-(-len(rows) // batch)) if len(rows) else ()
