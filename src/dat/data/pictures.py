"""Pictures, that is image files (JPEG, PNG, WebP, BMP): decoded, cropped and scaled on demand."""

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

from dat.core.rng import Streams
from dat.data.lazy_images import LazyImages

PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
FORMATS = ("PNG", "JPEG", "WEBP", "BMP")
"""The decoders that Pillow may use, whatever the file name."""
AREA = (0.08, 1.0)
RATIO = (3 / 4, 4 / 3)
TRIES = 10
MAX_PIXELS = 100_000_000
"""A larger picture is rejected as a decompression bomb."""
Box = tuple[float, float, float, float]
Pixels = np.ndarray[Any, np.dtype[np.uint8]]


class SizeMismatch(ValueError):
    """A picture does not have the size of the others."""


class Encoded(Protocol):
    """Encoded pictures, by row."""

    def __len__(self) -> int: ...
    def read(self, row: int) -> bytes: ...
    def name(self, row: int) -> str: ...
    def take(self, rows: Sequence[int]) -> Encoded: ...
    def paths(self) -> Iterable[Path]:
        """The files that contain them."""


@dataclass(frozen=True)
class PictureFiles:
    """Picture files in a folder."""

    root: Path
    names: Sequence[str]

    def __len__(self) -> int:
        return len(self.names)

    def read(self, row: int) -> bytes:
        return (self.root / self.names[row]).read_bytes()

    def name(self, row: int) -> str:
        return str(self.root / self.names[row])

    def take(self, rows: Sequence[int]) -> PictureFiles:
        return PictureFiles(self.root, [self.names[row] for row in rows])

    def paths(self) -> Iterable[Path]:
        return (self.root / name for name in self.names)


@dataclass(frozen=True)
class Pictures(LazyImages):
    """Pictures as images of `size` (height, width).

    The shorter side is scaled to `resize` pixels before a center crop; a picture that already has
    the right size is used as it is.
    """

    encoded: Encoded
    size: tuple[int, int]
    resize: int | None = None
    """Length of the shorter side in pixels; None: as small as possible."""
    channels: int = 3
    exact: bool = False
    """Do not scale: a picture of another size is an error."""

    dtype = torch.uint8
    slow = True

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return torch.Size((len(self.encoded), self.channels, *self.size))

    def take(self, rows: Tensor) -> Pictures:
        return replace(self, encoded=self.encoded.take(rows.tolist()))

    def __getitem__(self, rows: Tensor) -> Tensor:
        """Decode in several threads, as Pillow releases the GIL."""
        images = torch.empty((len(rows), *self.shape[1:]), dtype=torch.uint8)
        with ThreadPoolExecutor(threads(len(rows))) as pool:
            for position, image in enumerate(pool.map(self.decode, rows.tolist())):
                images[position] = image
        return images

    def read_random(self, rows: Tensor, draws: Streams) -> Tensor:
        """The Inception crop: a random region of each picture, scaled to `size`; one thread."""
        uniform = draws.uniform(torch.Size((len(rows), TRIES, 4)), torch.float64).numpy()
        images = [self.decode(row, uniform[i]) for i, row in enumerate(rows.tolist())]
        return torch.stack(images)

    def decode(self, row: int, uniform: np.ndarray[Any, Any] | None = None) -> Tensor:
        """One picture: a random crop by `uniform`, or the center crop. Errors name the picture."""
        try:
            pixels = self._pixels(self.encoded.read(row), uniform)
        except SizeMismatch as error:
            raise SizeMismatch(f"{self.encoded.name(row)}: {error}") from None
        except (OSError, ValueError, SyntaxError, EOFError, MemoryError) as error:
            raise ValueError(
                f"{self.encoded.name(row)}: cannot be read ({_reason(error)}); remove it, or "
                "set data.corrupt=skip"
            ) from None
        if self.channels == 1:
            return torch.from_numpy(pixels).unsqueeze(0)
        return torch.from_numpy(pixels).permute(2, 0, 1)

    def _pixels(self, raw: bytes, uniform: np.ndarray[Any, Any] | None) -> Pixels:
        from PIL import Image

        with _opened(raw) as picture:
            height, width = self.size
            if self.exact and picture.size != (width, height):
                raise SizeMismatch(
                    f"is {picture.width} x {picture.height} pixels, others are {width} x {height}; "
                    "set data.size to the side length in pixels that they are scaled to"
                )
            crop = _center_crop if uniform is None else _random_crop(uniform)
            box = crop(picture.width, picture.height, self)
            # decoding a JPEG at a half, a quarter or an eighth of its size is much faster
            scale = min((box[2] - box[0]) / width, (box[3] - box[1]) / height)
            if scale >= 2 and picture.format == "JPEG":
                full_size = picture.size
                picture.draft(None, (int(full_size[0] / scale), int(full_size[1] / scale)))
                ratios = (picture.width / full_size[0], picture.height / full_size[1]) * 2
                left, top, right, bottom = map(operator.mul, box, ratios)
                box = left, top, right, bottom
            image = picture.convert("L" if self.channels == 1 else "RGB")
            if image.size != (width, height) or box != (0, 0, width, height):
                bilinear = Image.Resampling.BILINEAR
                image = image.resize((width, height), bilinear, box=box, reducing_gap=2.0)
            return np.array(image)


