"""Where data comes from: built-in sets, a file of arrays, or a user's own function."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dat.data.images import ImageData
from dat.fields import did_you_mean
from dat.imports import call, find_callable
from dat.rng import generator

CHUNK = 1024
ARRAYS = ("x_train", "y_train", "x_test", "y_test")


@dataclass(frozen=True)
class Splits:
    """A training and a test set, and the pixel statistics that the model normalises by."""

    train: ImageData
    test: ImageData
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def of(cls, train: ImageData, test: ImageData) -> Splits:
        """Measure the statistics, by channel, on the training set."""
        if train.images.shape[1:] != test.images.shape[1:]:
            raise ValueError(
                f"training images are {tuple(train.images.shape[1:])} and test images "
                f"{tuple(test.images.shape[1:])}: must be of one shape"
            )
        if train.classes != test.classes:
            raise ValueError(
                f"training data has {train.classes} classes and test data {test.classes}: "
                "give ImageData.of both the same classes=..."
            )
        mean, std = _statistics(train.images)
        return cls(train, test, tuple(mean.tolist()), tuple(std.clamp_min(1e-3).tolist()))


def _statistics(images: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation by channel, a chunk at a time: doubles are large."""
    count, total, squares = 0, torch.zeros(images.shape[1]).double(), torch.zeros(1).double()
    for chunk in images.split(CHUNK):
        pixels = chunk.transpose(0, 1).flatten(1).double()
        count += pixels.shape[1]
        total = total + pixels.sum(1)
        squares = squares + pixels.square().sum(1)
    mean = total / count
    spread = (squares / count - mean.square()).clamp_min(0)
    std = (spread * count / max(count - 1, 1)).sqrt()
    scale = 255.0 if images.dtype == torch.uint8 else 1.0
    return mean / scale, std / scale


def load(name: str) -> Splits:
    """A built-in set, the path of an .npz file, or `package.module:function`."""
    if name in SOURCES:
        return SOURCES[name]()
    if name.endswith(".npz"):
        return _arrays(Path(name))
    if ":" in name:
        return _imported(name)
    raise ValueError(
        f"data.name = {name!r}: unknown{did_you_mean(name, SOURCES)} "
        "(or the path of an .npz file, or package.module:function)"
    )


def digits() -> Splits:
    """scikit-learn's 1,797 handwritten digits of 8 x 8 pixels, inside its wheel: no download.

    The split is ours and fixed: 1,437 to train on, 360 to test.
    """
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = torch.from_numpy(bunch.images).float().div_(16)
    data = ImageData.of(images, torch.from_numpy(bunch.target), classes=10)
    order = torch.randperm(len(data), generator=generator(0, "digits-split"))
    return Splits.of(data.take(order[360:]), data.take(order[:360]))


def _arrays(path: Path) -> Splits:
    if not path.is_file():
        raise ValueError(f"data.name = {path}: no such file")
    if not zipfile.is_zipfile(path):
        raise ValueError(f"data.name = {path}: not an .npz file; make one with numpy.savez")
    try:
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            missing = [name for name in ARRAYS if name not in file]
            if missing:
                raise ValueError(f"holds no {', '.join(missing)}; needed are {', '.join(ARRAYS)}")
            arrays = {name: np.ascontiguousarray(file[name]) for name in ARRAYS}
    except Exception as error:  # whatever a broken zip or an odd array makes numpy raise
        raise ValueError(f"data.name = {path}: {error}") from None
    labels = {name: _labels(arrays[name], f"{path}: {name}") for name in ("y_train", "y_test")}
    classes = max(int(max(y.max(initial=0) for y in labels.values())) + 1, 1)
    sets = []
    for split in ("train", "test"):
        try:
            images = channels_first(torch.from_numpy(arrays[f"x_{split}"]))
            y = torch.from_numpy(labels[f"y_{split}"])
            sets.append(ImageData.of(images, y, classes=classes))
        except (TypeError, ValueError) as error:
            raise ValueError(f"data.name = {path}, {split}: {error}") from None
    return Splits.of(*sets)


def _labels(y: np.ndarray[Any, np.dtype[Any]], where: str) -> np.ndarray[Any, np.dtype[np.int64]]:
    if y.dtype.kind not in "iu":
        raise ValueError(f"{where} is {y.dtype}: labels must be whole numbers")
    return y.astype(np.int64)


def channels_first(images: Tensor) -> Tensor:
    """Arrays on disk often have the channels last; three or one in front means they are first."""
    if images.dim() == 4 and images.shape[3] in (1, 3) and images.shape[1] not in (1, 3):
        return images.permute(0, 3, 1, 2).contiguous()
    return images


def _imported(name: str) -> Splits:
    """A function of the user's that returns `Splits` or a pair (train, test) of `ImageData`."""
    function = find_callable(name, what="data.name")
    made = call(function, what=f"data.name = {name!r}")
    if isinstance(made, Splits):
        return made
    if isinstance(made, tuple) and len(made) == 2:
        train, test = made
        if isinstance(train, ImageData) and isinstance(test, ImageData):
            return Splits.of(train, test)
    raise ValueError(f"data.name = {name!r}: must return (train, test), two dat.ImageData")


SOURCES: dict[str, Callable[[], Splits]] = {
    "digits": digits,
}
