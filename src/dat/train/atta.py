"""Perturbations that carry over from epoch to epoch (ATTA, Zheng et al. 2020, arXiv 1912.11969).

A network changes little within an epoch, so the last epoch's perturbation of an image is a good
initialization for the next attack, and one or two steps per epoch add up to many. Each worker
stores the perturbations of its own images in the coordinates of the original image: crops and flips
are undone before storing, and applied again when the image is drawn.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor

from dat.attacks import PGD, Attack
from dat.core import devices
from dat.core.settings import SettingError
from dat.core.threat import TINY, ThreatModel, per_sample
from dat.data import Augmentation, BatchSource, CropWindows
from dat.data.streams import StreamSource
from dat.train.inner import InnerMaximization

if TYPE_CHECKING:
    from dat.objectives import Batch
    from dat.objectives.base import Network
    from dat.train.worker import Worker

NEVER = -1
LEVELS = 127
SHARE = 0.25
"""The share of a GPU's free memory above which perturbations are stored in host memory."""
PREFIX = "carried/"
NAMES = ("numbers", "deltas", "scales", "epochs")


class DrawnImages(NamedTuple):
    """The images of a batch, and how they were augmented."""

    numbers: Tensor
    windows: CropWindows | None
    """Their random crops; None without crops."""
    epoch: int


@dataclass(frozen=True)
class PerturbationStore:
    """Stores a perturbation per image, one byte per value, quantized to 127 levels of the image's
    scale: eps for l-inf; for l2, where few values come close to eps, the largest absolute value."""

    numbers: Tensor
    """The images' numbers in the data set, ascending."""
    deltas: Tensor
    scales: Tensor
    epochs: Tensor
    """The epoch of each image's last attack."""
    threat: ThreatModel
    reset: int
    """Epochs after which perturbations start from scratch; 0: never."""

    @classmethod
    def of(
        cls, sources: Sequence[BatchSource], threat: ThreatModel, device: torch.device, reset: int
    ) -> PerturbationStore:
        """Allocate an empty store."""
        numbers = torch.cat([_numbers(source) for source in sources])
        (_, *image), count = sources[0].data.images.shape, len(numbers)
        storage = _storage_device(count * torch.Size(image).numel(), device)
        return cls(
            numbers.to(device),
            torch.zeros((count, *image), dtype=torch.int8, device=storage),
            torch.zeros(count, device=storage),
            torch.full((count,), NEVER, dtype=torch.int32, device=storage),
            threat,
            reset,
        )

    def start(self, x: Tensor, fresh: Tensor, drawn: DrawnImages) -> Tensor:
        """Where attacks on these images start: at the stored perturbation, or at `fresh` for images
        without one. Pixels that were never visible, and padding, start unperturbed."""
        rows, known = self._known(drawn)
        delta = self._read(rows).to(x.device)
        if drawn.windows is not None:
            delta = drawn.windows.apply(delta)
        return torch.where(per_sample(known, x), self.threat.project(x + delta, x), fresh)

    def keep(self, delta: Tensor, drawn: DrawnImages) -> None:
        """Store perturbations; for an image that is in the batch twice, the last one."""
        rows, known = self._known(drawn)
        if drawn.windows is not None:
            before = self._read(rows).to(delta.device) * per_sample(known, delta)
            visible = drawn.windows.visible_mask(*delta.shape[2:])
            delta = torch.where(visible, drawn.windows.inverse().apply(delta), before)
        if self.threat.norm == "linf":
            scale = delta.new_full((len(delta),), self.threat.eps)
        else:
            scale = delta.flatten(1).abs().amax(1)
        codes = (delta * per_sample(LEVELS / scale.clamp_min(TINY), delta)).round_()
        codes = codes.clamp_(-LEVELS, LEVELS).to(torch.int8)
        last = _last_occurrences(rows)
        for stored, values in ((self.deltas, codes), (self.scales, scale)):
            stored[rows[last]] = values.to(stored.device)[last]
        self.epochs[rows[last]] = drawn.epoch

    def state(self) -> dict[str, Tensor]:
        """The tensors for a checkpoint."""
        return {PREFIX + name: getattr(self, name) for name in NAMES}

    def restore(self, states: Iterable[Mapping[str, Tensor]]) -> None:
        """Load the perturbations of this worker's images from the states of one or all workers; of
        several for the same image, the latest."""
        self.epochs.fill_(NEVER)
        for state in states:
            numbers, *saved = (state[PREFIX + name] for name in NAMES)
            wanted, epochs = self.numbers.cpu(), saved[-1]
            position = torch.searchsorted(numbers, wanted).clamp_max_(len(numbers) - 1)
            later = (numbers[position] == wanted) & (epochs[position] > self.epochs.cpu())
            rows, position = later.nonzero().squeeze(1), position[later]
            for stored, values in zip((self.deltas, self.scales, self.epochs), saved, strict=True):
                stored[rows.to(stored.device)] = values[position].to(stored.device)

    def _known(self, drawn: DrawnImages) -> tuple[Tensor, Tensor]:
        """The images' rows, and whether each was attacked since the last reset."""
        rows = torch.searchsorted(self.numbers, drawn.numbers).to(self.deltas.device)
        first = drawn.epoch - drawn.epoch % self.reset if self.reset else 0
        return rows, (self.epochs[rows] >= first).to(drawn.numbers.device)

    def _read(self, rows: Tensor) -> Tensor:
        delta = self.deltas.index_select(0, rows).float()
        return delta.mul_(per_sample(self.scales[rows] / LEVELS, delta))


