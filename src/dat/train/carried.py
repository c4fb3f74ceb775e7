"""Perturbations that are carried from epoch to epoch (ATTA, Zheng et al. 2020, arXiv 1912.11969).

A network changes little within an epoch, so what fooled it then is a good start now, and one or two
steps an epoch add up to many. Each worker keeps the perturbations of its own images, in the frame
of the image as it is stored: crops and flips are undone before they are kept, and done to them when
the image is drawn again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dat.attacks import PGD, Attack
from dat.data import Source, Windows
from dat.threat import TINY, ThreatModel, per_sample

NEVER = -1
LEVELS = 127
SHARE = 0.25
"""Of a GPU's free memory; what takes more is kept in that of the host."""
PREFIX = "carried/"
NAMES = ("numbers", "deltas", "scales", "epochs")


class Visit(NamedTuple):
    """Which images were drawn, and how."""

    numbers: Tensor
    windows: Windows | None
    """Where they were cut out; none: nowhere."""
    epoch: int


@dataclass(frozen=True)
class Carried:
    """One byte for every value, allocated once: the nearest 127th of the image's scale. That is eps
    in l-inf; in l2, where hardly a value comes near eps, it is the image's largest value."""

    numbers: Tensor
    """Of the images, ascending, as they are drawn by."""
    deltas: Tensor
    scales: Tensor
    epochs: Tensor
    """In which each was attacked last."""
    threat: ThreatModel
    reset: int
    """Epochs after which perturbations start anew; 0: never."""

    @classmethod
    def of(
        cls, attack: Attack, sources: Sequence[Source], threat: ThreatModel, device: torch.device
    ) -> Carried | None:
        """Nothing so far; none where the attack carries nothing."""
        if not isinstance(attack, PGD) or not attack.carry:
            return None
        numbers = torch.cat([_numbers(it) for it in sources])
        (_, *image), count = sources[0].data.images.shape, len(numbers)
        room = _room(count * torch.Size(image).numel(), device)
        return cls(
            numbers.to(device),
            torch.zeros((count, *image), dtype=torch.int8, device=room),
            torch.zeros(count, device=room),
            torch.full((count,), NEVER, dtype=torch.int32, device=room),
            threat,
            attack.reset,
        )

    def start(self, x: Tensor, fresh: Tensor, visit: Visit) -> Tensor:
        """Where attacks on these images begin: where they ended the last time, and at `fresh` if
        there was none. A pixel that was never seen, or is padding, begins unperturbed."""
        rows, known = self._known(visit)
        delta = self._read(rows).to(x.device)
        if visit.windows is not None:
            delta = visit.windows.cut(delta)
        return torch.where(per_sample(known, x), self.threat.project(x + delta, x), fresh)

    def keep(self, delta: Tensor, visit: Visit) -> None:
        """What attacks ended with; of an image that is in the batch twice, the last."""
        rows, known = self._known(visit)
        if visit.windows is not None:
            before = self._read(rows).to(delta.device) * per_sample(known, delta)
            seen = visit.windows.seen(*delta.shape[2:])
            delta = torch.where(seen, visit.windows.back().cut(delta), before)
        if self.threat.norm == "linf":
            scale = delta.new_full((len(delta),), self.threat.eps)
        else:
            scale = delta.flatten(1).abs().amax(1)
        coded = (delta * per_sample(LEVELS / scale.clamp_min(TINY), delta)).round_()
        coded = coded.clamp_(-LEVELS, LEVELS).to(torch.int8)
        last = _last(rows)
        for kept, values in ((self.deltas, coded), (self.scales, scale)):
            kept[rows[last]] = values.to(kept.device)[last]
        self.epochs[rows[last]] = visit.epoch

    def state(self) -> dict[str, Tensor]:
        """As a checkpoint has it."""
        return {PREFIX + name: getattr(self, name) for name in NAMES}

    def restore(self, states: Iterable[dict[str, Tensor]]) -> None:
        """What one worker, or all of them, had kept of images that are here now; of two the later
        one."""
        self.epochs.fill_(NEVER)
        for state in states:
            numbers, *saved = (state[PREFIX + name] for name in NAMES)
            wanted, epochs = self.numbers.cpu(), saved[-1]
            place = torch.searchsorted(numbers, wanted).clamp_max_(len(numbers) - 1)
            later = (numbers[place] == wanted) & (epochs[place] > self.epochs.cpu())
            rows, place = later.nonzero().squeeze(1), place[later]
            for kept, values in zip((self.deltas, self.scales, self.epochs), saved, strict=True):
                kept[rows.to(kept.device)] = values[place].to(kept.device)

    def _known(self, visit: Visit) -> tuple[Tensor, Tensor]:
        """The images' rows, and whether they were attacked since perturbations began anew."""
        rows = torch.searchsorted(self.numbers, visit.numbers).to(self.deltas.device)
        first = visit.epoch - visit.epoch % self.reset if self.reset else 0
        return rows, (self.epochs[rows] >= first).to(visit.numbers.device)

    def _read(self, rows: Tensor) -> Tensor:
        delta = self.deltas.index_select(0, rows).float()
        return delta.mul_(per_sample(self.scales[rows] / LEVELS, delta))


def _numbers(source: Source) -> Tensor:
    assert source.data.numbers is not None
    return source.data.numbers + source.offset


def _room(size: int, device: torch.device) -> torch.device:
    """The device itself, if so many bytes are little there."""
    if device.type == "cuda" and size > SHARE * torch.cuda.mem_get_info(device)[0]:
        return torch.device("cpu")
    return device


def _last(rows: Tensor) -> Tensor:
    """Where each row that occurs does so for the last time."""
    distinct, which = rows.unique(return_inverse=True)
    place = torch.arange(len(rows), device=rows.device)
    return torch.zeros_like(distinct).scatter_reduce_(0, which, place, "amax")
