"""Where data comes from: built-in sets, a file of arrays, or a user's own function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from dat.data.arrays import ARRAYS, read_sets
from dat.data.catalog import CATALOG
from dat.data.fetch import cached
from dat.data.folder import Listing, Reading, is_picture_folder, list_folder, read_pictures
from dat.data.images import ImageData
from dat.data.local import Parts
from dat.data.parquet import list_parquet
from dat.data.shards import is_sharded, open_shards
from dat.data.stored import CHUNK, Images, Stored
from dat.fields import did_you_mean
from dat.imports import call, find_callable
from dat.rng import generator

LOOKS = 2048
"""Pictures that are decoded for the statistics, of a set that is too large to decode whole."""
PICKLES = (".pkl", ".pickle", ".pt", ".pth", ".joblib")


@dataclass(frozen=True)
class Splits:
    """A training and a test set, and the pixel statistics that the model normalises by."""

    training: ImageData | Parts
    """The training set, or the parts that it lies in."""
    test: ImageData
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def train(self) -> ImageData:
        """The training set, as one."""
        if isinstance(self.training, Parts):
            raise ValueError(
                "the data lies in parts that stay where they are, and is needed as one"
            )
        return self.training

    @classmethod
    def of(cls, train: ImageData, test: ImageData) -> Splits:
        """Measure the statistics, by channel, on the training set."""
        if train.shape != test.shape:
            raise ValueError(
                f"training images are {train.shape} and test images {test.shape}: must be of one "
                "shape"
            )
        if train.classes != test.classes:
            raise ValueError(
                f"training data has {train.classes} classes and test data {test.classes}: "
                "give ImageData.of both the same classes=..."
            )
        mean, std = _statistics(train.images)
        return cls(train, test, tuple(mean.tolist()), tuple(std.clamp_min(1e-3).tolist()))


def _statistics(images: Images) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation by channel, a chunk at a time: doubles are large."""
    count, total, squares = 0, torch.zeros(images.shape[1]).double(), torch.zeros(1).double()
    rows = torch.arange(len(images))
    if isinstance(images, Stored) and images.slow and len(rows) > LOOKS:
        rows = rows[torch.linspace(0, len(rows) - 1, LOOKS).long()]
    for some in rows.split(CHUNK):
        chunk = images[some]
        pixels = chunk.transpose(0, 1).flatten(1).double()
        count += pixels.shape[1]
        total = total + pixels.sum(1)
        squares = squares + pixels.square().sum(1)
    mean = total / count
    spread = (squares / count - mean.square()).clamp_min(0)
    std = (spread * count / max(count - 1, 1)).sqrt()
    scale = 255.0 if images.dtype == torch.uint8 else 1.0
    return mean / scale, std / scale


def is_known(name: str) -> bool:
    """A name of ours, whatever there is in the current folder."""
    return name in SOURCES or name in CATALOG


def load(name: str, reading: Reading | None = None) -> Splits:
    """A built-in or fetched set, an .npz or .parquet file, a folder, or `package.module:function`.

    A folder holds pictures (one sub-folder a class), arrays (x_train.npy and so on), Parquet files,
    or the parts that `dat data shard` made.
    """
    path, reading = Path(name), reading or Reading()
    if name in SOURCES:
        return SOURCES[name]()
    if name in CATALOG:
        folder = cached(name)
        if folder is None:
            raise ValueError(
                f"data.name = {name}: not here yet; bring it with: dat data fetch {name}"
            )
        sets = read_sets(folder, reading.memory)
        return Splits.of(*(replace(it, names=CATALOG[name].classes) for it in sets))
    if path.is_dir():
        return _folder(path, reading)
    if path.suffix in PICKLES:
        raise ValueError(
            f"data.name = {name}: a pickle can run anything when it is opened, so none ever is; "
            f"save the arrays {', '.join(ARRAYS)} with numpy.savez"
        )
    if name.endswith(".npz"):
        return Splits.of(*read_sets(path, reading.memory))
    if path.suffix == ".parquet":
        return _pictures(path, reading)
    if ":" in name:
        return _imported(name)
    if path.is_absolute() or "/" in name:
        raise ValueError(f"data.name = {name}: no such file or folder")
    raise ValueError(
        f"data.name = {name!r}: unknown{did_you_mean(name, (*SOURCES, *CATALOG))} "
        "(or an .npz file, a folder of pictures, or package.module:function)"
    )


def _folder(path: Path, reading: Reading) -> Splits:
    if is_sharded(path):
        try:
            found = open_shards(path, reading)
        except ValueError as error:
            raise ValueError(f"data.name = {path}: {error}") from None
        return Splits(found.train, found.test, found.mean, found.std)
    if (path / f"{ARRAYS[0]}.npy").exists():
        return Splits.of(*read_sets(path, reading.memory))
    return _pictures(path, reading)


def list_pictures(path: Path, reading: Reading) -> tuple[Listing, Listing]:
    """The training and test pictures of a folder or of Parquet files."""
    if path.is_dir() and is_picture_folder(path):
        return list_folder(path, reading.test_share)
    if path.suffix == ".parquet" or any(path.rglob("*.parquet")):
        return list_parquet(path, reading.test_share)
    raise ValueError("holds neither pictures in one folder a class, nor arrays, nor parts")


def _pictures(path: Path, reading: Reading) -> Splits:
    try:
        train, test = read_pictures(list_pictures(path, reading), reading)
        return Splits.of(train, test)
    except (ValueError, OSError) as error:
        raise ValueError(f"data.name = {path}: {error}") from None


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
