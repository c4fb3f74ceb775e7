"""Who is still standing: rounds of attacks on a set of images, by all workers, resumable.

Every image is judged by itself. Its random numbers come from the seed and its number; it is
attacked until it falls, and then no more; and whether it has fallen is asked of the model as it was
given, not of the faster copy that the attacks work on. Before each round the images that are left
are dealt out again, so the workers stay equally busy, and packed into full batches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from dat.attacks import Victim, attack_mode
from dat.comm import World
from dat.data import ImageData
from dat.evaluation.journal import Cost, Journal, Part
from dat.evaluation.suites import Round, attack_names
from dat.rng import Draws, seeded
from dat.threat import ThreatModel, per_sample

Progress = Callable[[int, int], None]
"""Called with the work that is done and the work there is, in forward passes of a sample."""
PRECISIONS = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
BACKWARD = 2
"""A backward pass, in forward passes."""


def silent(done: int, total: int) -> None:
    """Shows no progress."""


@dataclass
class Verdicts:
    """Who fell to what."""

    attacks: tuple[str, ...]
    fell: Tensor
    """For each image the number of the attack that it fell to, counted from 1; 0 if it stands, and
    -1 if it was no candidate."""
    costs: dict[str, Cost] = field(default_factory=dict)
    examples: Tensor | None = None
    """The adversarial examples that were found; where none was, the image itself."""

    @property
    def standing(self) -> Tensor:
        return self.fell == 0

    def fallen(self) -> dict[str, list[int]]:
        """Who fell to each attack."""
        numbers = enumerate(self.attacks, 1)
        return {n: (self.fell == i).nonzero().squeeze(1).tolist() for i, n in numbers}

    def counts(self) -> dict[str, int]:
        """How many fell to each attack."""
        return {name: len(images) for name, images in self.fallen().items()}


class Watched:
    """A network that counts what it is asked."""

    def __init__(
        self, network: Callable[[Tensor], Tensor], precision: str, tell: Callable[[int], None]
    ) -> None:
        self.network, self.precision, self.tell = network, PRECISIONS[precision], tell
        self.forwards = self.backwards = 0

    def __call__(self, x: Tensor) -> Tensor:
        back = x.requires_grad and torch.is_grad_enabled()
        self.forwards += len(x)
        self.backwards += len(x) * back
        if self.precision == torch.float32:
            logits = self.network(x)
        else:
            with torch.autocast(x.device.type, self.precision):
                logits = self.network(x).float()
        self.tell(len(x) * (1 + BACKWARD * back))
        return logits


@dataclass
class Surveyor:
    """What all rounds of an evaluation have in common."""

    model: nn.Module
    """As it was given: it has the last word."""
    network: nn.Module
    """What the attacks work on."""
    data: ImageData
    threat: ThreatModel
    world: World
    batch: int = 256
    seed: int = 0
    precision: str = "float32"
    """In which the network computes while it is attacked; the model's last word is in its own."""
    progress: Progress = silent
    keep: bool = False
    """Keep the adversarial examples."""
    ahead: int = 0
    """Work of surveys to come, as far as it is known."""

    def __post_init__(self) -> None:
        self._work = _Work(lambda done, total: self.progress(done, total + self.ahead))

    def expect(self, rounds: Sequence[Round], images: int) -> None:
        """More work to come, for the progress."""
        self.ahead += -(-images // self.world.size) * sum(map(_cost, rounds))

    def survey(
        self,
        rounds: Sequence[Round],
        candidates: Tensor,
        journal: Journal | None = None,
    ) -> Verdicts:
        """Attack the images that `candidates` marks; called by every worker, and all get the same
        verdicts. (The examples, if they are kept, are all at every worker.)"""
        names = attack_names(rounds)
        verdicts = Verdicts(names, torch.zeros(len(self.data), dtype=torch.int64))
        verdicts.fell[~candidates] = -1
        share = -(-int(candidates.sum()) // self.world.size)
        self.ahead = max(self.ahead - share * sum(map(_cost, rounds)), 0)
        # all have read before anybody writes: who came late would take the others' news for old
        before = self.world.together(lambda: list(journal.read()) if journal else [])
        found = list(before) if self.world.first else []
        with attack_mode(self.model), attack_mode(self.network):
            for number, turn in enumerate(rounds):
                code = 1 + names.index(turn.name)
                done = [part for part in before if part.round == number]
                for part in done:
                    verdicts.fell[part.rows[part.fell]] = code
                later = sum(_cost(other) for other in rounds[number + 1 :])
                todo = _without(verdicts.standing, done)
                parts = self._round(number, turn, todo, later, journal)
                found += parts
                verdicts.fell[self._told(parts)] = code
        self._work.settle()
        verdicts.costs = self._costs(rounds, found)
        if self.keep:
            verdicts.examples = self._collect(found)
        return verdicts

    def _round(
        self, number: int, turn: Round, todo: Tensor, later: int, journal: Journal | None
    ) -> list[Part]:
        """This worker's share of a round; `later` is what an image costs that survives it."""
        mine = todo.nonzero().squeeze(1).tensor_split(self.world.size)[self.world.rank]
        self._work.left = len(mine) * (_cost(turn) + later)
        parts = []
        for rows in _batches(mine, self.batch):
            with self._work.batch(len(rows) * _cost(turn)):
                part = self._attack(turn, number, rows)
            self._work.left -= int(part.fell.sum()) * later
            parts.append(part)
            if journal:
                journal.write(part)
        return parts

    def _told(self, parts: list[Part]) -> Tensor:
        """Who fell, at any worker."""
        fell = torch.zeros(len(self.data), dtype=torch.int64)
        for part in parts:
            fell[part.rows[part.fell]] = 1
        return self.world.sum(fell) > 0

    def _costs(self, rounds: Sequence[Round], parts: list[Part]) -> dict[str, Cost]:
        names = attack_names(rounds)
        spent = torch.zeros(len(names), len(Cost._fields), dtype=torch.float64)
        for part in parts:
            cost = torch.tensor(part.cost, dtype=torch.float64)
            spent[names.index(rounds[part.round].name)] += cost
        seconds, *counts = self.world.sum(spent).T.tolist()
        rows = zip(names, seconds, *(map(int, row) for row in counts), strict=True)
        return {name: Cost(*row) for name, *row in rows}

    def _attack(self, turn: Round, number: int, rows: Tensor) -> Part:
        start, watched = time.perf_counter(), Watched(self.network, self.precision, self._work.did)
        device = self.world.device
        x, y = self.data.batch(rows, device)
        if x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        draws = Draws.of(self.seed, "evaluate", index=self.data.number(rows).to(device)).fork(
            "restart", turn.turn
        )
        with seeded(device, self.seed, f"model/{turn.name}", turn.turn, int(rows[0])):
            x_adv = turn.attack(Victim(watched, y, until_broken=True), x, self.threat, draws)
            with torch.no_grad():
                fell = Victim(self.model, y).wrong(self.model(x_adv)).cpu()
        examples = x_adv.cpu()[fell].contiguous() if self.keep else None
        spent = time.perf_counter() - start
        cost = Cost(spent, watched.forwards + len(rows), watched.backwards)
        return Part(number, rows, fell, cost, examples)

    def _collect(self, parts: list[Part]) -> Tensor:
        """All workers' examples at every worker: each has its own, and zeros elsewhere."""
        images, _ = self.data.batch(torch.arange(len(self.data)), torch.device("cpu"))
        found = torch.zeros_like(images)
        for part in parts:
            assert part.examples is not None
            found[part.rows[part.fell]] = part.examples
        return torch.where(per_sample(self._told(parts), images), self.world.sum(found), images)


class _Work:
    """How much is done and how much is left, at this worker."""

    def __init__(self, progress: Progress) -> None:
        self.progress, self.done, self.left, self._batch = progress, 0, 0, 0

    @contextmanager
    def batch(self, cost: int) -> Iterator[None]:
        """A batch of at most that cost; what leaves early makes it cheaper."""
        self.left, self._batch = self.left - cost, cost
        yield
        self._batch = 0

    def settle(self) -> None:
        """What was thought to be left has turned out not to be needed."""
        self.left = 0
        self.did(0)

    def did(self, count: int) -> None:
        self.done += count
        self._batch = max(self._batch - count, 0)
        self.progress(self.done, self.done + self._batch + self.left)


def _without(rows: Tensor, done: list[Part]) -> Tensor:
    rows = rows.clone()
    for part in done:
        rows[part.rows] = False
    return rows


def _cost(turn: Round) -> int:
    return turn.attack.cost() + 1


def _batches(rows: Tensor, batch: int) -> Sequence[Tensor]:
    """Full batches of nearly equal size."""
    return rows.tensor_split(-(-len(rows) // batch)) if len(rows) else ()
