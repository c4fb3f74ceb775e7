"""What a network answers on a Gaussian cloud around an image, counted.

The noise comes in blocks. Block b of image i is a function of the seed, the purpose, i and b, so
neither the batch nor the number of workers changes a count; and it is drawn by torch's own
generator into the place where the network reads it, as that is what certification spends its time
on beside the network itself.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dat.attacks import attack_mode
from dat.data import ImageData
from dat.evaluation.survey import PRECISIONS
from dat.rng import derive

ABSTAIN = -1
BLOCK = 32
"""Samples that are drawn at a time."""
LARGEST = {"cpu": 1024, "cuda": 8192}
"""The largest batch that is tried."""
WORSE = 0.9
"""A batch with less than this share of the best speed ends the trial."""


class Asked(NamedTuple):
    """Samples of one image, from the number `start` on, up to `stop`."""

    row: int
    start: int
    stop: int


class _Block(NamedTuple):
    place: int
    """Of the image among those asked for."""
    row: int
    number: int
    low: int
    high: int
    """Which of the block's samples are wanted."""


class Sampler:
    """Counts the answers of `network` to noisy copies of the images."""

    def __init__(
        self,
        network: nn.Module,
        data: ImageData,
        *,
        sigma: float,
        classes: int,
        device: torch.device,
        seed: int = 0,
        precision: str = "float32",
        batch: int | None = None,
    ) -> None:
        self.network, self.data, self.sigma, self.classes = network, data, sigma, classes
        self.device, self.seed, self.precision = device, seed, PRECISIONS[precision]
        channels, height, width = data.shape
        self._shape = (height, width, channels)  # as convolutions like images to lie in memory
        self._random = torch.Generator(device)
        self._blocks = -(-(batch or self._fastest()) // BLOCK)

    @property
    def batch(self) -> int:
        """Samples at a time."""
        return self._blocks * BLOCK

    def count(self, purpose: str, asked: Sequence[Asked]) -> Tensor:
        """How often each class was answered, one row for each image asked for."""
        counts = torch.zeros(len(asked) * self.classes, dtype=torch.int64, device=self.device)
        images, _ = self.data.batch(torch.tensor([it.row for it in asked]), self.device)
        images = images.permute(0, 2, 3, 1).contiguous()
        clouds = torch.empty((self.batch, *self._shape), device=self.device)
        with attack_mode(self.network), torch.inference_mode():
            for blocks in _batches(asked, self._blocks):
                sizes = [block.high - block.low for block in blocks]
                for block, cloud in zip(blocks, clouds[: sum(sizes)].split(sizes), strict=True):
                    self._draw(purpose, block, cloud).add_(images[block.place])
                places = torch.tensor([block.place for block in blocks], device=self.device)
                owners = places.repeat_interleave(torch.tensor(sizes, device=self.device))
                answers, valid = self._answers(clouds[: sum(sizes)])
                found = (owners * self.classes + answers)[valid]
                counts += found.bincount(minlength=len(counts))
        return counts.reshape(len(asked), self.classes).cpu()

    def _draw(self, purpose: str, block: _Block, cloud: Tensor) -> Tensor:
        """Fill the cloud with noise."""
        self._random.manual_seed(derive(self.seed, purpose, block.row, block.number))
        if len(cloud) == BLOCK:
            return cloud.normal_(0.0, self.sigma, generator=self._random)
        whole = cloud.new_empty((BLOCK, *self._shape))
        whole.normal_(0.0, self.sigma, generator=self._random)
        return cloud.copy_(whole[block.low : block.high])

    def _answers(self, clouds: Tensor) -> tuple[Tensor, Tensor]:
        """The class of each sample, and whether there is one: NaN is no answer."""
        x = clouds.permute(0, 3, 1, 2)
        if self.precision == torch.float32:
            logits = self.network(x)
        else:
            with torch.autocast(self.device.type, self.precision):
                logits = self.network(x).float()
        return logits.argmax(1), logits.isfinite().all(1)

    def _fastest(self) -> int:
        """The batch with the most samples a second, as measured."""
        best, fastest, batch = 0.0, BLOCK, BLOCK
        while batch <= LARGEST.get(self.device.type, 1024):
            self._blocks = batch // BLOCK
            try:
                speed = self._speed()
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()
                break
            if speed > best:
                best, fastest = speed, batch
            elif speed < WORSE * best:
                break
            batch *= 2
        return fastest

    def _speed(self) -> float:
        """Samples a second, the better of two tries after one to warm up."""
        seconds = []
        for _ in range(3):
            start = time.perf_counter()
            self.count("trial", [Asked(0, 0, self.batch)])
            seconds.append(time.perf_counter() - start)
        return self.batch / min(seconds[1:])


def _batches(asked: Sequence[Asked], size: int) -> Iterator[list[_Block]]:
    blocks = list(_blocks(asked))
    for first in range(0, len(blocks), size):
        yield blocks[first : first + size]


def _blocks(asked: Sequence[Asked]) -> Iterator[_Block]:
    for place, (row, start, stop) in enumerate(asked):
        for number in range(start // BLOCK, -(-stop // BLOCK)):
            first = number * BLOCK
            yield _Block(place, row, number, max(start - first, 0), min(stop - first, BLOCK))