class ATTA(InnerMaximization):
    """Starts PGD from the perturbation of the same image in the previous epoch."""

    attack: PGD
    dropped = "; carried perturbations are redistributed with their images"

    @classmethod
    def check(cls, attack: Attack, augmentation: Augmentation) -> None:
        if beyond := augmentation.pixel_value_setting():
            raise SettingError(
                f"attack.carry = true: perturbations can follow crops and flips, not {beyond}; use "
                "data.augmentation none, crop or crop-flip, and nothing else"
            )

    def allocate(self, sources: Sequence[BatchSource], device: torch.device) -> None:
        if any(isinstance(source, StreamSource) for source in sources):
            raise SettingError(
                "attack.carry = true: a stream does not identify its images; use a map-style "
                "dataset, or attack.carry false"
            )
        self.store = PerturbationStore.of(sources, self.threat, device, self.attack.reset)

    def _attack(
        self, worker: Worker, network: Network, batch: Batch, epoch: int, step: int
    ) -> Tensor:
        threat, attack = batch.threat, cast(PGD, self.attack_in(batch.threat))
        fresh = attack.start(batch.x, threat, self._draws(batch, epoch, step))
        start = self.store.start(batch.x, fresh, self._drawn(worker, batch, epoch, step))
        return attack.onward(worker.objective.phi(network, batch), start, batch.x, threat)

    def remember(self, worker: Worker, batch: Batch, x_adv: Tensor, epoch: int, step: int) -> None:
        self.store.keep(x_adv - batch.x, self._drawn(worker, batch, epoch, step))

    def _drawn(self, worker: Worker, batch: Batch, epoch: int, step: int) -> DrawnImages:
        index = batch.draws.index
        return DrawnImages(index, worker.sampler.windows(epoch, step, index), epoch)

    def worker_state(self) -> dict[str, Tensor]:
        return self.store.state()

    def load_worker_state(self, state: Mapping[str, Tensor]) -> None:
        self.store.restore([state])

    def load_worker_states(self, states: Iterable[Mapping[str, Tensor]]) -> None:
        self.store.restore(states)


def _numbers(source: BatchSource) -> Tensor:
    assert source.data.numbers is not None
    return source.data.numbers + source.offset


def _storage_device(size: int, device: torch.device) -> torch.device:
    """The device itself, unless this number of bytes takes too much of its memory."""
    free = devices.free_memory(device)
    if free is not None and size > SHARE * free:
        return torch.device("cpu")
    return device


def _last_occurrences(rows: Tensor) -> Tensor:
    """The position of the last occurrence of each distinct row."""
    distinct, inverse = rows.unique(return_inverse=True)
    positions = torch.arange(len(rows), device=rows.device)
    return torch.zeros_like(distinct).scatter_reduce_(0, inverse, positions, "amax")
