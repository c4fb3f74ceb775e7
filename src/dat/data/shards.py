"""Parts of a set, each a folder that can be carried to the node whose data it is.

    OUT/part-1-of-6/manifest.json          what all parts have in common, and this one's own
    OUT/part-1-of-6/images.npy, labels.npy   or pictures/CLASS/..., as they were
    OUT/test/...                           the test set, the same at every node

Every manifest knows the sizes of all parts and the pixel statistics, so a worker opens its own part
and nothing of another's.
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

from dat.data.arrays import as_images, map_array
from dat.data.folder import Listing, Reading, list_classes, read_pictures
from dat.data.images import ImageData
from dat.data.local import Parts
from dat.data.pictures import Pictures, suffix_of
from dat.data.stored import chunks
from dat.files import write_whole
from dat.rng import derive, generator

MANIFEST = "manifest.json"
FORMAT = 1
KINDS = {torch.uint8: "uint8", torch.float32: "float32"}
COMMON = (
    *("format", "source", "by", "seed", "sizes", "classes", "names", "shape", "dtype", "totals"),
    *("mean", "std"),
)
"""What the manifests of a set's parts, and of its test set, must agree in."""
WAYS = ("random", "class", "dirichlet")
VERIFIED = 2**30
"""Bytes of images up to which the checksum is verified whenever a part is opened."""


class Sharded(NamedTuple):
    """A set in parts, as one node sees it."""

    train: Parts
    test: ImageData
    mean: tuple[float, ...]
    std: tuple[float, ...]


def divide(labels: Tensor, parts: int, *, by: str, alpha: float, seed: int) -> list[Tensor]:
    """The rows of each part: at random in equal sizes, by class, or non-IID by Dirichlet draws."""
    if by not in WAYS:
        raise ValueError(f"--by {by}: must be one of {', '.join(WAYS)}")
    if not 1 <= parts <= len(labels):
        raise ValueError(f"--parts {parts}: must be from 1 to {len(labels)}, the images there are")
    if alpha <= 0:
        raise ValueError(f"--alpha {alpha:g}: must be above 0; small is uneven, large is even")
    order = torch.randperm(len(labels), generator=generator(seed, "divide"))
    if by == "random":
        found = list(order.tensor_split(parts))
    elif by == "class":
        found = list(order[labels[order].argsort(stable=True)].tensor_split(parts))
    else:
        found = _dirichlet(labels, order, parts, alpha, seed)
    empty = [number for number, rows in enumerate(found) if len(rows) == 0]
    if empty:
        raise ValueError(
            f"part {empty[0] + 1} of {parts} would be empty: use a larger --alpha or fewer --parts"
        )
    return [rows.sort().values for rows in found]


def _dirichlet(labels: Tensor, order: Tensor, parts: int, alpha: float, seed: int) -> list[Tensor]:
    """Each class is shared out in proportions of its own."""
    random = np.random.Generator(np.random.Philox(derive(seed, "dirichlet")))
    pieces: list[list[Tensor]] = [[] for _ in range(parts)]
    for label in labels.unique().tolist():
        own = order[labels[order] == label]
        edges = (random.dirichlet([alpha] * parts).cumsum()[:-1] * len(own)).round().astype(int)
        for piece, rows in zip(pieces, own.tensor_split(edges.tolist()), strict=True):
            piece.append(rows)
    return [torch.cat(piece) for piece in pieces]


@dataclass(frozen=True)
class Origin:
    """What is divided, and how."""

    name: str
    train: ImageData
    test: ImageData
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def common(self, rows: Sequence[Tensor], **how: Any) -> dict[str, Any]:
        """What every manifest says."""
        return {
            "format": FORMAT,
            "source": self.name,
            **how,
            "sizes": [len(it) for it in rows],
            "classes": self.train.classes,
            "names": list(self.train.names),
            "shape": list(self.train.shape),
            "dtype": KINDS[self.train.images.dtype],
            "totals": self.train.counts().tolist(),
            "mean": list(self.mean),
            "std": list(self.std),
        }


def write_shards(
    origin: Origin, out: Path, *, parts: int, by: str = "random", alpha: float = 0.3, seed: int = 0
) -> list[Path]:
    """Divide a set and write its parts, whole or not at all."""
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"--out {out}: is not empty; choose another folder")
    divided = divide(origin.train.labels, parts, by=by, alpha=alpha, seed=seed)
    common = origin.common(divided, by=by, seed=seed, **({"alpha": alpha} if by == WAYS[2] else {}))
    beside = out.with_name(f".{out.name}.partial")
    shutil.rmtree(beside, ignore_errors=True)
    try:
        names = []
        for number, rows in enumerate(divided):
            names.append(f"part-{number + 1}-of-{parts}")
            _write(beside / names[-1], origin.train.take(rows), common | {"part": number})
        _write(beside / "test", origin.test, common | {"part": None})
        if out.exists():
            out.rmdir()
        beside.rename(out)
    except OSError as error:
        raise ValueError(f"--out {out}: cannot be written ({error.strerror})") from None
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return [out / name for name in names]


def _write(folder: Path, data: ImageData, common: dict[str, Any]) -> None:
    folder.mkdir(parents=True)
    kind = _write_pictures if isinstance(data.images, Pictures) else _write_arrays
    digests = kind(folder, data)
    own = {"images": len(data), "counts": data.counts().tolist(), "digests": digests}
    write_whole(folder / MANIFEST, json.dumps(common | own, indent=1).encode())


