"""Images without labels: a folder of pictures, a file of arrays, or a set without its labels."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from dat.data.arrays import read_array
from dat.data.folder import Listing, Reading, read_pictures
from dat.data.images import ImageData, as_floats
from dat.data.local import Parts
from dat.data.pictures import PICTURES, Files
from dat.data.shards import is_sharded
from dat.data.sources import is_known, load
from dat.data.stored import Images

ARRAYS = ("x", "images", "x_unlabelled", "x_train")


def load_unlabelled(
    name: str, like: ImageData | Parts, reading: Reading | None = None
) -> ImageData:
    """Images of the same shape as those of `like`, without labels."""
    try:
        images = _images(name, like.channels, reading)
        found = ImageData.of(images, torch.zeros(len(images), dtype=torch.int64))
    except (OSError, ValueError) as error:
        raise ValueError(f"data.unlabelled = {name}: {error}") from None
    if found.shape != like.shape:
        raise ValueError(
            f"data.unlabelled = {name}: its images are {found.shape}, the labelled ones "
            f"{like.shape}"
        )
    images = found.images
    wanted = like.images.dtype if isinstance(like, ImageData) else like.dtype
    if images.dtype != wanted:  # one kind in a batch
        images = _converted(images, wanted)
    return ImageData(images, found.labels, like.classes).without_labels()


def _converted(images: Images, dtype: torch.dtype) -> Tensor:
    """Bytes as floats, or floats as bytes, in memory."""
    whole = images[torch.arange(len(images))]
    return (whole * 255).round().to(torch.uint8) if dtype == torch.uint8 else as_floats(whole)


def _images(name: str, channels: int, reading: Reading | None) -> Images:
    path = Path(name)
    if is_known(name):
        return load(name, reading).train.images
    if path.is_dir() and not is_sharded(path) and not (path / "x_train.npy").exists():
        return _folder(path, channels, reading or Reading())
    if path.suffix in (".npy", ".npz"):
        return read_array(path, ARRAYS)
    return load(name, reading).train.images


def _folder(path: Path, channels: int, reading: Reading) -> Images:
    """Every picture in it and below, in the order of their names."""
    names = sorted(
        str(it.relative_to(path)) for it in path.rglob("*") if it.suffix.lower() in PICTURES
    )
    if not names:
        raise ValueError(f"no pictures in it ({', '.join(PICTURES)})")
    listing = Listing(Files(path, names), torch.zeros(len(names), dtype=torch.int64), ("",))
    (found,) = read_pictures([listing], reading, channels=channels)
    return found.images
