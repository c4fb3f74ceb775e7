"""Square (Andriushchenko et al. 2020): random search with squares, without any gradient."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from dat.attacks.base import Attack
from dat.attacks.victim import GIVEN, LOSSES, Loss, ascended, glance, narrowed, settled
from dat.fields import setting
from dat.rng import Draws
from dat.threat import TINY, ThreatModel, per_sample

BLOCK = 100
"""Queries whose random numbers are drawn at a time."""
HALVINGS = (10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000)
"""After so many queries the share of the image that a square covers is halved."""


@dataclass(frozen=True, kw_only=True)
class Square(Attack):
    """Tries `queries` random squares, one after the other, and keeps those that raise the loss."""

    queries: int = setting(5000, "squares to try, a forward pass each", ge=1)
    share: float = setting(0.8, "p: share of the image that the first squares cover", gt=0, le=1)
    loss: str = setting(
        "margin", "what to ascend; given is the objective's own", choices=(GIVEN, *LOSSES)
    )

    def perturb(self, loss: Loss, x: Tensor, threat: ThreatModel, draws: Draws) -> Tensor:
        loss = ascended(loss, self.loss, "square.loss")
        search = _begin(x, threat, draws.fork("start"))
        found, rows = x.clone(), torch.arange(len(x), device=x.device)
        highest, broken = glance(loss, search.best)
        numbers = x.new_empty(len(x), 0)
        for query in range(self.queries):
            if settled(loss) and broken.any():
                found[rows[broken]] = search.best[broken]
                left = (~broken).nonzero().squeeze(1)
                rows, highest, numbers = rows[left], highest[left], numbers[left]
                search, loss = search.pick(left), narrowed(loss, left)
                if len(rows) == 0:
                    return found
            place = query % BLOCK
            if place == 0:
                block = draws.pick(rows).fork("block", query // BLOCK)
                numbers = block.uniform(torch.Size((len(rows), BLOCK, search.numbers)))
            tried = search.propose(self.covered(query), numbers[:, place])
            reached, broken = glance(loss, tried)
            better = reached > highest
            if settled(loss):
                better |= broken
            search.best = torch.where(per_sample(better, tried), tried, search.best)
            highest = torch.where(better, reached, highest)
        found[rows] = search.best
        return found

    def covered(self, query: int) -> float:
        """The share of the image that a square covers."""
        return self.share * 0.5 ** sum(query > halving for halving in HALVINGS)

    @property
    def reads_labels(self) -> bool:
        return self.loss != GIVEN

    def cost(self) -> int:
        return self.queries + 1


def _begin(x: Tensor, threat: ThreatModel, draws: Draws) -> _LinfSearch | _L2Search:
    search = _LinfSearch if threat.norm == "linf" else _L2Search
    return search.begin(x, threat.eps, draws)


@dataclass
class _LinfSearch:
    """Every pixel is at one of its two extremes; a square sets all of its own to the same side."""

    low: Tensor
    high: Tensor
    best: Tensor

    @classmethod
    def begin(cls, x: Tensor, eps: float, draws: Draws) -> _LinfSearch:
        """Vertical stripes of random colours."""
        low, high = (x - eps).clamp_(0.0, 1.0), (x + eps).clamp_(0.0, 1.0)
        up = draws.uniform(torch.Size((len(x), x.shape[1], 1, x.shape[3]))) < 0.5
        return cls(low, high, torch.where(up, high, low))

    def pick(self, rows: Tensor) -> _LinfSearch:
        return _LinfSearch(self.low[rows], self.high[rows], self.best[rows])

    @property
    def numbers(self) -> int:
        """Random numbers a query takes: a place, and a sign for each channel."""
        return 2 + self.best.shape[1]

    def propose(self, share: float, numbers: Tensor) -> Tensor:
        height, width = self.best.shape[2:]
        side = max(1, min(round(math.sqrt(share * height * width)), height, width))
        inside = _Window.at(numbers[:, :2], side, self.best).mask()
        up = (numbers[:, 2:] < 0.5)[:, :, None, None]
        return torch.where(inside, torch.where(up, self.high, self.low), self.best)


@dataclass
class _L2Search:
    """Moves the perturbation's mass out of one square and, in a fixed pattern, into another."""

    x: Tensor
    best: Tensor
    eps: float

    @classmethod
    def begin(cls, x: Tensor, eps: float, draws: Draws) -> _L2Search:
        """A grid of five by five patterns of random signs."""
        count, channels, height, width = x.shape
        side = max(1, min(height, width) // 5)
        tiles = torch.Size((count, channels + 1, height // side, width // side))
        numbers = draws.uniform(tiles, x.dtype).sub_(0.5).sign_()
        numbers = numbers.repeat_interleave(side, 2).repeat_interleave(side, 3)
        pattern = _pattern(side, x).repeat(height // side, width // side)
        turned = _pattern(side, x).T.repeat(height // side, width // side)
        delta = torch.where(numbers[:, :1] > 0, pattern, turned) * numbers[:, 1:]
        tall, wide = delta.shape[2:]
        top, left = (height - tall) // 2, (width - wide) // 2
        grid = torch.zeros_like(x)
        grid[:, :, top : top + tall, left : left + wide] = delta
        return cls(x, _onto_sphere(x, grid, eps), eps)

    def pick(self, rows: Tensor) -> _L2Search:
        return _L2Search(self.x[rows], self.best[rows], self.eps)

    @property
    def numbers(self) -> int:
        """Random numbers a query takes: two places, a direction, a sign for each channel."""
        return 5 + self.x.shape[1]

    def propose(self, share: float, numbers: Tensor) -> Tensor:
        channels, height, width = self.x.shape[1:]
        side = max(3, round(math.sqrt(share * height * width)))
        side = min(side + 1 - side % 2, height, width)
        delta = self.best - self.x
        into, out = (_Window.at(numbers[:, i : i + 2], side, self.x) for i in (0, 2))
        inside, outside = into.mask(), out.mask()
        free = (self.eps**2 - delta.square().sum((1, 2, 3), keepdim=True)).clamp_min(0.0)
        mass = _length(delta * (inside | outside)).square() + free / channels
        pattern = into.fill(_pattern(side, self.x), turned=numbers[:, 4] < 0.5)
        signs = (numbers[:, 5:] - 0.5).sign()[:, :, None, None]
        old = delta * inside
        new = pattern * signs + old / (_length(old) + TINY)
        new = new / (_length(new) + TINY) * mass.sqrt()
        delta = torch.where(inside, new, delta * ~outside)
        return _onto_sphere(self.x, delta, self.eps)


@dataclass
class _Window:
    """A square for each image."""

    rows: Tensor
    """The image's rows, counted from the square's first."""
    columns: Tensor
    side: int

    @classmethod
    def at(cls, numbers: Tensor, side: int, x: Tensor) -> _Window:
        """At a place that two uniform numbers choose."""
        height, width = x.shape[2:]
        spare = torch.tensor((height - side + 1, width - side + 1), device=x.device)
        top, left = (numbers * spare).long().unbind(1)
        rows = torch.arange(height, device=x.device) - top[:, None]
        columns = torch.arange(width, device=x.device) - left[:, None]
        return cls(rows, columns, side)

    def mask(self) -> Tensor:
        rows, columns = ((v >= 0) & (v < self.side) for v in (self.rows, self.columns))
        return (rows[:, :, None] & columns[:, None, :]).unsqueeze(1)

    def fill(self, pattern: Tensor, turned: Tensor) -> Tensor:
        """The pattern in the square, or its transpose where it is `turned`, and 0 around it."""
        rows, columns = (v.clamp(0, self.side - 1) for v in (self.rows, self.columns))
        upright = pattern[rows[:, :, None], columns[:, None, :]]
        lying = pattern[columns[:, None, :], rows[:, :, None]]
        return torch.where(turned[:, None, None], lying, upright).unsqueeze(1) * self.mask()


def _pattern(side: int, x: Tensor) -> Tensor:
    """Two peaks of opposite sign, one above the other, of length 1 together."""
    both = torch.cat((_peak(side // 2, side), -_peak(side - side // 2, side)))
    return F.normalize(both.flatten(), dim=0).view_as(both).to(x.device, x.dtype)


def _peak(height: int, width: int) -> Tensor:
    """Nested rectangles around the middle, the k-th of them 1 / k^2 high."""
    peak = torch.zeros(height, width)
    middle = (height // 2, width // 2)
    for k in range(max(middle) + 1):
        top, left = (max(m - k, 0) for m in middle)
        peak[top : middle[0] + k + 1, left : middle[1] + k + 1] += 1 / (k + 1) ** 2
    return F.normalize(peak.flatten(), dim=0).view_as(peak)


def _length(delta: Tensor) -> Tensor:
    """The l2 norm of each channel."""
    return delta.square().sum((2, 3), keepdim=True).sqrt()


def _onto_sphere(x: Tensor, delta: Tensor, eps: float) -> Tensor:
    length = delta.square().sum((1, 2, 3), keepdim=True).sqrt() + TINY
    return (x + delta * (eps / length)).clamp_(0.0, 1.0)
