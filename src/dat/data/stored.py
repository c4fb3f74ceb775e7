"""Images that are not in memory: read when they are needed, by the rows that are asked for."""

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

from dat.rng import Draws

CHUNK = 1024
"""Images that are looked at together when all of them are."""


class Stored(ABC):
    """Images somewhere else; indexed with rows like a tensor."""

    shape: torch.Size
    """Images, channels, height, width."""
    dtype: torch.dtype
    slow: bool = False
    """Worth processes of their own to read them."""

    def __len__(self) -> int:
        return self.shape[0]

    @abstractmethod
    def __getitem__(self, rows: Tensor) -> Tensor:
        """Those images, read."""

    @abstractmethod
    def take(self, rows: Tensor) -> Stored:
        """Those images, not read yet."""

    def clipped(self) -> Stored:
        """The same, in [0, 1] whatever the rounding."""
        return self

    def at_random(self, rows: Tensor, draws: Draws) -> Tensor:
        """Those images, cut out at random where they are larger than they have to be."""
        return self[rows]


Images = Tensor | Stored


def read(images: Images, rows: Tensor) -> Tensor:
    """Those images; to select from memory is many times as fast as to index it."""
    return images[rows] if isinstance(images, Stored) else images.index_select(0, rows)


def take(images: Images, rows: Tensor) -> Images:
    """Some of the images: copied from memory, or still where they are."""
    return images.take(rows) if isinstance(images, Stored) else images[rows]


def at_random(images: Images, rows: Tensor, draws: Draws) -> Tensor:
    """Those images; what is stored larger is cut out at random."""
    return images.at_random(rows, draws) if isinstance(images, Stored) else read(images, rows)


def chunks(images: Images) -> Iterator[Tensor]:
    """All images, some at a time."""
    for rows in torch.arange(len(images)).split(CHUNK):
        yield images[rows]


@dataclass(frozen=True)
class Mapped(Stored):
    """An array in a file, mapped into memory: only what is asked for is read from the disk."""

    file: Path
    offset: int
    kind: str
    """numpy's name of the numbers."""
    sizes: tuple[int, ...]
    """The array's own shape: images, and channels in front, at the end, or none."""
    rows: Tensor | None = None
    clips: bool = False
    """Floats are clipped to [0, 1]: they were found to be beyond it by a rounding error at most."""

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

    def clipped(self) -> Mapped:
        return replace(self, clips=True)

    def take(self, rows: Tensor) -> Mapped:
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
        """For another process, which maps the file itself."""
        return {key: value for key, value in self.__dict__.items() if key != "_array"}


class Joined(Stored):
    """Several sets of images, one after the other."""

    def __init__(self, pieces: Sequence[Images]) -> None:
        (_, *image), self.dtype = pieces[0].shape, pieces[0].dtype
        self.pieces = tuple(pieces)
        self.ends = torch.tensor([len(piece) for piece in pieces]).cumsum(0)
        self.shape = torch.Size((int(self.ends[-1]), *image))
        self.slow = any(isinstance(piece, Stored) and piece.slow for piece in pieces)

    def __getitem__(self, rows: Tensor) -> Tensor:
        found = torch.empty((len(rows), *self.shape[1:]), dtype=self.dtype)
        for piece, mine, within in self._by_piece(rows):
            found[mine] = piece[within]
        return found

    def at_random(self, rows: Tensor, draws: Draws) -> Tensor:
        found = torch.empty((len(rows), *self.shape[1:]), dtype=self.dtype)
        for piece, mine, within in self._by_piece(rows):
            found[mine] = at_random(piece, within, draws.pick(mine))
        return found

    def take(self, rows: Tensor) -> Stored:
        return _Some(self, rows)

    def _by_piece(self, rows: Tensor) -> Iterator[tuple[Images, Tensor, Tensor]]:
        owner = torch.searchsorted(self.ends, rows, right=True)
        for number, piece in enumerate(self.pieces):
            mine = (owner == number).nonzero().squeeze(1)
            if len(mine):
                start = int(self.ends[number]) - len(piece)
                yield piece, mine, rows[mine] - start


class _Some(Stored):
    """Some images of a set that is stored."""

    def __init__(self, whole: Stored, rows: Tensor) -> None:
        self.whole, self.rows, self.dtype, self.slow = whole, rows, whole.dtype, whole.slow
        self.shape = torch.Size((len(rows), *whole.shape[1:]))

    def __getitem__(self, rows: Tensor) -> Tensor:
        return self.whole[self.rows[rows]]

    def at_random(self, rows: Tensor, draws: Draws) -> Tensor:
        return self.whole.at_random(self.rows[rows], draws)

    def take(self, rows: Tensor) -> Stored:
        return _Some(self.whole, self.rows[rows])


def join(pieces: Sequence[Images]) -> Images:
    """One after the other, in memory if all of them are."""
    if len(pieces) == 1:
        return pieces[0]
    if all(isinstance(piece, Tensor) for piece in pieces):
        return torch.cat([piece for piece in pieces if isinstance(piece, Tensor)])
    return Joined(pieces)
