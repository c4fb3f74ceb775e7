"""Partitions of a dataset on disk, each a folder that can be copied to its own node.

    OUT/part-1-of-6/manifest.json            the dataset as a whole, and this partition
    OUT/part-1-of-6/images.npy, labels.npy   or pictures/CLASS/..., the original files
    OUT/test/...                             the test set, the same on every node

Every manifest has the sizes of all partitions and the pixel statistics, so a worker opens only its
own partitions.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dat.core.files import atomic_write
from dat.core.rng import derive, generator
from dat.data.arrays import as_images, map_array
from dat.data.folder import Listing, list_classes, read_pictures
from dat.data.images import ImageData
from dat.data.lazy_images import chunks
from dat.data.local import Partitions
from dat.data.pictures import Pictures, suffix_of
from dat.data.reading import ReadOptions

MANIFEST = "manifest.json"
FORMAT = 1
DTYPES = {torch.uint8: "uint8", torch.float32: "float32"}
COMMON = (
    *("format", "source", "by", "seed", "sizes", "classes", "names", "shape", "dtype", "totals"),
    *("mean", "std"),
)
"""What the manifests of all partitions and of the test set must agree on."""
SCHEMES = ("random", "class", "dirichlet")
VERIFIED = 2**30
"""Bytes up to which a file's checksum is verified whenever a partition is opened."""


class Sharded(NamedTuple):
    """A dataset in partitions, as one node sees it."""

    train: Partitions
    test: ImageData
    mean: tuple[float, ...]
    std: tuple[float, ...]


def divide(labels: Tensor, parts: int, *, by: str, alpha: float, seed: int) -> list[Tensor]:
    """The rows of each partition: random and of equal size, by class, or non-IID by a Dirichlet
    distribution."""
    if by not in SCHEMES:
        raise ValueError(f"--by {by}: must be one of {', '.join(SCHEMES)}")
    if not 1 <= parts <= len(labels):
        raise ValueError(f"--parts {parts}: must be from 1 to {len(labels)}, the number of images")
    if alpha <= 0:
        raise ValueError(f"--alpha {alpha:g}: must be above 0; small is uneven, large is even")
    order = torch.randperm(len(labels), generator=generator(seed, "divide"))
    if by == "random":
        partitions = list(order.tensor_split(parts))
    elif by == "class":
        partitions = list(order[labels[order].argsort(stable=True)].tensor_split(parts))
    else:
        partitions = _dirichlet(labels, order, parts, alpha, seed)
    empty = [number for number, rows in enumerate(partitions) if len(rows) == 0]
    if empty:
        raise ValueError(
            f"part {empty[0] + 1} of {parts} would be empty: use a larger --alpha or fewer --parts"
        )
    return [rows.sort().values for rows in partitions]


def _dirichlet(labels: Tensor, order: Tensor, parts: int, alpha: float, seed: int) -> list[Tensor]:
    """Distribute each class in proportions drawn for that class."""
    random = np.random.Generator(np.random.Philox(derive(seed, "dirichlet")))
    partitions: list[list[Tensor]] = [[] for _ in range(parts)]
    for label in labels.unique().tolist():
        of_class = order[labels[order] == label]
        shares = random.dirichlet([alpha] * parts).cumsum()[:-1]
        edges = (shares * len(of_class)).round().astype(int)
        for pieces, rows in zip(partitions, of_class.tensor_split(edges.tolist()), strict=True):
            pieces.append(rows)
    return [torch.cat(pieces) for pieces in partitions]


@dataclass(frozen=True)
class Origin:
    """The dataset to be written in partitions."""

    name: str
    train: ImageData
    test: ImageData
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def common(self, rows: Sequence[Tensor], **how: Any) -> dict[str, Any]:
        """The entries that all manifests share."""
        return {
            "format": FORMAT,
            "source": self.name,
            **how,
            "sizes": [len(partition) for partition in rows],
            "classes": self.train.classes,
            "names": list(self.train.names),
            "shape": list(self.train.shape),
            "dtype": DTYPES[self.train.images.dtype],
            "totals": self.train.counts().tolist(),
            "mean": list(self.mean),
            "std": list(self.std),
        }


