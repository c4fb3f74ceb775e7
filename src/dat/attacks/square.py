"""Square (Andriushchenko et al. 2020): gradient-free random search over squares."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dat.attacks.base import Attack
from dat.attacks.target import GIVEN, LOSSES, Loss, select, stops_when_broken, value, with_loss
from dat.core.lazy import functional as F
from dat.core.lazy import torch
from dat.core.rng import Streams
from dat.core.settings import setting
from dat.core.threat import TINY, ThreatModel, per_sample

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 100
"""The number of queries whose random numbers are generated at once."""
HALVINGS = (10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000)
"""The share of the image that a square covers is halved after these numbers of queries."""


@dataclass(frozen=True, kw_only=True)
class Square(Attack):
    """Tries `queries` random squares one by one and keeps those that raise the loss."""

    queries: int = setting(5000, "squares to try, one forward pass each", ge=1)
    share: float = setting(0.8, "p: share of the image covered by the first squares", gt=0, le=1)
    loss: str = setting(
        "margin", "loss to maximize; given: that of the objective", choices=(GIVEN, *LOSSES)
    )

    def perturb(self, loss: Loss, x: Tensor, threat: ThreatModel, draws: Streams) -> Tensor:
        loss = with_loss(loss, self.loss, "square.loss")
        search = _start_search(x, threat, draws.fork("start"))
        result, rows = x.clone(), torch.arange(len(x), device=x.device)
        highest, broken = value(loss, search.best)
        numbers = x.new_empty(len(x), 0)
        for query in range(self.queries):
            if stops_when_broken(loss) and broken.any():
                result[rows[broken]] = search.best[broken]
                remaining = (~broken).nonzero().squeeze(1)
                rows, highest, numbers = rows[remaining], highest[remaining], numbers[remaining]
                search, loss = search.select(remaining), select(loss, remaining)
                if len(rows) == 0:
                    return result
            if query % BLOCK == 0:
                block = draws.select(rows).fork("block", query // BLOCK)
                numbers = block.uniform(torch.Size((len(rows), BLOCK, search.numbers)))
            candidate = search.propose(self.covered(query), numbers[:, query % BLOCK])
            losses, broken = value(loss, candidate)
            better = losses > highest
            if stops_when_broken(loss):
                better |= broken
            search.best = torch.where(per_sample(better, candidate), candidate, search.best)
            highest = torch.where(better, losses, highest)
        result[rows] = search.best
        return result

    def covered(self, query: int) -> float:
        """The share of the image that a square covers at this query."""
        return self.share * 0.5 ** sum(query > halving for halving in HALVINGS)

    @property
    def reads_labels(self) -> bool:
        return self.loss != GIVEN

    def cost(self) -> int:
        return self.queries + 1


def _start_search(x: Tensor, threat: ThreatModel, draws: Streams) -> _LinfSearch | _L2Search:
    search = _LinfSearch if threat.norm == "linf" else _L2Search
    return search.start(x, threat.eps, draws)


@dataclass
class _LinfSearch:
    """Every pixel is at one of its two extremes; a square moves all its pixels to the same one."""

    low: Tensor
    high: Tensor
    best: Tensor

    @classmethod
    def start(cls, x: Tensor, eps: float, draws: Streams) -> _LinfSearch:
        """Start with vertical stripes of random colors."""
        low, high = (x - eps).clamp_(0.0, 1.0), (x + eps).clamp_(0.0, 1.0)
        up = draws.uniform(torch.Size((len(x), x.shape[1], 1, x.shape[3]))) < 0.5
        return cls(low, high, torch.where(up, high, low))

    def select(self, rows: Tensor) -> _LinfSearch:
        return _LinfSearch(self.low[rows], self.high[rows], self.best[rows])

    @property
    def numbers(self) -> int:
        """Random numbers per query: a position, and a sign for each channel."""
        return 2 + self.best.shape[1]

    def propose(self, share: float, numbers: Tensor) -> Tensor:
        height, width = self.best.shape[2:]
        side = max(1, min(round(math.sqrt(share * height * width)), height, width))
        inside = _Window.random(numbers[:, :2], side, self.best).mask()
        up = (numbers[:, 2:] < 0.5)[:, :, None, None]
        return torch.where(inside, torch.where(up, self.high, self.low), self.best)


@dataclass
class _L2Search:
    """Moves the mass of the perturbation from one square into a fixed pattern in another."""

    x: Tensor
    best: Tensor
    eps: float

    @classmethod
    def start(cls, x: Tensor, eps: float, draws: Streams) -> _L2Search:
        """Start with a five by five grid of patterns with random signs."""
        count, channels, height, width = x.shape
        side = max(1, min(height, width) // 5)
        tiles = torch.Size((count, channels + 1, height // side, width // side))
        numbers = draws.uniform(tiles, x.dtype).sub_(0.5).sign_()
        numbers = numbers.repeat_interleave(side, 2).repeat_interleave(side, 3)
        pattern = _pattern(side, x).repeat(height // side, width // side)
        transposed = _pattern(side, x).T.repeat(height // side, width // side)
        delta = torch.where(numbers[:, :1] > 0, pattern, transposed) * numbers[:, 1:]
        tall, wide = delta.shape[2:]
        top, left = (height - tall) // 2, (width - wide) // 2
        grid = torch.zeros_like(x)
        grid[:, :, top : top + tall, left : left + wide] = delta
        return cls(x, _onto_sphere(x, grid, eps), eps)

    def select(self, rows: Tensor) -> _L2Search:
        return _L2Search(self.x[rows], self.best[rows], self.eps)

    @property
    def numbers(self) -> int:
        """Random numbers per query: two positions, a direction, and a sign for each channel."""
        return 5 + self.x.shape[1]

    def propose(self, share: float, numbers: Tensor) -> Tensor:
        channels, height, width = self.x.shape[1:]
        side = max(3, round(math.sqrt(share * height * width)))
        side = min(side + 1 - side % 2, height, width)
        delta = self.best - self.x
        target, source = (_Window.random(numbers[:, i : i + 2], side, self.x) for i in (0, 2))
        in_target, in_source = target.mask(), source.mask()
        unused = (self.eps**2 - delta.square().sum((1, 2, 3), keepdim=True)).clamp_min(0.0)
        mass = _channel_norm(delta * (in_target | in_source)).square() + unused / channels
        pattern = target.fill(_pattern(side, self.x), transposed=numbers[:, 4] < 0.5)
        signs = (numbers[:, 5:] - 0.5).sign()[:, :, None, None]
        old = delta * in_target
        new = pattern * signs + old / (_channel_norm(old) + TINY)
        new = new / (_channel_norm(new) + TINY) * mass.sqrt()
        delta = torch.where(in_target, new, delta * ~in_source)
        return _onto_sphere(self.x, delta, self.eps)


@dataclass
class _Window:
    """One square per image."""

    rows: Tensor
    """The row numbers of the image, counted from the first row of the square."""
    columns: Tensor
    side: int

    @classmethod
    def random(cls, numbers: Tensor, side: int, x: Tensor) -> _Window:
        """A square at the position given by two uniform numbers."""
        height, width = x.shape[2:]
        top = (numbers[:, 0] * (height - side + 1)).long()
        left = (numbers[:, 1] * (width - side + 1)).long()
        rows = torch.arange(height, device=x.device) - top[:, None]
        columns = torch.arange(width, device=x.device) - left[:, None]
        return cls(rows, columns, side)

    def mask(self) -> Tensor:
        """True inside the square."""
        rows, columns = ((i >= 0) & (i < self.side) for i in (self.rows, self.columns))
        return (rows[:, :, None] & columns[:, None, :]).unsqueeze(1)

    def fill(self, pattern: Tensor, transposed: Tensor) -> Tensor:
        """The pattern, or its transpose, in the square, and 0 around it."""
        rows, columns = (i.clamp(0, self.side - 1) for i in (self.rows, self.columns))
        upright = pattern[rows[:, :, None], columns[:, None, :]]
        transpose = pattern[columns[:, None, :], rows[:, :, None]]
        return torch.where(transposed[:, None, None], transpose, upright).unsqueeze(1) * self.mask()


def _pattern(side: int, x: Tensor) -> Tensor:
    """Two peaks of opposite sign, one above the other, with a total l2 norm of 1."""
    both = torch.cat((_peak(side // 2, side), -_peak(side - side // 2, side)))
    both = F.normalize(both.flatten(), dim=0).view_as(both)
    return both.to(x.device, x.dtype, non_blocking=True)


def _peak(height: int, width: int) -> Tensor:
    """Nested rectangles around the centre; the k-th has height 1 / k^2."""
    peak = torch.zeros(height, width)
    centre = (height // 2, width // 2)
    for k in range(max(centre) + 1):
        top, left = (max(c - k, 0) for c in centre)
        peak[top : centre[0] + k + 1, left : centre[1] + k + 1] += 1 / (k + 1) ** 2
    return F.normalize(peak.flatten(), dim=0).view_as(peak)


def _channel_norm(delta: Tensor) -> Tensor:
    """The l2 norm of each channel."""
    return delta.square().sum((2, 3), keepdim=True).sqrt()


def _onto_sphere(x: Tensor, delta: Tensor, eps: float) -> Tensor:
    norm = delta.square().sum((1, 2, 3), keepdim=True).sqrt() + TINY
    return (x + delta * (eps / norm)).clamp_(0.0, 1.0)
