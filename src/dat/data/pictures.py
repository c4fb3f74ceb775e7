"""Pictures as files have them, JPEG, PNG or WebP: decoded, cut out and scaled when needed."""

from __future__ import annotations

import io
import operator
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from dat.data.stored import Stored
from dat.rng import Draws

PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
FORMATS = ("PNG", "JPEG", "WEBP", "BMP")
"""What Pillow may make of a file, whatever its name says."""
AREA = (0.08, 1.0)
RATIO = (3 / 4, 4 / 3)
TRIES = 10
PIXELS = 100_000_000
"""A picture with more is taken for a bomb."""
Box = tuple[float, float, float, float]
Pixels = np.ndarray[Any, np.dtype[np.uint8]]


class OddSize(ValueError):
    """A picture is not of the size that all are to have."""


class Encoded(Protocol):
    """Pictures as bytes, by number."""

    def __len__(self) -> int: ...
    def read(self, row: int) -> bytes: ...
    def name(self, row: int) -> str: ...
    def take(self, rows: Sequence[int]) -> Encoded: ...
    def paths(self) -> Iterable[Path]:
        """The files that they are in."""


@dataclass(frozen=True)
class Files:
    """Picture files in a folder."""

    root: Path
    names: Sequence[str]

    def __len__(self) -> int:
        return len(self.names)

    def read(self, row: int) -> bytes:
        return (self.root / self.names[row]).read_bytes()

    def name(self, row: int) -> str:
        return str(self.root / self.names[row])

    def take(self, rows: Sequence[int]) -> Files:
        return Files(self.root, [self.names[row] for row in rows])

    def paths(self) -> Iterable[Path]:
        return (self.root / name for name in self.names)


@dataclass(frozen=True)
class Pictures(Stored):
    """Pictures, each as `size` (height, width) pixels.

    The shorter side is scaled to `resize` pixels and the middle is cut out; a picture that has
    the right size is taken as it is.
    """

    encoded: Encoded
    size: tuple[int, int]
    resize: int | None = None
    """Pixels of the shorter side; none: just enough."""
    channels: int = 3
    exact: bool = False
    """No scaling: a picture of another size is an error."""

    dtype = torch.uint8
    slow = True

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return torch.Size((len(self.encoded), self.channels, *self.size))

    def take(self, rows: Tensor) -> Pictures:
        return replace(self, encoded=self.encoded.take(rows.tolist()))

    def __getitem__(self, rows: Tensor) -> Tensor:
        """By several threads: Pillow leaves the interpreter to others while it decodes."""
        found = torch.empty((len(rows), *self.shape[1:]), dtype=torch.uint8)
        numbers = rows.tolist()
        with ThreadPoolExecutor(threads(len(numbers))) as pool:
            for place, image in enumerate(pool.map(self.decode, numbers)):
                found[place] = image
        return found

    def at_random(self, rows: Tensor, draws: Draws) -> Tensor:
        """The inception crop: a random part of each picture, scaled to the size; one thread."""
        luck = draws.uniform(torch.Size((len(rows), TRIES, 4)), torch.float64).numpy()
        images = [self.decode(row, luck[i]) for i, row in enumerate(rows.tolist())]
        return torch.stack(images)

    def decode(self, row: int, luck: np.ndarray[Any, Any] | None = None) -> Tensor:
        """One picture; what cannot be read is named."""
        try:
            pixels = self._pixels(self.encoded.read(row), luck)
        except OddSize as error:
            raise OddSize(f"{self.encoded.name(row)}: {error}") from None
        except (OSError, ValueError, SyntaxError, EOFError, MemoryError) as error:
            raise ValueError(
                f"{self.encoded.name(row)}: cannot be read ({_reason(error)}); remove it, or "
                "set data.corrupt=skip"
            ) from None
        if self.channels == 1:
            return torch.from_numpy(pixels).unsqueeze(0)
        return torch.from_numpy(pixels).permute(2, 0, 1)

    def _pixels(self, raw: bytes, luck: np.ndarray[Any, Any] | None) -> Pixels:
        from PIL import Image

        with _opened(raw) as picture:
            height, width = self.size
            if self.exact and picture.size != (width, height):
                raise OddSize(
                    f"is {picture.width} x {picture.height} pixels, others are {width} x {height}: "
                    "set data.size to the pixels a side that all are to have"
                )
            box = _middle if luck is None else _anywhere(luck)
            cut = box(picture.width, picture.height, self)
            # a JPEG can be decoded at a half, a quarter or an eighth, which is much faster
            scale = min((cut[2] - cut[0]) / width, (cut[3] - cut[1]) / height)
            if scale >= 2 and picture.format == "JPEG":
                whole = picture.size
                picture.draft(None, (int(whole[0] / scale), int(whole[1] / scale)))
                smaller = (picture.width / whole[0], picture.height / whole[1]) * 2
                left, up, right, down = map(operator.mul, cut, smaller)
                cut = left, up, right, down
            image = picture.convert("L" if self.channels == 1 else "RGB")
            if image.size != (width, height) or cut != (0, 0, width, height):
                bilinear = Image.Resampling.BILINEAR
                image = image.resize((width, height), bilinear, box=cut, reducing_gap=2.0)
            return np.array(image)


