"""Reproducible random numbers: each is a function of (seed, purpose, step, rank or sample index).

`derive` computes a key, `generator` returns a torch generator seeded with it (shuffles, weights),
and `Streams` holds one random stream per sample of a batch. The streams are counter-based,
Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): the numbers
of sample 17 do not depend on its batch, its worker or the device.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dat.core import devices
from dat.core.deprecation import RenamedAttribute, renamed_names
from dat.core.lazy import torch
from dat.core.short_repr import short_repr
from dat.kernels.native import philox_words

if TYPE_CHECKING:
    from torch import Tensor

MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def derive(seed: int, purpose: str, *coordinates: int) -> int:
    """A 63-bit key for a purpose and coordinates such as epoch and step."""
    text = "/".join((str(seed), purpose, *map(str, coordinates)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


def generator(seed: int, purpose: str, *coordinates: int) -> torch.Generator:
    """A CPU generator, seeded for a purpose and coordinates such as epoch and step."""
    return torch.Generator().manual_seed(derive(seed, purpose, *coordinates))


@contextmanager
def seeded(device: torch.device, seed: int, purpose: str, *coordinates: int) -> Iterator[None]:
    """Seed torch's global generators inside the context and restore them on exit: for layers that
    use them, such as dropout."""
    with devices.seeded_generators(device, derive(seed, purpose, *coordinates)):
        yield


@dataclass(frozen=True)
class Streams:
    """The random streams of a batch, one per sample: row i belongs to sample `index[i]`."""

    key: int
    index: Tensor

    __repr__ = short_repr

    @classmethod
    def of(cls, seed: int, purpose: str, *coordinates: int, index: Tensor) -> Streams:
        """Streams for a purpose and coordinates such as epoch and step."""
        return cls(derive(seed, purpose, *coordinates), index)

    def fork(self, purpose: str, *coordinates: int) -> Streams:
        """Independent streams for the same samples, e.g. for another restart of an attack."""
        return replace(self, key=derive(self.key, purpose, *coordinates))

    def select(self, rows: Tensor | slice) -> Streams:
        """The streams of a subset of the samples."""
        return replace(self, index=self.index[rows])

    pick = RenamedAttribute("select")

    def uniform(self, shape: torch.Size, dtype: torch.dtype | None = None) -> Tensor:
        """Uniform numbers in [0, 1), float32 by default; the first dimension of `shape` is the
        batch."""
        dtype = torch.float32 if dtype is None else dtype
        count = shape[1:].numel()
        words = self._words(-(-count // 4)).flatten(1)[:, :count]
        # 24 bits fit into a float32 in [0, 1) without rounding up to 1
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        return (words >> 8).to(wide).mul_(2.0**-24).to(dtype).reshape(shape)

    def normal(self, shape: torch.Size, dtype: torch.dtype | None = None) -> Tensor:
        """Standard normal numbers, by the Box-Muller transform."""
        count = shape[1:].numel()
        pairs = self.uniform(torch.Size((shape[0], 2, -(-count // 2))), torch.float64)
        radius = torch.sqrt(-2.0 * torch.log1p(-pairs[:, 0]))
        angle = 2.0 * torch.pi * pairs[:, 1]
        both = torch.cat((radius * torch.cos(angle), radius * torch.sin(angle)), dim=1)
        return both[:, :count].reshape(shape).to(torch.float32 if dtype is None else dtype)

    def integers(self) -> Tensor:
        """One number below 2 ** 63 for each sample, to seed another generator with."""
        high, low, *_ = self._words(1)[:, 0].unbind(1)
        return ((high >> 1) << 32) | low

    def _words(self, blocks: int) -> Tensor:
        """`blocks` Philox blocks for each sample: 32-bit words in an int64 tensor."""
        index = self.index.to(torch.int64)
        words = philox_words(index, blocks, self.key)
        if words is not None:
            return words
        row = index.unsqueeze(1).expand(-1, blocks)
        block = torch.arange(blocks, device=index.device).expand(len(index), -1)
        counter = (block, torch.zeros_like(row), row & MASK, (row >> 32) & MASK)
        return torch.stack(philox(counter, (self.key & MASK, self.key >> 32)), dim=-1)


def philox(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10: four 32-bit words for each counter, all held in int64 tensors.

    The low halves of products are masked only at the end: until then they are only xored into
    values that are masked. A signed product wraps, and masking its high half drops the sign.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c2 = ((p1 >> 32) ^ c1 ^ k0) & MASK, ((p0 >> 32) ^ c3 ^ k1) & MASK
        c1, c3 = p1, p0
        k0, k1 = (k0 + _WEYL[0]) & MASK, (k1 + _WEYL[1]) & MASK
    return c0, c1 & MASK, c2, c3 & MASK


if not TYPE_CHECKING:
    __getattr__ = renamed_names(__name__, Draws="Streams")
