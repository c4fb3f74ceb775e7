"""Load a dataset: built in or fetched, from files, or from a user's own function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from dat.core.imports import call, import_callable
from dat.core.rng import generator
from dat.data.arrays import ARRAYS, read_sets
from dat.data.catalog import CATALOG
from dat.data.fetch import cached
from dat.data.folder import Listing, is_picture_folder, list_folder, read_pictures
from dat.data.hugging_face import PREFIX, list_hub
from dat.data.images import ImageData
from dat.data.lazy_images import CHUNK, Images, LazyImages
from dat.data.local import Partitions
from dat.data.names import check_name
from dat.data.parquet import list_parquet
from dat.data.reading import ReadOptions
from dat.data.sharding import is_sharded, open_shards
from dat.data.torch_datasets import image_data

PROBED = 2048
"""Pictures decoded for the statistics of a dataset that is too large to decode completely."""


@dataclass(frozen=True)
class Splits:
    """A training and a test set, with the pixel statistics for normalization."""

    training: ImageData | Partitions
    """The training set, or its partitions."""
    test: ImageData
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def train(self) -> ImageData:
        """The training set as one dataset."""
        if isinstance(self.training, Partitions):
            raise ValueError("the data is stored in partitions, but is needed as one dataset")
        return self.training

    @classmethod
    def of(cls, train: ImageData, test: ImageData) -> Splits:
        """Compute the statistics per channel on the training set."""
        if train.shape != test.shape:
            raise ValueError(
                f"training images are {train.shape} and test images {test.shape}: must have the "
                "same shape"
            )
        if train.classes != test.classes:
            raise ValueError(
                f"training data has {train.classes} classes and test data {test.classes}: "
                "pass the same classes=... to ImageData.of"
            )
        mean, std = _statistics(train.images)
        return cls(train, test, tuple(mean.tolist()), tuple(std.clamp_min(1e-3).tolist()))


def _statistics(images: Images) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation per channel, in chunks to limit the memory for doubles."""
    count, total, squares = 0, torch.zeros(images.shape[1]).double(), torch.zeros(1).double()
    rows = torch.arange(len(images))
    if isinstance(images, LazyImages) and images.slow and len(rows) > PROBED:
        rows = rows[torch.linspace(0, len(rows) - 1, PROBED).long()]
    for chunk_rows in rows.split(CHUNK):
        chunk = images[chunk_rows]
        pixels = chunk.transpose(0, 1).flatten(1).double()
        count += pixels.shape[1]
        total = total + pixels.sum(1)
        squares = squares + pixels.square().sum(1)
    mean = total / count
    variance = (squares / count - mean.square()).clamp_min(0)
    std = (variance * count / max(count - 1, 1)).sqrt()
    scale = 255.0 if images.dtype == torch.uint8 else 1.0
    return mean / scale, std / scale


def load(name: str, reading: ReadOptions | None = None) -> Splits:
    """Load a named dataset, an .npz or .parquet file, a folder, `hf/NAME` from the Hugging Face
    hub, or `package.module:function`.

    A folder contains pictures (one subfolder per class), arrays (x_train.npy and so on), Parquet
    files, or the partitions written by `dat data shard`.
    """
    check_name(name)
    path, reading = Path(name), reading or ReadOptions()
    if name in SOURCES:
        return SOURCES[name]()
    if name in CATALOG:
        folder = cached(name)
        assert folder is not None  # check_name has found it
        datasets = read_sets(folder, reading.memory)
        return Splits.of(*(replace(data, names=CATALOG[name].classes) for data in datasets))
    if name.startswith(PREFIX):
        return Splits.of(*read_pictures(list_hub(name, reading.test_share), reading))
    if path.is_dir():
        return _folder(path, reading)
    if name.endswith(".npz"):
        return Splits.of(*read_sets(path, reading.memory))
    if path.suffix == ".parquet":
        return _pictures(path, reading)
    return _imported(name)


def _folder(path: Path, reading: ReadOptions) -> Splits:
    if is_sharded(path):
        try:
            sharded = open_shards(path, reading)
        except ValueError as error:
            raise ValueError(f"data.name = {path}: {error}") from None
        return Splits(sharded.train, sharded.test, sharded.mean, sharded.std)
    if (path / f"{ARRAYS[0]}.npy").exists():
        return Splits.of(*read_sets(path, reading.memory))
    return _pictures(path, reading)


def list_pictures(path: Path, reading: ReadOptions) -> tuple[Listing, Listing]:
    """The training and test pictures of a folder or of Parquet files."""
    if path.is_dir() and is_picture_folder(path):
        return list_folder(path, reading.test_share)
    if path.suffix == ".parquet" or any(path.rglob("*.parquet")):
        return list_parquet(path, reading.test_share)
    raise ValueError("contains neither class folders of pictures, nor arrays, nor partitions")


def _pictures(path: Path, reading: ReadOptions) -> Splits:
    try:
        train, test = read_pictures(list_pictures(path, reading), reading)
        return Splits.of(train, test)
    except (ValueError, OSError) as error:
        raise ValueError(f"data.name = {path}: {error}") from None


def digits() -> Splits:
    """scikit-learn's 1,797 handwritten digits of 8 x 8 pixels, which need no download.

    The split is ours and fixed: 1,437 for training, 360 for testing.
    """
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = torch.from_numpy(bunch.images).float().div_(16)
    data = ImageData.of(images, torch.from_numpy(bunch.target), classes=10)
    order = torch.randperm(len(data), generator=generator(0, "digits-split"))
    return Splits.of(data.take(order[360:]), data.take(order[:360]))


def _imported(name: str) -> Splits:
    """Call a user's function, which returns `Splits` or a pair (train, test) of datasets."""
    function = import_callable(name, what="data.name")
    result = call(function, what=f"data.name = {name!r}")
    if isinstance(result, Splits):
        return result
    if isinstance(result, tuple) and len(result) == 2:
        try:
            return Splits.of(*(image_data(part) for part in result))
        except ValueError as error:
            raise ValueError(f"data.name = {name!r}: {error}") from None
    raise ValueError(
        f"data.name = {name!r}: must return (train, test), each a map-style dataset, a pair of "
        "tensors (images, labels), or dat.ImageData"
    )


SOURCES: dict[str, Callable[[], Splits]] = {
    "digits": digits,
}
