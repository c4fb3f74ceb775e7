"""Published datasets: their archives, and the arrays that these must decode to."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Literal

from dat.core.lazy import numpy as np
from dat.data.decode import Array, Arrays, Contents

Kind = Literal["publisher", "npm"]
KINDS: tuple[Kind, ...] = ("publisher", "npm")
NPM = "npm:"


@dataclass(frozen=True)
class ArchiveMember:
    """A file in an archive that a decoder needs."""

    size: int
    """The maximum, in bytes."""
    checksum: str = ""
    """`algorithm:hex`; empty where the digests of the arrays suffice."""


@dataclass(frozen=True)
class Archive:
    """One download: a .tar.gz of members, or a single gzipped file."""

    url: str
    """http, https, file, or `npm:package@version`."""
    size: int
    members: Mapping[str, ArchiveMember]
    """By their names in the archive."""
    checksum: str = ""

    @property
    def is_npm(self) -> bool:
        return self.url.startswith(NPM)

    @property
    def file(self) -> str:
        """The file name on disk."""
        if self.is_npm:
            return self.url.removeprefix(NPM).replace("@", "-") + ".tgz"
        return self.url.rsplit("/", 1)[-1]

    @property
    def is_tar(self) -> bool:
        return self.file.endswith((".tar.gz", ".tgz"))


@dataclass(frozen=True)
class DownloadOrigin:
    """One of the places that a dataset can be downloaded from."""

    archives: tuple[Archive, ...]
    decode: Callable[[Contents], Arrays]
    """From file contents by name, without folders."""
    digests: Mapping[str, str] = field(default_factory=dict)
    """Of this origin's arrays, where origins differ in content."""
    split: str = "the publisher's"

    @property
    def kind(self) -> Kind:
        return "npm" if self.archives[0].is_npm else "publisher"

    @property
    def download_size(self) -> int:
        """Bytes of all archives."""
        return sum(archive.size for archive in self.archives)

    def __str__(self) -> str:
        url = self.archives[0].url
        return url if self.kind == "npm" or len(self.archives) == 1 else url.rsplit("/", 1)[0]

    def arrays(self, contents: Contents) -> Arrays:
        """Verify the checksum of each file, then decode."""
        for archive in self.archives:
            for path, member in archive.members.items():
                name, expected = PurePosixPath(path).name, member.checksum
                if expected and checksum(contents[name], expected) != expected:
                    raise ValueError(f"{name} is not the published file: its checksum differs")
        return self.decode(contents)


@dataclass(frozen=True)
class Published:
    """A dataset that can be fetched."""

    name: str
    about: str
    shape: tuple[int, int, int]
    classes: tuple[str, ...]
    train: tuple[int, ...]
    """Images per class."""
    test: tuple[int, ...]
    origins: tuple[DownloadOrigin, ...]
    digests: Mapping[str, str] = field(default_factory=dict)
    """Of the arrays, for every origin; empty where origins differ."""

    @property
    def size(self) -> int:
        """Bytes of the arrays on disk."""
        return (sum(self.train) + sum(self.test)) * (math.prod(self.shape) + 8)

    def check(self, arrays: Arrays, origin: DownloadOrigin) -> None:
        """Check shapes, counts per class and digests."""
        for split, counts in (("train", self.train), ("test", self.test)):
            x, y = arrays[f"x_{split}"], arrays[f"y_{split}"]
            if x.dtype != np.uint8 or x.shape != (sum(counts), *self.shape):
                raise ValueError(
                    f"x_{split} is {x.dtype} {x.shape}, expected uint8 {(sum(counts), *self.shape)}"
                )
            if y.dtype != np.int64 or y.shape != x.shape[:1]:
                raise ValueError(f"y_{split} is {y.dtype} {y.shape}, expected one int64 per image")
            if y.min() < 0 or y.max() >= len(counts):
                raise ValueError(f"y_{split} has labels from {y.min()} to {y.max()}")
            if (actual := counts_by_class(y, len(counts))) != counts:
                label = next(k for k in range(len(counts)) if actual[k] != counts[k])
                raise ValueError(
                    f"y_{split} has {actual[label]:,} images of class {label}, "
                    f"expected {counts[label]:,}"
                )
        for name, expected in (self.digests or origin.digests).items():
            if digest(arrays[name]) != expected:
                raise ValueError(f"{name} is not the published array: its digest differs")


def counts_by_class(y: Array, classes: int) -> tuple[int, ...]:
    return tuple(np.bincount(y, minlength=classes).tolist())


def checksum(data: bytes, like: str) -> str:
    """`algorithm:hex`, with the algorithm of `like`."""
    algorithm = like.partition(":")[0]
    return f"{algorithm}:{hashlib.new(algorithm, data, usedforsecurity=False).hexdigest()}"


def digest(array: Array) -> str:
    """Hash of the dtype, the shape and the bytes."""
    hasher = hashlib.blake2b(f"{array.dtype.str} {array.shape} ".encode(), digest_size=32)
    hasher.update(np.ascontiguousarray(array).data)
    return hasher.hexdigest()
