"""What a published set is: the archives it comes in, and the arrays that must come out of them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Literal

import numpy as np

from dat.data.decode import Array, Arrays, Contents

Kind = Literal["publisher", "npm"]
KINDS: tuple[Kind, ...] = ("publisher", "npm")
NPM = "npm:"


@dataclass(frozen=True)
class Part:
    """A file that a decoder needs."""

    size: int
    """At most so many bytes."""
    checksum: str = ""
    """`algorithm:hex`; none where the digests of the arrays do."""


@dataclass(frozen=True)
class Archive:
    """What is fetched in one go: a .tar.gz of parts, or a single part in gzip."""

    url: str
    """http, https, file, or `npm:package@version`."""
    size: int
    parts: Mapping[str, Part]
    """By the names in the archive."""
    checksum: str = ""

    @property
    def is_npm(self) -> bool:
        return self.url.startswith(NPM)

    @property
    def file(self) -> str:
        """Its name on disk."""
        if self.is_npm:
            return self.url.removeprefix(NPM).replace("@", "-") + ".tgz"
        return self.url.rsplit("/", 1)[-1]

    @property
    def is_tar(self) -> bool:
        return self.file.endswith((".tar.gz", ".tgz"))


@dataclass(frozen=True)
class Origin:
    """One of the places that a set can be had from."""

    archives: tuple[Archive, ...]
    decode: Callable[[Contents], Arrays]
    """From files by their names, folders left out."""
    digests: Mapping[str, str] = field(default_factory=dict)
    """Of the arrays that come from here, where other origins give others."""
    split: str = "the publisher's"

    @property
    def kind(self) -> Kind:
        return "npm" if self.archives[0].is_npm else "publisher"

    def __str__(self) -> str:
        url = self.archives[0].url
        return url if self.kind == "npm" or len(self.archives) == 1 else url.rsplit("/", 1)[0]

    def arrays(self, contents: Contents) -> Arrays:
        """Decoded, after each file was found to be the one that was published."""
        for archive in self.archives:
            for path, part in archive.parts.items():
                name = PurePosixPath(path).name
                if part.checksum and checksum(contents[name], part.checksum) != part.checksum:
                    raise ValueError(f"{name} is not the published file: its checksum is another")
        return self.decode(contents)


@dataclass(frozen=True)
class Published:
    """A set that can be fetched."""

    name: str
    about: str
    shape: tuple[int, int, int]
    classes: tuple[str, ...]
    train: tuple[int, ...]
    """How many of each class."""
    test: tuple[int, ...]
    origins: tuple[Origin, ...]
    digests: Mapping[str, str] = field(default_factory=dict)
    """Of the arrays, whatever their origin; none where origins differ."""

    @property
    def size(self) -> int:
        """Bytes of the arrays on disk."""
        return (sum(self.train) + sum(self.test)) * (math.prod(self.shape) + 8)

    def check(self, arrays: Arrays, origin: Origin) -> None:
        """Shapes, counts by class and digests are what they must be."""
        for split, counts in (("train", self.train), ("test", self.test)):
            x, y = arrays[f"x_{split}"], arrays[f"y_{split}"]
            if x.dtype != np.uint8 or x.shape != (sum(counts), *self.shape):
                raise ValueError(
                    f"x_{split} came out as {x.dtype} {x.shape}, "
                    f"expected uint8 {(sum(counts), *self.shape)}"
                )
            if y.dtype != np.int64 or y.shape != x.shape[:1]:
                raise ValueError(
                    f"y_{split} came out as {y.dtype} {y.shape}, expected one an image"
                )
            if y.min() < 0 or y.max() >= len(counts):
                raise ValueError(f"y_{split} has labels from {y.min()} to {y.max()}")
            if (found := counts_by_class(y, len(counts))) != counts:
                wrong = next(k for k in range(len(counts)) if found[k] != counts[k])
                raise ValueError(
                    f"y_{split} has {found[wrong]:,} images of class {wrong}, "
                    f"expected {counts[wrong]:,}"
                )
        for name, expected in (self.digests or origin.digests).items():
            if digest(arrays[name]) != expected:
                raise ValueError(f"{name} is not the published array: its digest is another")


def counts_by_class(y: Array, classes: int) -> tuple[int, ...]:
    return tuple(np.bincount(y, minlength=classes).tolist())


def checksum(data: bytes, like: str) -> str:
    """`algorithm:hex`, by the algorithm of the one to compare with."""
    algorithm = like.partition(":")[0]
    return f"{algorithm}:{hashlib.new(algorithm, data, usedforsecurity=False).hexdigest()}"


def digest(array: Array) -> str:
    """Over the type, the shape and the bytes."""
    hasher = hashlib.blake2b(f"{array.dtype.str} {array.shape} ".encode(), digest_size=32)
    hasher.update(np.ascontiguousarray(array).data)
    return hasher.hexdigest()
