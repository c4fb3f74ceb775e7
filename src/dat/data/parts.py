"""Who draws what: D is split into parts D(1), ..., D(P), and each worker draws from its own.

The global batch is a row of B slots. The parts fill it in order, B / P slots each; the workers
take it in order, B / M slots each. With P = M, the default, worker i draws its batch from D(i)
alone, as in step 4 of Algorithm A1. With P fixed, the global batch is the same for any number of
workers: one worker may then hold several parts, or several workers share one (the paper's p nodes
with q devices each).
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from dat.data.images import ImageData
from dat.rng import generator


def split_holdout(data: ImageData, share: float, seed: int) -> tuple[ImageData, ImageData | None]:
    """Hold back a share of the training set, to choose the best checkpoint by."""
    count = round(share * len(data))
    if count == 0:
        return data, None
    if count >= len(data):
        raise ValueError(f"data.holdout = {share:g}: leaves none of {len(data)} images to train on")
    order = torch.randperm(len(data), generator=generator(seed, "holdout"))
    return data.take(order[count:].sort().values), data.take(order[:count].sort().values)


class Plan:
    """Which samples of a training set make up global batch t, and which of them a worker draws."""

    def __init__(self, samples: int, batch: int, *, parts: int, workers: int, seed: int) -> None:
        if workers > samples:
            raise ValueError(f"{workers} workers for {samples} training images: use fewer workers")
        if parts > samples:
            raise ValueError(f"data.parts = {parts}: there are only {samples} training images")
        if batch < max(workers, parts):
            raise ValueError(
                f"train.batch = {batch}: must be at least one image for each of {workers} workers "
                f"and {parts} parts"
            )
        self.batch, self.workers, self.seed = batch, workers, seed
        order = torch.randperm(samples, generator=generator(seed, "partition"))
        self.parts = [part.sort().values for part in order.tensor_split(parts)]
        self._slots = _even(batch, parts)
        draws = [high - low for low, high in self._slots]
        smallest = min(len(part) for part in self.parts)
        if max(draws) > smallest:
            raise ValueError(
                f"train.batch = {batch}: takes {max(draws)} images from each of {parts} parts, but "
                f"the smallest holds {smallest}; use train.batch={smallest * parts} or less"
            )
        self.steps = min(len(p) // n for p, n in zip(self.parts, draws, strict=True))
        """Steps per epoch; what is left over at its end is left out, another rest each epoch."""

    def owned(self, rank: int) -> Tensor:
        """The samples that a worker ever draws, ascending: it needs no others."""
        low, high = _even(self.batch, self.workers)[rank]
        touched = [
            part
            for part, (start, end) in zip(self.parts, self._slots, strict=True)
            if start < high and low < end
        ]
        return torch.cat(touched).sort().values

    def draw(self, epoch: int, step: int, rank: int) -> Tensor:
        """The samples of one worker's share of a global batch."""
        low, high = _even(self.batch, self.workers)[rank]
        share = []
        for number, (start, end) in enumerate(self._slots):
            if start < high and low < end:
                first = step * (end - start)
                order = self._order(epoch, number)[first : first + end - start]
                share.append(order[max(low - start, 0) : high - start])
        return torch.cat(share)

    @lru_cache(maxsize=16)  # noqa: B019 - a plan lives as long as its trainer
    def _order(self, epoch: int, part: int) -> Tensor:
        samples = self.parts[part]
        shuffle = generator(self.seed, "shuffle", epoch, part)
        return samples[torch.randperm(len(samples), generator=shuffle)]


def _even(total: int, pieces: int) -> list[tuple[int, int]]:
    """Cut 0 .. total into consecutive pieces whose sizes differ by at most one."""
    return [(total * i // pieces, total * (i + 1) // pieces) for i in range(pieces)]
