"""No hidden randomness: every draw is a function of (seed, purpose, step, rank or sample index).

`derive` names a draw, `generator` gives torch's own generator for it (shuffles, weights), and
`Draws` gives each sample of a batch its own stream. The streams come from Philox4x32-10 (Salmon et
al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), which is a function of key and
counter: the numbers that sample 17 gets do not depend on the batch it is in, the worker that holds
it, or the device.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dat.native import philox_words

MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def derive(seed: int, purpose: str, *coordinates: int) -> int:
    """A 63-bit key for one purpose at one place of the run."""
    text = "/".join((str(seed), purpose, *map(str, coordinates)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


def generator(seed: int, purpose: str, *coordinates: int) -> torch.Generator:
    """torch's CPU generator, seeded for one purpose at one place of the run."""
    return torch.Generator().manual_seed(derive(seed, purpose, *coordinates))


@contextmanager
def seeded(device: torch.device, seed: int, purpose: str, *coordinates: int) -> Iterator[None]:
    """torch's global generators, seeded for one purpose and restored afterwards: for what draws
    from them inside a model, such as dropout."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        key = derive(seed, purpose, *coordinates)
        torch.default_generator.manual_seed(key)
        if device.type == "cuda":  # this device alone; torch.manual_seed would seed them all
            torch.cuda.manual_seed(key)
        yield


@dataclass(frozen=True)
class Draws:
    """The random streams of a batch: row i belongs to the sample with number `index[i]`."""

    key: int
    index: Tensor

    @classmethod
    def of(cls, seed: int, purpose: str, *coordinates: int, index: Tensor) -> Draws:
        return cls(derive(seed, purpose, *coordinates), index)

    def fork(self, purpose: str, *coordinates: int) -> Draws:
        """Independent streams for the same samples, e.g. for another restart of an attack."""
        return replace(self, key=derive(self.key, purpose, *coordinates))

    def pick(self, rows: Tensor | slice) -> Draws:
        """The streams of some of the samples."""
        return replace(self, index=self.index[rows])

    def uniform(self, shape: torch.Size, dtype: torch.dtype = torch.float32) -> Tensor:
        """Uniform in [0, 1), of `shape`; the first dimension runs over the samples."""
        count = shape[1:].numel()
        words = self._words(-(-count // 4)).flatten(1)[:, :count]
        # 24 bits are what a float32 in [0, 1) can hold without rounding up to 1
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        return (words >> 8).to(wide).mul_(2.0**-24).to(dtype).reshape(shape)

    def normal(self, shape: torch.Size, dtype: torch.dtype = torch.float32) -> Tensor:
        """Standard normal, by the Box-Muller transform."""
        count = shape[1:].numel()
        pairs = self.uniform(torch.Size((shape[0], 2, -(-count // 2))), torch.float64)
        radius = torch.sqrt(-2.0 * torch.log1p(-pairs[:, 0]))
        angle = 2.0 * torch.pi * pairs[:, 1]
        both = torch.cat((radius * torch.cos(angle), radius * torch.sin(angle)), dim=1)
        return both[:, :count].reshape(shape).to(dtype)

    def _words(self, blocks: int) -> Tensor:
        """`blocks` Philox blocks for each sample: 32-bit words in an int64 tensor."""
        index = self.index.to(torch.int64)
        found = philox_words(index, blocks, self.key)
        if found is not None:
            return found
        row = index.unsqueeze(1).expand(-1, blocks)
        block = torch.arange(blocks, device=index.device).expand(len(index), -1)
        counter = (block, torch.zeros_like(row), row & MASK, (row >> 32) & MASK)
        return torch.stack(philox(counter, (self.key & MASK, self.key >> 32)), dim=-1)


def philox(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10: four 32-bit words for each counter, all held in int64 tensors.

    The low halves of products are masked only at the end: until then they are but xored into what
    is masked itself. A signed product wraps, and its high half is masked, so its sign is lost.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c2 = ((p1 >> 32) ^ c1 ^ k0) & MASK, ((p0 >> 32) ^ c3 ^ k1) & MASK
        c1, c3 = p1, p0
        k0, k1 = (k0 + _WEYL[0]) & MASK, (k1 + _WEYL[1]) & MASK
    return c0, c1 & MASK, c2, c3 & MASK
