"""Unlabelled images: a folder of pictures, a file of arrays, or a dataset without its labels."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from dat.data.arrays import read_array
from dat.data.folder import Listing, read_pictures
from dat.data.images import ImageData, as_floats
from dat.data.lazy_images import Images
from dat.data.local import Partitions
from dat.data.names import is_known
from dat.data.pictures import PICTURES, PictureFiles
from dat.data.reading import ReadOptions
from dat.data.sharding import is_sharded
from dat.data.sources import load

ARRAYS = ("x", "images", "x_unlabelled", "x_train")


def load_unlabelled(
    name: str, like: ImageData | Partitions, reading: ReadOptions | None = None
) -> ImageData:
    """Unlabelled images of the same shape and dtype as those of `like`."""
    try:
        images = _images(name, like.channels, reading)
        data = ImageData.of(images, torch.zeros(len(images), dtype=torch.int64))
    except (OSError, ValueError) as error:
        raise ValueError(f"data.unlabelled = {name}: {error}") from None
    if data.shape != like.shape:
        raise ValueError(
            f"data.unlabelled = {name}: its images are {data.shape}, the labelled ones {like.shape}"
        )
    images = data.images
    dtype = like.images.dtype if isinstance(like, ImageData) else like.dtype
    if images.dtype != dtype:  # a batch has one dtype
        images = _converted(images, dtype)
    return ImageData(images, data.labels, like.classes).without_labels()


def _converted(images: Images, dtype: torch.dtype) -> Tensor:
    """Convert uint8 to floats or floats to uint8, in memory."""
    tensor = images[torch.arange(len(images))]
    return (tensor * 255).round().to(torch.uint8) if dtype == torch.uint8 else as_floats(tensor)


def _images(name: str, channels: int, reading: ReadOptions | None) -> Images:
    path = Path(name)
    if is_known(name):
        return load(name, reading).train.images
    if path.is_dir() and not is_sharded(path) and not (path / "x_train.npy").exists():
        return _folder(path, channels, reading or ReadOptions())
    if path.suffix in (".npy", ".npz"):
        return read_array(path, ARRAYS)
    return load(name, reading).train.images


def _folder(path: Path, channels: int, reading: ReadOptions) -> Images:
    """All pictures in a folder and its subfolders, sorted by name."""
    names = sorted(
        str(file.relative_to(path)) for file in path.rglob("*") if file.suffix.lower() in PICTURES
    )
    if not names:
        raise ValueError(f"contains no pictures ({', '.join(PICTURES)})")
    listing = Listing(PictureFiles(path, names), torch.zeros(len(names), dtype=torch.int64), ("",))
    (data,) = read_pictures([listing], reading, channels=channels)
    return data.images