def _opened(raw: bytes) -> Any:
    """A picture with a valid header and an acceptable size."""
    from PIL import Image

    try:
        picture = Image.open(io.BytesIO(raw), formats=FORMATS)
    except Image.DecompressionBombError as error:
        raise ValueError(str(error)) from None
    if picture.width * picture.height > MAX_PIXELS:
        raise ValueError(f"{picture.width} x {picture.height} pixels are too many")
    if picture.mode.startswith("I"):
        raise ValueError("16 bits per pixel; save it with 8")
    return picture


def suffix_of(raw: bytes) -> str:
    """The file name suffix for this picture."""
    with _opened(raw) as picture:
        return f".{picture.format.lower()}"


def picture_size(raw: bytes) -> tuple[int, int, int]:
    """Channels, height and width, from the header."""
    with _opened(raw) as picture:
        grey = picture.mode in ("1", "L", "LA")
        return (1 if grey else 3), picture.height, picture.width


def _reason(error: BaseException) -> str:
    """The message, without the address of the in-memory file that Pillow adds."""
    text = str(error).split(" <_io")[0] or type(error).__name__
    return " ".join(text.split())


def _center_crop(width: int, height: int, view: Pictures) -> Box:
    """The region that remains after scaling the shorter side to `resize` and a center crop."""
    target_height, target_width = view.size
    shorter = view.resize or 0
    if shorter and (height, width) != view.size:
        scale = max(shorter / min(width, height), target_width / width, target_height / height)
    else:
        scale = max(target_width / width, target_height / height)
    crop_width, crop_height = target_width / scale, target_height / scale
    left, top = max((width - crop_width) / 2, 0.0), max((height - crop_height) / 2, 0.0)
    return left, top, min(left + crop_width, width), min(top + crop_height, height)


def _random_crop(uniform: np.ndarray[Any, Any]) -> Callable[[int, int, Pictures], Box]:
    """A region of random area and aspect ratio; the center crop if no try fits."""

    def crop(width: int, height: int, view: Pictures) -> Box:
        for area, aspect, x, y in uniform:
            pixels = (AREA[0] + (AREA[1] - AREA[0]) * area) * width * height
            low, high = np.log(RATIO)
            ratio = float(np.exp(low + (high - low) * aspect))
            crop_width, crop_height = round((pixels * ratio) ** 0.5), round((pixels / ratio) ** 0.5)
            if 0 < crop_width <= width and 0 < crop_height <= height:
                left, top = int(x * (width - crop_width + 1)), int(y * (height - crop_height + 1))
                return left, top, left + crop_width, top + crop_height
        return _center_crop(width, height, replace(view, resize=None))

    return crop


def threads(limit: int) -> int:
    """The number of cores available to this process, at most `limit`."""
    return max(1, min(len(os.sched_getaffinity(0)), limit))
