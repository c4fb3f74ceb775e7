"""Generated images with labels, as published for adversarial training: an .npz file with the
arrays `image` and `label`, of up to tens of millions of images. A large uncompressed file is
memory-mapped.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

import torch

from dat.data.arrays import MEMORY, as_images, as_labels, read_member
from dat.data.images import ImageData
from dat.data.local import Partitions

IMAGES = ("image", "images", "x")
LABELS = ("label", "labels", "y")


def load_synthetic(name: str, like: ImageData | Partitions, memory: float = MEMORY) -> ImageData:
    """Labelled images of the shape, the dtype and the classes of those of `like`."""
    try:
        data = _read(Path(name), like.classes, memory)
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise ValueError(f"data.synthetic = {name}: {error}") from None
    dtype = like.images.dtype if isinstance(like, ImageData) else like.dtype
    for what, own, expected in (
        ("images are", data.shape, like.shape),
        ("pixels are", data.images.dtype, dtype),
    ):
        if own != expected:
            raise ValueError(
                f"data.synthetic = {name}: its {what} {own}, those of the training set {expected}"
            )
    return data


def _read(path: Path, classes: int, memory: float) -> ImageData:
    if not path.is_file():
        raise ValueError("no such file")
    if not zipfile.is_zipfile(path):
        raise ValueError("not an .npz file; use numpy.savez(file, image=..., label=...)")
    with zipfile.ZipFile(path) as archive:
        available = {Path(file).stem for file in archive.namelist()}
        found = [
            next((name for name in names if name in available), "") for names in (IMAGES, LABELS)
        ]
        if not all(found):
            raise ValueError(
                f"contains {', '.join(sorted(available))}, but needs the arrays image and label"
            )
        images, labels = (read_member(path, archive, name, memory) for name in found)
    y = torch.from_numpy(as_labels(labels, found[1]))
    return ImageData.of(as_images(images, memory), y, classes=classes)
