"""Images without labels: a folder of pictures, a file of arrays, or a set without its labels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dat.data.images import ImageData
from dat.data.sources import channels_first, load

PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
ARRAYS = ("x", "images", "x_unlabelled", "x_train")


def load_unlabelled(name: str, like: ImageData) -> ImageData:
    """Images of the same shape as those of `like`, without labels."""
    try:
        images = _images(name, like.channels)
        found = ImageData.of(images, torch.zeros(len(images), dtype=torch.int64))
    except (OSError, ValueError) as error:
        raise ValueError(f"data.unlabelled = {name}: {error}") from None
    if found.images.shape[1:] != like.images.shape[1:]:
        raise ValueError(
            f"data.unlabelled = {name}: its images are {tuple(found.images.shape[1:])}, the "
            f"labelled ones {tuple(like.images.shape[1:])}"
        )
    images = found.images
    if images.dtype != like.images.dtype:  # one kind in a batch
        images = images.float() / 255 if images.dtype == torch.uint8 else images
        if like.images.dtype == torch.uint8:
            images = (images * 255).round().to(torch.uint8)
    return ImageData(images, found.labels, like.classes).without_labels()


def _images(name: str, channels: int) -> Tensor:
    path = Path(name)
    if path.is_dir():
        return _folder(path, channels)
    if path.suffix in (".npy", ".npz"):
        return _array(path)
    return load(name).train.images


def _folder(path: Path, channels: int) -> Tensor:
    """Every picture in it and below, in the order of their names."""
    from PIL import Image

    files = sorted(it for it in path.rglob("*") if it.suffix.lower() in PICTURES)
    if not files:
        raise ValueError(f"no pictures in it ({', '.join(PICTURES)})")
    pictures: list[np.ndarray[Any, np.dtype[np.uint8]]] = []
    for file in files:
        try:
            with Image.open(file) as picture:
                pixels = np.asarray(picture.convert("L" if channels == 1 else "RGB"))
        except (OSError, ValueError, SyntaxError) as error:  # what Pillow makes of broken files
            raise ValueError(f"{file.name} cannot be read ({error})") from None
        if pictures and pixels.shape != pictures[0].shape:
            sizes = [f"{it.shape[1]} x {it.shape[0]}" for it in (pixels, pictures[0])]
            raise ValueError(f"{file.name} is {sizes[0]} pixels, {files[0].name} {sizes[1]}")
        pictures.append(pixels)
    stacked = torch.from_numpy(np.stack(pictures))
    return stacked.unsqueeze(1) if channels == 1 else channels_first(stacked)


def _array(path: Path) -> Tensor:
    if not path.is_file():
        raise ValueError("no such file")
    try:
        with path.open("rb") as raw:
            found = np.load(raw, allow_pickle=False)
            if isinstance(found, np.ndarray):
                return channels_first(torch.from_numpy(np.ascontiguousarray(found)))
            name = next((it for it in ARRAYS if it in found), None)
            if name is None:
                raise ValueError(f"holds none of {', '.join(ARRAYS)}")
            return channels_first(torch.from_numpy(np.ascontiguousarray(found[name])))
    except Exception as error:  # whatever a broken zip or an odd array makes numpy raise
        raise ValueError(f"not an array of images ({error})") from None
