"""Count a network's predictions under Gaussian noise around an image.

Noise comes in blocks. Block b of image i is a function of the seed, the purpose, i and b, so counts
do not depend on the batch size or the number of workers. torch's generator writes it directly into
the network's input, as drawing noise is the main cost of certification besides the network.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dat.attacks import attack_mode
from dat.core import devices
from dat.core.precision import PRECISIONS
from dat.core.rng import derive
from dat.data import ImageData

ABSTAIN = -1
BLOCK = 32
"""Samples drawn at a time."""
MAX_BATCH = {"cpu": 1024, "accelerator": 8192}
"""The largest batch size that is tried."""
WORSE = 0.9
"""The search for the fastest batch size ends below this share of the best speed."""


class SampleRange(NamedTuple):
    """Samples `start` to `stop` of one image."""

    row: int
    start: int
    stop: int


class _Block(NamedTuple):
    position: int
    """Of the image in the request."""
    row: int
    number: int
    low: int
    high: int
    """The range of the block's samples to use."""


class NoiseSampler:
    """Counts the predictions of `network` on noisy copies of the images."""

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
        self._shape = (height, width, channels)  # channels last, which convolutions prefer
        self._random = torch.Generator(device)
        self._blocks = -(-(batch or self._fastest()) // BLOCK)

    @property
    def batch(self) -> int:
        """Samples per batch."""
        return self._blocks * BLOCK

    def count(self, purpose: str, requests: Sequence[SampleRange]) -> Tensor:
        """How often each class is predicted, one row per request."""
        counts = torch.zeros(len(requests) * self.classes, dtype=torch.int64, device=self.device)
        rows = torch.tensor([request.row for request in requests])
        images, _ = self.data.batch(rows, self.device)
        images = images.permute(0, 2, 3, 1).contiguous()
        samples = torch.empty((self.batch, *self._shape), device=self.device)
        with attack_mode(self.network), torch.inference_mode():
            for blocks in _batches(requests, self._blocks):
                sizes = [block.high - block.low for block in blocks]
                for block, noisy in zip(blocks, samples[: sum(sizes)].split(sizes), strict=True):
                    self._draw(purpose, block, noisy).add_(images[block.position])
                positions = torch.tensor([block.position for block in blocks], device=self.device)
                owners = positions.repeat_interleave(torch.tensor(sizes, device=self.device))
                predicted, valid = self._predict(samples[: sum(sizes)])
                hits = (owners * self.classes + predicted)[valid]
                counts += hits.bincount(minlength=len(counts))
        return counts.reshape(len(requests), self.classes).cpu()

    def _draw(self, purpose: str, block: _Block, out: Tensor) -> Tensor:
        """Fill `out` with noise."""
        self._random.manual_seed(derive(self.seed, purpose, block.row, block.number))
        if len(out) == BLOCK:
            return out.normal_(0.0, self.sigma, generator=self._random)
        noise = out.new_empty((BLOCK, *self._shape))
        noise.normal_(0.0, self.sigma, generator=self._random)
        return out.copy_(noise[block.low : block.high])

    def _predict(self, samples: Tensor) -> tuple[Tensor, Tensor]:
        """The class of each sample, and whether its logits are finite."""
        x = samples.permute(0, 3, 1, 2)
        with devices.autocast(self.device, self.precision):
            logits = self.network(x).float()
        return logits.argmax(1), logits.isfinite().all(1)

    def _fastest(self) -> int:
        """The batch size with the most samples per second, as measured."""
        best, fastest, batch = 0.0, BLOCK, BLOCK
        while batch <= devices.by_device(self.device, **MAX_BATCH):
            self._blocks = batch // BLOCK
            try:
                speed = self._speed()
            except torch.OutOfMemoryError:
                devices.release_cached_memory(self.device)
                break
            if speed > best:
                best, fastest = speed, batch
            elif speed < WORSE * best:
                break
            batch *= 2
        return fastest

    def _speed(self) -> float:
        """Samples per second, the better of two runs after a warm-up."""
        seconds = []
        for _ in range(3):
            start = time.perf_counter()
            self.count("trial", [SampleRange(0, 0, self.batch)])
            seconds.append(time.perf_counter() - start)
        return self.batch / min(seconds[1:])


def _batches(requests: Sequence[SampleRange], size: int) -> Iterator[list[_Block]]:
    blocks = list(_blocks(requests))
    for first in range(0, len(blocks), size):
        yield blocks[first : first + size]


def _blocks(requests: Sequence[SampleRange]) -> Iterator[_Block]:
    for position, (row, start, stop) in enumerate(requests):
        for number in range(start // BLOCK, -(-stop // BLOCK)):
            first = number * BLOCK
            yield _Block(position, row, number, max(start - first, 0), min(stop - first, BLOCK))