def write_shards(
    origin: Origin, out: Path, *, parts: int, by: str = "random", alpha: float = 0.3, seed: int = 0
) -> list[Path]:
    """Partition a dataset and write the partitions: all of them, or none on an error."""
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"--out {out}: is not empty; choose another folder")
    partitions = divide(origin.train.labels, parts, by=by, alpha=alpha, seed=seed)
    scheme = {"by": by, "seed": seed} | ({"alpha": alpha} if by == "dirichlet" else {})
    common = origin.common(partitions, **scheme)
    temporary = out.with_name(f".{out.name}.partial")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        names = []
        for number, rows in enumerate(partitions):
            names.append(f"part-{number + 1}-of-{parts}")
            _write(temporary / names[-1], origin.train.take(rows), common | {"part": number})
        _write(temporary / "test", origin.test, common | {"part": None})
        if out.exists():
            out.rmdir()
        temporary.rename(out)
    except OSError as error:
        raise ValueError(f"--out {out}: cannot be written ({error.strerror})") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return [out / name for name in names]


def _write(folder: Path, data: ImageData, common: dict[str, Any]) -> None:
    folder.mkdir(parents=True)
    write = _write_pictures if isinstance(data.images, Pictures) else _write_arrays
    digests = write(folder, data)
    about = {"images": len(data), "counts": data.counts().tolist(), "digests": digests}
    atomic_write(folder / MANIFEST, json.dumps(common | about, indent=1).encode())


def _write_arrays(folder: Path, data: ImageData) -> dict[str, str]:
    shape = tuple(data.images.shape)
    header: dict[str, Any] = {"descr": "|u1" if data.images.dtype == torch.uint8 else "<f4"}
    with (folder / "images.npy").open("wb") as file:  # on a full disk a memory map would crash
        np.lib.format.write_array_header_1_0(
            file, header | {"fortran_order": False, "shape": shape}
        )
        for chunk in chunks(data.images):
            file.write(chunk.contiguous().numpy().data)
    with (folder / "labels.npy").open("wb") as file:
        file.write(_npy(data.labels.numpy()))
    return {name: file_digest(folder / name) for name in ("images.npy", "labels.npy")}


def _npy(array: np.ndarray[Any, Any]) -> bytes:
    raw = io.BytesIO()
    np.save(raw, array)
    return raw.getvalue()


def _write_pictures(folder: Path, data: ImageData) -> dict[str, str]:
    """Keep the original files, as hard links where possible."""
    assert isinstance(data.images, Pictures)
    encoded = data.images.encoded
    for row, label in enumerate(data.labels.tolist()):
        try:
            raw = encoded.read(row)
            suffix = suffix_of(raw)
        except (OSError, ValueError, SyntaxError) as error:
            raise ValueError(f"{encoded.name(row)}: cannot be read ({error})") from None
        # by label, as a class name may be anything, even a path
        target = folder / "pictures" / _class_folder(label) / f"{row:08d}{suffix}"
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(os.path.realpath(encoded.name(row)), target)
        except OSError:
            target.write_bytes(raw)
    return {"pictures": _pictures_digest(folder / "pictures")}


