"""Partitions on disk: divided as asked, whole, verified, and each opened by itself."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dat.data import ImageData, Partitions, ReadOptions, load
from dat.data.pictures import Pictures
from dat.data.sharding import MANIFEST, Origin, divide, open_shards, read_manifest, write_shards
from tests.data import pictures as made

OPENED: list[str] | None = None


def _note(event: str, details: tuple[object, ...]) -> None:
    if OPENED is not None and event == "open":
        OPENED.append(str(details[0]))


sys.addaudithook(_note)


def origin(count: int = 60, classes: int = 4) -> Origin:
    random = np.random.default_rng(0)
    images = torch.from_numpy(random.integers(0, 256, (count, 3, 5, 5), np.uint8))
    data = ImageData.of(images, torch.arange(count) % classes, classes=classes)
    return Origin("mine", data, data.take(torch.arange(12)), (0.5,) * 3, (0.2,) * 3)


@settings(max_examples=60)
@given(
    count=st.integers(8, 90),
    classes=st.integers(1, 6),
    parts=st.integers(1, 6),
    by=st.sampled_from(["random", "class", "dirichlet"]),
)
def test_parts_are_disjoint_and_cover(count: int, classes: int, parts: int, by: str) -> None:
    labels = torch.arange(count) % classes
    try:
        divided = divide(labels, parts, by=by, alpha=1.0, seed=3)
    except ValueError:
        assert by == "dirichlet"  # by chance a part may get nothing, which is refused
        return
    assert sorted(torch.cat(divided).tolist()) == list(range(count))
    if by != "dirichlet":
        assert max(map(len, divided)) - min(map(len, divided)) <= 1
    if by == "class" and parts >= classes and count % parts == 0 and parts % classes == 0:
        assert all(len(labels[rows].unique()) == 1 for rows in divided)


def test_small_alpha_is_uneven_and_large_alpha_even() -> None:
    labels = torch.arange(6000) % 10

    def skew(alpha: float) -> float:
        divided = divide(labels, 6, by="dirichlet", alpha=alpha, seed=0)
        counts = torch.stack([labels[rows].bincount(minlength=10) for rows in divided]).double()
        return float(counts.std(0).mean() / 100)

    assert skew(0.1) > 1.5 > skew(1.0) > 0.4 > 0.1 > skew(1000.0)


def test_a_part_holds_what_its_manifest_says(tmp_path: Path) -> None:
    whole = origin()
    folders = write_shards(whole, tmp_path / "out", parts=3, by="dirichlet", alpha=1.0, seed=1)
    rows = divide(whole.train.labels, 3, by="dirichlet", alpha=1.0, seed=1)
    sharded = open_shards(tmp_path / "out", ReadOptions())
    assert sharded.train.sizes == tuple(map(len, rows)) and sharded.mean == whole.mean
    for part, folder in enumerate(folders):
        manifest = read_manifest(folder)
        data = sharded.train.open(part)
        expected = whole.train.take(rows[part])
        assert torch.equal(data.tensor(), expected.tensor())
        assert torch.equal(data.labels, expected.labels)
        assert manifest["counts"] == expected.counts().tolist()
        assert (manifest["part"], manifest["images"]) == (part, len(expected))
    assert torch.equal(sharded.test.tensor(), whole.test.tensor())


def test_a_worker_opens_its_own_part_and_nothing_else(tmp_path: Path) -> None:
    global OPENED
    write_shards(origin(), tmp_path / "out", parts=3)
    OPENED = []
    try:
        splits = load(str(tmp_path / "out"))
        assert isinstance(splits.training, Partitions)
        splits.training.split_holdout(0.1, 0)[0].open(1)
        folders = {Path(file).parent.name for file in OPENED if file.endswith(".npy")}
    finally:
        OPENED = None
    assert folders == {"part-2-of-3", "test"}


def test_partitions_of_other_workers_may_be_missing(tmp_path: Path) -> None:
    import shutil

    write_shards(origin(), tmp_path / "out", parts=3)
    for other in (1, 3):
        shutil.rmtree(tmp_path / "out" / f"part-{other}-of-3")
    splits = load(str(tmp_path / "out"))
    assert isinstance(splits.training, Partitions) and splits.training.sizes == (20, 20, 20)
    assert len(splits.training.open(1)) == 20
    with pytest.raises(ValueError, match="part 1 of 3 is missing or unreadable"):
        splits.training.open(0)
    with pytest.raises(ValueError, match="is a single partition; use the folder that contains it"):
        load(str(tmp_path / "out" / "part-2-of-3"))
    shutil.rmtree(tmp_path / "out" / "test")
    with pytest.raises(
        ValueError, match="contains no test set; copy the folder test to every node"
    ):
        load(str(tmp_path / "out"))


def test_damage_is_detected(tmp_path: Path) -> None:
    (folder, *_) = write_shards(origin(), tmp_path / "out", parts=2)
    parts = load(str(tmp_path / "out")).training
    assert isinstance(parts, Partitions)
    file = folder / "images.npy"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    with pytest.raises(ValueError, match=r"images\.npy: has changed since it was written"):
        parts.open(0)
    file.unlink()
    with pytest.raises(ValueError, match=r"images\.npy: missing"):
        parts.open(0)
    (folder / MANIFEST).write_text("{}")
    with pytest.raises(ValueError, match=r"manifest\.json: not the manifest of a partition"):
        read_manifest(folder)


def test_partitions_of_different_datasets_are_refused(tmp_path: Path) -> None:
    first = write_shards(origin(), tmp_path / "a", parts=2)
    second = write_shards(origin(40), tmp_path / "b", parts=2)
    first[1].rename(tmp_path / "gone")
    second[1].rename(first[1])
    with pytest.raises(ValueError, match="belongs to a different dataset"):
        load(str(tmp_path / "a"))


def test_a_lying_manifest_is_refused(tmp_path: Path) -> None:
    first, second = write_shards(origin(), tmp_path / "out", parts=2)
    true = json.loads((first / MANIFEST).read_text())
    lies = [
        *({key: None} for key in true if key not in ("by", "seed", "source", "part")),
        *({"digests": {}}, {"digests": ["x"]}, {"part": 7}, {"sizes": [-1]}, {"shape": [3, 5]}),
        *({"classes": True}, {"mean": ["0"]}, {"dtype": "object"}, {"names": [1]}),
    ]
    for lie in lies:
        (first / MANIFEST).write_text(json.dumps(true | lie))
        with pytest.raises(ValueError, match="not the manifest of a partition"):
            read_manifest(first)
    for key in true:
        (first / MANIFEST).write_text(json.dumps({k: v for k, v in true.items() if k != key}))
        with pytest.raises(ValueError, match="not the manifest of a partition"):
            read_manifest(first)
    parts = load(str(tmp_path / "out")).training  # the other part still serves
    assert isinstance(parts, Partitions) and len(parts.open(1)) == 30
    with pytest.raises(ValueError, match="part 1 of 2 is missing or unreadable"):
        parts.open(0)
    (second / MANIFEST).write_text("{}")
    with pytest.raises(ValueError, match="no partition has a readable manifest"):
        load(str(tmp_path / "out"))


def test_partitions_of_another_seed_and_another_test_set_are_refused(tmp_path: Path) -> None:
    import shutil

    write_shards(origin(), tmp_path / "a", parts=2)
    write_shards(origin(), tmp_path / "b", parts=2, seed=1)
    shutil.copytree(tmp_path / "a", tmp_path / "c")
    for name, other in (("part-2-of-2", "a"), ("test", "c")):
        shutil.rmtree(tmp_path / other / name)
        shutil.copytree(tmp_path / "b" / name, tmp_path / other / name)
        with pytest.raises(ValueError, match=f"{name} belongs to a different dataset"):
            load(str(tmp_path / other))


def test_options_fixed_when_partitioning_cannot_change(tmp_path: Path) -> None:
    write_shards(origin(), tmp_path / "out", parts=2)
    for reading, message in (
        (ReadOptions(corrupt="skip"), "the sizes of partitions are fixed"),
        (ReadOptions(size=9), "the partitions were written for 5 x 5"),
    ):
        with pytest.raises(ValueError, match=message):
            load(str(tmp_path / "out"), reading)
    load(str(tmp_path / "out"), ReadOptions(size=5))


def test_unlabelled_images_beside_parts_are_of_one_kind(tmp_path: Path) -> None:
    from dat.data import load_unlabelled

    write_shards(origin(), tmp_path / "out", parts=2)
    np.save(tmp_path / "u.npy", np.random.default_rng(0).random((7, 3, 5, 5), np.float32))
    parts = load(str(tmp_path / "out")).training
    unlabelled = load_unlabelled(str(tmp_path / "u.npy"), parts)
    assert unlabelled.images.dtype == torch.uint8


def test_linked_pictures_are_followed(tmp_path: Path) -> None:
    made.folder(tmp_path / "real")
    for file in sorted((tmp_path / "real").rglob("*.jpg")):
        link = tmp_path / "set" / file.relative_to(tmp_path / "real")
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(file)
    splits = load(str(tmp_path / "set"), ReadOptions(memory=0))
    whole = Origin("set", splits.train, splits.test, splits.mean, splits.std)
    folders = write_shards(whole, tmp_path / "out", parts=2)
    kept = [file for folder in folders for file in folder.rglob("*.jpeg")]
    assert len(kept) == 12 and all(file.is_file() and not file.is_symlink() for file in kept)


def test_pictures_of_a_part_are_verified(tmp_path: Path) -> None:
    from dat.data.sharding import check_arrays

    made.folder(tmp_path / "set")
    splits = load(str(tmp_path / "set"), ReadOptions(memory=0))
    whole = Origin("set", splits.train, splits.test, splits.mean, splits.std)
    folder, _ = write_shards(whole, tmp_path / "out", parts=2)
    manifest = read_manifest(folder)
    check_arrays(folder, manifest, always=True)
    one = next(iter(sorted(folder.rglob("*.jpeg"))))
    raw = one.read_bytes()
    one.unlink()
    one.write_bytes(raw[:-9])
    with pytest.raises(ValueError, match="pictures: has changed since it was written"):
        check_arrays(folder, manifest, always=True)


def test_pictures_stay_files(tmp_path: Path) -> None:
    made.folder(tmp_path / "set", sizes=((40, 30), (30, 50)))
    splits = load(str(tmp_path / "set"), ReadOptions(size=16, memory=0))
    assert isinstance(splits.train, ImageData)
    whole = Origin("set", splits.train, splits.test, splits.mean, splits.std)
    write_shards(whole, tmp_path / "out", parts=2, by="class")
    sharded = load(str(tmp_path / "out"), ReadOptions(size=16, memory=0))
    assert isinstance(sharded.training, Partitions) and (sharded.mean, sharded.std) == (
        splits.mean,
        splits.std,
    )
    rows = divide(splits.train.labels, 2, by="class", alpha=1, seed=0)
    for part in range(2):
        data = sharded.training.open(part)
        assert isinstance(data.images, Pictures) and data.names == splits.train.names
        order = rows[part][splits.train.labels[rows[part]].argsort(stable=True)]
        assert torch.equal(data.labels, splits.train.labels[order])
        assert torch.equal(data.images[torch.arange(len(data))], splits.train.images[order])


def test_existing_output_is_kept_and_no_partial_output_remains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dat.data import sharding as shards

    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("keep")
    with pytest.raises(ValueError, match="is not empty; choose another folder"):
        write_shards(origin(), tmp_path / "out", parts=2)
    written: list[Path] = []

    def full(path: Path, data: bytes) -> None:
        written.append(path)
        if len(written) == 2:
            raise OSError(28, "No space left on device")
        path.write_bytes(data)

    monkeypatch.setattr(shards, "atomic_write", full)
    with pytest.raises(ValueError, match=r"cannot be written \(No space left on device\)"):
        write_shards(origin(), tmp_path / "new", parts=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"by": "size"}, "--by size: must be one of random, class, dirichlet"),
        ({"parts": 99}, "--parts 99: must be from 1 to 60"),
        ({"by": "dirichlet", "alpha": -1.0}, "--alpha -1: must be above 0"),
        ({"by": "dirichlet", "alpha": 1e-6, "parts": 9}, "would be empty: use a larger --alpha"),
    ],
)
def test_impossible_divisions_are_refused(
    tmp_path: Path, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        write_shards(origin(), tmp_path / "out", **{"parts": 2} | options)  # type: ignore[arg-type]
    assert json.dumps([path.name for path in tmp_path.iterdir()]) == "[]"