def _opened(raw: bytes) -> Any:
    """A picture whose header could be read, and that is not beyond measure."""
    from PIL import Image

    try:
        picture = Image.open(io.BytesIO(raw), formats=FORMATS)
    except Image.DecompressionBombError as error:
        raise ValueError(str(error)) from None
    if picture.width * picture.height > PIXELS:
        raise ValueError(f"{picture.width} x {picture.height} pixels are too many")
    if picture.mode.startswith("I"):
        raise ValueError("16 bits a pixel; save it with 8")
    return picture


def suffix_of(raw: bytes) -> str:
    """What a file with that picture should end in."""
    with _opened(raw) as picture:
        return f".{picture.format.lower()}"


def picture_size(raw: bytes) -> tuple[int, int, int]:
    """Channels, height and width, from the header."""
    with _opened(raw) as picture:
        grey = picture.mode in ("1", "L", "LA")
        return (1 if grey else 3), picture.height, picture.width


def _reason(error: BaseException) -> str:
    """Pillow names the object in memory that it read from; nobody knows that."""
    text = str(error).split(" <_io")[0] or type(error).__name__
    return " ".join(text.split())


def _middle(width: int, height: int, view: Pictures) -> Box:
    """The part that is left when the shorter side is scaled to `resize` and the middle cut out."""
    wanted_height, wanted_width = view.size
    shorter = view.resize or 0
    if shorter and (height, width) != view.size:
        scale = max(shorter / min(width, height), wanted_width / width, wanted_height / height)
    else:
        scale = max(wanted_width / width, wanted_height / height)
    across, down = wanted_width / scale, wanted_height / scale
    left, top = max((width - across) / 2, 0.0), max((height - down) / 2, 0.0)
    return left, top, min(left + across, width), min(top + down, height)


def _anywhere(luck: np.ndarray[Any, Any]) -> Callable[[int, int, Pictures], Box]:
    """A part of random area and aspect; after some tries that do not fit, the middle."""

    def box(width: int, height: int, view: Pictures) -> Box:
        for area, aspect, x, y in luck:
            pixels = (AREA[0] + (AREA[1] - AREA[0]) * area) * width * height
            low, high = np.log(RATIO)
            ratio = float(np.exp(low + (high - low) * aspect))
            across, down = round((pixels * ratio) ** 0.5), round((pixels / ratio) ** 0.5)
            if 0 < across <= width and 0 < down <= height:
                left, top = int(x * (width - across + 1)), int(y * (height - down + 1))
                return left, top, left + across, top + down
        return _middle(width, height, replace(view, resize=None))

    return box


def threads(most: int) -> int:
    """As many as there are cores for this process."""
    return max(1, min(len(os.sched_getaffinity(0)), most))
