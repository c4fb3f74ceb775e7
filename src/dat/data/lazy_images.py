"""Images that are not in memory: rows are read when they are indexed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dat.core.rng import Streams

CHUNK = 1024
"""Images read at a time when iterating over all of them."""


class LazyImages(ABC):
    """Images on disk, indexed with a tensor of rows like a tensor."""

    shape: torch.Size
    """Images, channels, height, width."""
    dtype: torch.dtype
    slow: bool = False
    """Whether reading is expensive enough for loader processes."""
    random: bool = False
    """Whether reading an image draws random numbers."""

    def __len__(self) -> int:
        return self.shape[0]

    @abstractmethod
    def __getitem__(self, rows: Tensor) -> Tensor:
        """Read the given images."""

    @abstractmethod
    def take(self, rows: Tensor) -> LazyImages:
        """The given images, still lazy."""

    def clipped(self) -> LazyImages:
        """The same images, clipped to [0, 1]."""
        return self

    def read_random(self, rows: Tensor, draws: Streams) -> Tensor:
        """Read random crops of the given images, where they are stored at a larger size."""
        return self[rows]


Images = Tensor | LazyImages


def read(images: Images, rows: Tensor) -> Tensor:
    """Read the given images; `index_select` is many times as fast as indexing."""
    return images[rows] if isinstance(images, LazyImages) else images.index_select(0, rows)


def take(images: Images, rows: Tensor) -> Images:
    """The given images: copied from memory, or still lazy."""
    return images.take(rows) if isinstance(images, LazyImages) else images[rows]


def read_random(images: Images, rows: Tensor, draws: Streams) -> Tensor:
    """Read the given images, as random crops where they are stored at a larger size."""
    return images.read_random(rows, draws) if isinstance(images, LazyImages) else read(images, rows)


def chunks(images: Images) -> Iterator[Tensor]:
    """All images, CHUNK at a time."""
    for rows in torch.arange(len(images)).split(CHUNK):
        yield images[rows]


@dataclass(frozen=True)
class MemoryMapped(LazyImages):
    """An array in a memory-mapped file."""

    file: Path
    offset: int
    kind: str
    """The numpy dtype's name."""
    sizes: tuple[int, ...]
    """The shape of the array: images first, with channels second, last or absent."""
    rows: Tensor | None = None
    clips: bool = False
    """Clip floats to [0, 1], which they exceed by a rounding error at most."""

    @property
    def channels_last(self) -> bool:
        return len(self.sizes) == 4 and self.sizes[3] in (1, 3) and self.sizes[1] not in (1, 3)

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        count = self.sizes[0] if self.rows is None else len(self.rows)
        if len(self.sizes) == 3:
            return torch.Size((count, 1, *self.sizes[1:]))
        _, *rest = self.sizes
        return torch.Size(
            (count, rest[2], rest[0], rest[1]) if self.channels_last else (count, *rest)
        )

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return torch.uint8 if self.kind == "uint8" else torch.float32

    def clipped(self) -> MemoryMapped:
        return replace(self, clips=True)

    def take(self, rows: Tensor) -> MemoryMapped:
        return replace(self, rows=rows if self.rows is None else self.rows[rows])

    def __getitem__(self, rows: Tensor) -> Tensor:
        if self.rows is not None:
            rows = self.rows[rows]
        images = torch.from_numpy(self._array[rows.numpy()])
        if self.dtype != torch.uint8:
            images = images.float().clamp_(0.0, 1.0) if self.clips else images.float()
        if images.dim() == 3:
            return images.unsqueeze(1)
        return images.permute(0, 3, 1, 2).contiguous() if self.channels_last else images

    @cached_property
    def _array(self) -> np.ndarray[Any, np.dtype[Any]]:
        return np.memmap(self.file, self.kind, "r", self.offset, self.sizes)

    def __getstate__(self) -> dict[str, Any]:
        """Another process maps the file itself."""
        return {key: value for key, value in self.__dict__.items() if key != "_array"}


class Concatenated(LazyImages):
    """Several sets of images, concatenated."""

    def __init__(self, pieces: Sequence[Images]) -> None:
        (_, *image), self.dtype = pieces[0].shape, pieces[0].dtype
        self.pieces = tuple(pieces)
        self.ends = torch.tensor([len(piece) for piece in pieces]).cumsum(0)
        self.shape = torch.Size((int(self.ends[-1]), *image))
        lazy = [piece for piece in pieces if isinstance(piece, LazyImages)]
        self.slow = any(piece.slow for piece in lazy)
        self.random = any(piece.random for piece in lazy)

    def __getitem__(self, rows: Tensor) -> Tensor:
        images = torch.empty((len(rows), *self.shape[1:]), dtype=self.dtype)
        for piece, positions, piece_rows in self._by_piece(rows):
            images[positions] = piece[piece_rows]
        return images

    def read_random(self, rows: Tensor, draws: Streams) -> Tensor:
        images = torch.empty((len(rows), *self.shape[1:]), dtype=self.dtype)
        for piece, positions, piece_rows in self._by_piece(rows):
            images[positions] = read_random(piece, piece_rows, draws.select(positions))
        return images

    def take(self, rows: Tensor) -> LazyImages:
        return Subset(self, rows)

    def _by_piece(self, rows: Tensor) -> Iterator[tuple[Images, Tensor, Tensor]]:
        """Each piece with the positions in `rows` that it provides, and their rows within it."""
        owner = torch.searchsorted(self.ends, rows, right=True)
        for number, piece in enumerate(self.pieces):
            positions = (owner == number).nonzero().squeeze(1)
            if len(positions):
                start = int(self.ends[number]) - len(piece)
                yield piece, positions, rows[positions] - start


class Subset(LazyImages):
    """Some rows of lazy images."""

    def __init__(self, base: LazyImages, rows: Tensor) -> None:
        self.base, self.rows, self.dtype = base, rows, base.dtype
        self.slow, self.random = base.slow, base.random
        self.shape = torch.Size((len(rows), *base.shape[1:]))

    def __getitem__(self, rows: Tensor) -> Tensor:
        return self.base[self.rows[rows]]

    def read_random(self, rows: Tensor, draws: Streams) -> Tensor:
        return self.base.read_random(self.rows[rows], draws)

    def take(self, rows: Tensor) -> LazyImages:
        return Subset(self.base, self.rows[rows])


def join(pieces: Sequence[Images]) -> Images:
    """Concatenate, in memory if all pieces are."""
    if len(pieces) == 1:
        return pieces[0]
    if all(isinstance(piece, Tensor) for piece in pieces):
        return torch.cat([piece for piece in pieces if isinstance(piece, Tensor)])
    return Concatenated(pieces)