def _write_arrays(folder: Path, data: ImageData) -> dict[str, str]:
    shape = tuple(data.images.shape)
    header: dict[str, Any] = {"descr": "|u1" if data.images.dtype == torch.uint8 else "<f4"}
    with (folder / "images.npy").open("wb") as file:  # a full disk is an error here, not a signal
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
    """The files as they are; on one file system they are linked, which costs nothing."""
    assert isinstance(data.images, Pictures)
    encoded = data.images.encoded
    for row, label in enumerate(data.labels.tolist()):
        try:
            raw = encoded.read(row)
            suffix = suffix_of(raw)
        except (OSError, ValueError, SyntaxError) as error:
            raise ValueError(f"{encoded.name(row)}: cannot be read ({error})") from None
        # by the class's number: its name may be anything, even a path
        target = folder / "pictures" / _class(label) / f"{row:08d}{suffix}"
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(os.path.realpath(encoded.name(row)), target)
        except OSError:
            target.write_bytes(raw)
    return {"pictures": _pictures_digest(folder / "pictures")}


def _pictures_digest(root: Path) -> str:
    """Of all pictures, in the order of their names."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(root.glob("*/*")):
        raw = path.read_bytes()
        digest.update(f"{path.parent.name}/{path.name} {len(raw)}\n".encode() + raw)
    return digest.hexdigest()


def _class(label: int) -> str:
    return f"{label:05d}"


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def is_sharded(path: Path) -> bool:
    """Holds parts, or is one."""
    return ((path / MANIFEST).is_file() and not (path / "x_train.npy").exists()) or bool(
        _parts(path)
    )


def _parts(path: Path) -> list[Path]:
    return sorted(it.parent for it in path.glob(f"part-*-of-*/{MANIFEST}"))


def open_shards(path: Path, reading: Reading) -> Sharded:
    """What a node has of a set in parts; those of others need not be there, nor be readable."""
    here = {}
    for folder in _parts(path):
        with suppress(ValueError):  # another node's is none of our business
            here[int(read_manifest(folder)["part"])] = folder
    if not here:
        if (path / MANIFEST).is_file():
            raise ValueError(f"is a part itself; give the folder that it is in: {path.parent}")
        raise ValueError("none of its parts has a manifest that can be read")
    common = read_manifest(next(iter(here.values())))
    _check_reading(common, reading)
    test = path / "test"
    if not (test / MANIFEST).is_file():
        raise ValueError(f"{path}: no test set in it; copy the folder test to every node")
    for folder in (*here.values(), test):
        manifest = read_manifest(folder)
        if any(manifest[key] != common[key] for key in COMMON):
            raise ValueError(f"{folder.name} belongs to another set than the parts beside it")

    def open_part(part: int) -> ImageData:
        if part not in here:
            count = len(common["sizes"])
            raise ValueError(
                f"{path}: part {part + 1} of {count} is not here, or cannot be read, and this "
                "worker draws from it"
            )
        return _open(here[part], reading)

    parts = Parts(
        tuple(common["sizes"]),
        open_part,
        common["classes"],
        tuple(common["shape"]),
        tuple(common["names"]),
        dtype={name: kind for kind, name in KINDS.items()}[common["dtype"]],
        totals=tuple(common["totals"]),
    )
    return Sharded(parts, _open(test, reading), tuple(common["mean"]), tuple(common["std"]))


def _check_reading(common: dict[str, Any], reading: Reading) -> None:
    """What was settled when the set was divided."""
    if reading.corrupt == "skip":
        raise ValueError(
            "data.corrupt = skip: the sizes of parts are fixed; leave broken pictures out when you "
            "divide the set, dat data shard --corrupt skip"
        )
    size = common["shape"][1:]
    if reading.size is not None and [reading.size] * 2 != size:
        raise ValueError(
            f"data.size = {reading.size}: the parts were made for {size[1]} x {size[0]}"
        )


def read_manifest(folder: Path) -> dict[str, Any]:
    """Of a part or of the test set, with everything that it must say."""
    path = folder / MANIFEST
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        numbers = [found["classes"], found["images"], *found["sizes"], *found["shape"]]
        numbers += [*found["counts"], *found["totals"]]
        lengths = len(found["shape"]) == 3 and len(found["counts"]) == found["classes"]
        files = {"pictures"}, {"images.npy", "labels.npy"}
        sound = (
            all(type(number) is int and number >= 0 for number in numbers)
            and found["format"] == FORMAT
            and found["part"] in (None, *range(len(found["sizes"])))
            and found["dtype"] in KINDS.values()
            and lengths
            and set(found["digests"]) in files
            and all(isinstance(it, float) for it in (*found["mean"], *found["std"]))
            and all(isinstance(it, str) for it in found["names"])
            and all(key in found for key in COMMON)
        )
        if not sound:
            raise ValueError
        return found
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path}: not the manifest of a part") from None


def _open(folder: Path, reading: Reading) -> ImageData:
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
        raise ValueError(f"{folder}: holds {len(data)} images, its manifest {manifest['images']}")
    return data


def _open_pictures(root: Path, manifest: dict[str, Any], reading: Reading) -> ImageData:
    found = list_classes(root, tuple(map(_class, range(manifest["classes"]))))
    listing = Listing(found.encoded, found.labels, tuple(manifest["names"]))
    channels, height, width = manifest["shape"]
    (data,) = read_pictures([listing], reading, shape=(channels, (height, width)))
    return data


def check_arrays(folder: Path, manifest: dict[str, Any], *, always: bool = False) -> None:
    """Compare the files with the checksums; large ones and pictures only when it is asked for."""
    for name, digest in manifest["digests"].items():
        path = folder / name
        if not path.exists():
            raise ValueError(f"{path}: missing")
        if name == "pictures":
            found = _pictures_digest(path) if always else digest
        else:
            small = path.stat().st_size <= VERIFIED
            found = file_digest(path) if always or small else digest
        if found != digest:
            raise ValueError(f"{path}: is not what was written (the checksum differs)")
