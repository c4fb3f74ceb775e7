"""Decoding published files, and rejecting malformed ones."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import struct
import tarfile
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dat.data import decode
from dat.data.decode import (
    class_set,
    gunzip,
    idx,
    idx_set,
    members,
    row_set,
    sprite,
    sprite_set,
)


def make_idx(array: Any) -> bytes:
    shape = struct.pack(f">{array.ndim}I", *array.shape)
    return bytes((0, 0, 8, array.ndim)) + shape + bytes(array.data)


def make_tar(files: dict[str, bytes], *extra: tarfile.TarInfo) -> bytes:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w:gz") as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
        for member in extra:
            tar.addfile(member)
    return raw.getvalue()


def make_png(pixels: Any, mode: str = "RGB") -> bytes:
    raw = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(raw, "PNG")
    return raw.getvalue()


def numbers(*shape: int) -> Any:
    return np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)


def test_idx_is_read_as_it_was_written() -> None:
    images, labels = numbers(5, 4, 3), numbers(5)
    assert (idx(make_idx(images), "it") == images).all()
    assert (idx(make_idx(labels), "it") == labels).all()


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"", "not an idx file"),
        (b"\0\0\x08", "not an idx file"),
        (b"\0\0\x0d\x01" + b"\0" * 8, "not an idx file"),
        (b"\0\0\x08\x02" + b"\0" * 8, "not an idx file"),
        (pickle.dumps([1, 2]), "not an idx file"),
        (b"\0\0\x08\x03\0\0", "truncated"),
        (make_idx(np.zeros(9, np.uint8))[:-1], "says 17"),
        (make_idx(np.zeros(9, np.uint8)) + b"x", "says 17"),
        (b"\0\0\x08\x03" + b"\xff" * 12, "says"),
    ],
)
def test_a_malformed_idx_file_is_refused(raw: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        idx(raw, "it")


def test_idx_sets_have_a_channel_and_long_labels() -> None:
    names = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
    parts = (numbers(6, 4, 4), numbers(6), numbers(3, 4, 4), numbers(3))
    contents = {f"{n}-ubyte": make_idx(p) for n, p in zip(names, parts, strict=True)}
    arrays = idx_set(contents)
    assert arrays["x_train"].shape == (6, 1, 4, 4) and arrays["x_train"].dtype == np.uint8
    assert arrays["y_test"].tolist() == parts[3].tolist() and arrays["y_test"].dtype == np.int64
    with pytest.raises(ValueError, match="dimensions"):
        idx_set(contents | {"train-images-idx3-ubyte": contents["train-labels-idx1-ubyte"]})


def test_gzip_is_decompressed_up_to_the_limit() -> None:
    assert gunzip(gzip.compress(b"abc"), 3, "it") == b"abc"
    with pytest.raises(ValueError, match="more than the expected 2 bytes"):
        gunzip(gzip.compress(b"abc"), 2, "it")
    with pytest.raises(ValueError, match="more than the expected 100 bytes"):
        gunzip(gzip.compress(bytes(50 << 20)), 100, "a bomb")


@pytest.mark.parametrize(
    "raw",
    [b"abc", gzip.compress(b"abc")[:-3], gzip.compress(b"a")[:9]],
    ids=["none", "cut", "header"],  # the bytes hold the time: workers would collect other tests
)
def test_broken_gzip_is_refused(raw: bytes) -> None:
    with pytest.raises(ValueError, match="it: invalid gzip"):
        gunzip(raw, 100, "it")


def test_members_are_read_by_their_exact_names() -> None:
    raw = make_tar({"a/b": b"one", "a/c": b"two", "b": b"three"})
    assert members(io.BytesIO(raw), {"a/b": 3, "b": 9}, "it") == {"a/b": b"one", "b": b"three"}
    with pytest.raises(ValueError, match=r"does not contain c \(it starts with"):
        members(io.BytesIO(raw), {"c": 9}, "it")
    with pytest.raises(ValueError, match="has 3 bytes, expected at most 2"):
        members(io.BytesIO(raw), {"a/b": 2}, "it")


def odd(name: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member


@pytest.mark.parametrize(
    ("member", "reason"),
    [
        (odd("../evil", tarfile.REGTYPE), r"'\.\./evil', a path that leads outside"),
        (odd("a/../../evil", tarfile.REGTYPE), r"'a/\.\./\.\./evil', a path"),
        (odd("/etc/evil", tarfile.REGTYPE), "'/etc/evil', an absolute path"),
        (odd("link", tarfile.SYMTYPE, "/etc/passwd"), "'link', a link"),
        (odd("hard", tarfile.LNKTYPE, "a"), "'hard', a link"),
        (odd("null", tarfile.CHRTYPE), "'null', neither"),
        (odd("disk", tarfile.BLKTYPE), "'disk', neither"),
        (odd("pipe", tarfile.FIFOTYPE), "'pipe', neither"),
    ],
)
def test_an_unsafe_member_is_refused_by_name(member: tarfile.TarInfo, reason: str) -> None:
    raw = make_tar({"a": b"fine"}, member)
    with pytest.raises(ValueError, match=f"it: refused: it contains {reason}"):
        members(io.BytesIO(raw), {"a": 9}, "it")


def test_a_duplicate_member_is_refused() -> None:
    twice = tarfile.TarInfo("a")
    with pytest.raises(ValueError, match="'a' twice"):
        members(io.BytesIO(make_tar({"a": b"fine"}, twice)), {"a": 9}, "it")


def test_an_archive_that_unpacks_to_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "SLACK", 1 << 20)
    raw = make_tar({"big": bytes(8 << 20), "a": b"fine"})
    with pytest.raises(ValueError, match="decompresses to more than"):
        members(io.BytesIO(raw), {"a": 9}, "a bomb")
    name = tarfile.TarInfo("x" * (8 << 20))  # a long name has a block of its own before the member
    with pytest.raises(ValueError, match="decompresses to more than"):
        members(io.BytesIO(make_tar({}, name)), {"a": 9}, "a bomb")


@pytest.mark.parametrize("keep", [0, 5, 30, -1, -9])
def test_a_broken_archive_is_refused(keep: int) -> None:
    raw = make_tar({"a": numbers(3000).tobytes()})
    with pytest.raises(ValueError, match="it: "):
        members(io.BytesIO(raw[:keep]), {"a": 3000}, "it")
    with pytest.raises(ValueError, match=r"not a valid \.tar\.gz"):
        members(io.BytesIO(pickle.dumps({"a": 1})), {"a": 9}, "it")


def test_rows_are_labels_then_planes() -> None:
    train, test = numbers(4, 14), numbers(2, 14)
    contents = {"a": train[:3].tobytes(), "b": train[3:].tobytes(), "c": test.tobytes()}
    arrays = row_set(contents, train=["a", "b"], test=["c"], labels=2, shape=(3, 2, 2))
    assert arrays["y_train"].tolist() == train[:, 1].tolist()
    assert (arrays["x_train"] == train[:, 2:].reshape(4, 3, 2, 2)).all()
    assert (arrays["x_test"] == test[:, 2:].reshape(2, 3, 2, 2)).all()
    for raw in (b"", bytes(27)):
        with pytest.raises(ValueError, match="not a multiple of the row size 14"):
            row_set(contents | {"b": raw}, train=["a", "b"], test=["c"], labels=2, shape=(3, 2, 2))


def test_sprites_have_one_image_per_row() -> None:
    pixels = numbers(3, 16, 3)
    contents = {"a": make_png(pixels), "b": make_png(pixels[:1]), "y": b"[1, 0, 1]", "z": b"[2]"}
    arrays = sprite_set(contents, train=["a"], test=["b"], labels=("y", "z"), side=4)
    assert (arrays["x_train"].transpose(0, 2, 3, 1).reshape(3, 16, 3) == pixels).all()
    assert arrays["y_train"].tolist() == [1, 0, 1] and arrays["y_train"].dtype == np.int64


def big_png(width: int, height: int) -> bytes:
    """A header that claims so many pixels, and none of them."""
    raw = bytearray(make_png(numbers(1, 16, 3)))
    raw[16:24] = struct.pack(">II", width, height)
    return bytes(raw)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"GIF89a",
        make_png(numbers(3, 16, 3))[:-30],
        make_png(numbers(3, 15, 3)),
        make_png(numbers(3, 16, 3), "RGBA"),
        make_png(numbers(3, 16, 3), "L"),
        big_png(16, 2 << 20),
        big_png(16, 8_000_000),
        big_png(30_000, 30_000),
    ],
)
def test_an_invalid_sprite_is_refused(raw: bytes) -> None:
    with pytest.raises(ValueError, match="it: not a sprite"):
        sprite(raw, "it", side=4)


@pytest.mark.parametrize("raw", [b"", b"{", b"[1, 2.5]", b"[]", b'["a"]', b"[true]", b"[" * 99999])
def test_labels_must_be_a_list_of_integers(raw: bytes) -> None:
    contents = {"a": make_png(numbers(2, 16, 3)), "y": raw}
    with pytest.raises(ValueError, match="y: "):
        sprite_set(contents, train=["a"], test=["a"], labels=("y", "y"), side=4)


def test_classes_alternate_and_the_first_images_are_for_training() -> None:
    images = numbers(2, 5, 4)
    contents = {
        "0": json.dumps({"data": [*images[0].tolist(), []]}).encode(),
        "1": json.dumps({"data": [[], *images[1].tolist()]}).encode(),
    }
    arrays = class_set(contents, classes=["0", "1"], train=3, side=2)
    assert arrays["y_train"].tolist() == [0, 1] * 3 and arrays["y_test"].tolist() == [0, 1] * 2
    assert (arrays["x_train"][1::2] == images[1, :3].reshape(3, 1, 2, 2)).all()
    assert (arrays["x_test"][::2] == images[0, 3:].reshape(2, 1, 2, 2)).all()


@pytest.mark.parametrize(
    "document",
    [[], {}, {"data": 3}, {"data": [3]}, {"data": [[1, 2, 3]]}, {"data": [[1, 2, 3, 256]]},
     {"data": [[1, 2, 3, 4], [1]]}, {"data": [[-1, 2, 3, 4]]}, {"data": [[0.5, 2, 3, 4]]},
     {"data": [[]]}, {"data": [[1, 2, 3, 4]]}],
)  # fmt: skip
def test_a_malformed_class_is_refused(document: object) -> None:
    fine = json.dumps({"data": [[1, 2, 3, 4]] * 2}).encode()
    with pytest.raises(ValueError, match=r"0: |images per class are 1, 2"):
        class_set(
            {"0": json.dumps(document).encode(), "1": fine}, classes=["0", "1"], train=1, side=2
        )