def _pictures_digest(root: Path) -> str:
    """Hash of all pictures, in the order of their names."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(root.glob("*/*")):
        raw = path.read_bytes()
        digest.update(f"{path.parent.name}/{path.name} {len(raw)}\n".encode() + raw)
    return digest.hexdigest()


def _class_folder(label: int) -> str:
    return f"{label:05d}"


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def is_sharded(path: Path) -> bool:
    """Whether the folder contains partitions or is one."""
    is_partition = (path / MANIFEST).is_file() and not (path / "x_train.npy").exists()
    return is_partition or bool(_partition_folders(path))


def _partition_folders(path: Path) -> list[Path]:
    return sorted(manifest.parent for manifest in path.glob(f"part-*-of-*/{MANIFEST}"))


def open_shards(path: Path, reading: ReadOptions) -> Sharded:
    """Open the partitions on this node; those of other nodes may be missing or unreadable."""
    folders = {}
    for folder in _partition_folders(path):
        with suppress(ValueError):  # may be another node's partition
            folders[int(read_manifest(folder)["part"])] = folder
    if not folders:
        if (path / MANIFEST).is_file():
            raise ValueError(
                f"is a single partition; use the folder that contains it: {path.parent}"
            )
        raise ValueError("no partition has a readable manifest")
    common = read_manifest(next(iter(folders.values())))
    _check_reading(common, reading)
    test = path / "test"
    if not (test / MANIFEST).is_file():
        raise ValueError(f"{path}: contains no test set; copy the folder test to every node")
    for folder in (*folders.values(), test):
        manifest = read_manifest(folder)
        if any(manifest[key] != common[key] for key in COMMON):
            raise ValueError(f"{folder.name} belongs to a different dataset")

    def open_partition(partition: int) -> ImageData:
        if partition not in folders:
            count = len(common["sizes"])
            raise ValueError(
                f"{path}: part {partition + 1} of {count} is missing or unreadable, and this "
                "worker draws from it"
            )
        return _open(folders[partition], reading)

    train = Partitions(
        tuple(common["sizes"]),
        open_partition,
        common["classes"],
        tuple(common["shape"]),
        tuple(common["names"]),
        dtype={name: dtype for dtype, name in DTYPES.items()}[common["dtype"]],
        totals=tuple(common["totals"]),
    )
    return Sharded(train, _open(test, reading), tuple(common["mean"]), tuple(common["std"]))


def _check_reading(common: dict[str, Any], reading: ReadOptions) -> None:
    """Options that were fixed when the dataset was partitioned."""
    if reading.corrupt == "skip":
        raise ValueError(
            "data.corrupt = skip: the sizes of partitions are fixed; skip broken pictures when you "
            "partition the dataset, dat data shard --corrupt skip"
        )
    size = common["shape"][1:]
    if reading.size is not None and [reading.size] * 2 != size:
        raise ValueError(
            f"data.size = {reading.size}: the partitions were written for {size[1]} x {size[0]}"
        )


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read and validate the manifest of a partition or of the test set."""
    path = folder / MANIFEST
    try:
        manifest: dict[str, Any] = json.loads(path.read_text())
        if not _is_valid(manifest):
            raise ValueError
        return manifest
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path}: not the manifest of a partition") from None


def _is_valid(manifest: dict[str, Any]) -> bool:
    counts = [manifest["classes"], manifest["images"], *manifest["sizes"], *manifest["shape"]]
    counts += [*manifest["counts"], *manifest["totals"]]
    lengths = len(manifest["shape"]) == 3 and len(manifest["counts"]) == manifest["classes"]
    files = {"pictures"}, {"images.npy", "labels.npy"}
    return (
        all(type(count) is int and count >= 0 for count in counts)
        and manifest["format"] == FORMAT
        and manifest["part"] in (None, *range(len(manifest["sizes"])))
        and manifest["dtype"] in DTYPES.values()
        and lengths
        and set(manifest["digests"]) in files
        and all(isinstance(value, float) for value in (*manifest["mean"], *manifest["std"]))
        and all(isinstance(name, str) for name in manifest["names"])
        and all(key in manifest for key in COMMON)
    )


def _open(folder: Path, reading: ReadOptions) -> ImageData:
    manifest = read_manifest(folder)
    names, classes = tuple(manifest["names"]), manifest["classes"]
    if (folder / "pictures").is_dir():
        data = _open_pictures(folder / "pictures", manifest, reading)
    else:
        check_arrays(folder, manifest)
        labels = np.load(folder / "labels.npy", allow_pickle=False)
        images = as_images(map_array(folder / "images.npy"), reading.memory)
        data = ImageData.of(images, torch.from_numpy(labels), classes=classes, names=names)
    if len(data) != manifest["images"]:
        raise ValueError(
            f"{folder}: contains {len(data)} images, its manifest says {manifest['images']}"
        )
    return data


def _open_pictures(root: Path, manifest: dict[str, Any], reading: ReadOptions) -> ImageData:
    by_number = list_classes(root, tuple(map(_class_folder, range(manifest["classes"]))))
    listing = Listing(by_number.encoded, by_number.labels, tuple(manifest["names"]))
    channels, height, width = manifest["shape"]
    (data,) = read_pictures([listing], reading, shape=(channels, (height, width)))
    return data


def check_arrays(folder: Path, manifest: dict[str, Any], *, always: bool = False) -> None:
    """Verify the checksums of the files; of large ones and of pictures only with `always`."""
    for name, expected in manifest["digests"].items():
        path = folder / name
        if not path.exists():
            raise ValueError(f"{path}: missing")
        if name == "pictures":
            actual = _pictures_digest(path) if always else expected
        else:
            small = path.stat().st_size <= VERIFIED
            actual = file_digest(path) if always or small else expected
        if actual != expected:
            raise ValueError(f"{path}: has changed since it was written (the checksum differs)")
