"""Images that stay on disk: the same pixels as in memory, read when asked for."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dat.data import ImageData, chunks, load
from dat.data.arrays import map_array
from dat.data.lazy_images import LazyImages, MemoryMapped, join

SHAPES = [(7, 3, 5, 4), (7, 5, 4, 3), (7, 5, 4), (7, 1, 5, 4)]


def channels_first(array: np.ndarray[Any, Any]) -> torch.Tensor:
    if array.ndim == 3:
        return torch.from_numpy(array[:, None])
    last = array.shape[3] in (1, 3) and array.shape[1] not in (1, 3)
    return torch.from_numpy(np.ascontiguousarray(array.transpose(0, 3, 1, 2) if last else array))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["uint8", "float32", "float64"])
def test_a_mapped_array_is_the_array(tmp_path: Path, shape: tuple[int, ...], kind: str) -> None:
    random = np.random.default_rng(0)
    array = random.integers(0, 256, shape, np.uint8)
    array = array if kind == "uint8" else (array / 255).astype(kind)
    np.save(tmp_path / "x.npy", array)
    mapped = map_array(tmp_path / "x.npy")
    assert isinstance(mapped, MemoryMapped)
    whole = channels_first(array)
    whole = whole if kind == "uint8" else whole.float()
    assert mapped.shape == whole.shape and mapped.dtype == whole.dtype
    rows = torch.tensor([6, 0, 3, 3])
    assert torch.equal(mapped[rows], whole[rows])
    taken = mapped.take(torch.tensor([5, 2, 4])).take(torch.tensor([2, 0]))
    assert len(taken) == 2
    assert torch.equal(taken[torch.tensor([0, 1])], whole[torch.tensor([4, 5])])
    again = pickle.loads(pickle.dumps(taken))
    assert torch.equal(again[torch.arange(2)], taken[torch.arange(2)])


def test_a_dataset_on_disk_equals_the_dataset_in_memory(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    arrays = {
        "x_train": random.integers(0, 256, (30, 6, 6, 3), np.uint8),
        "y_train": np.arange(30) % 3,
        "x_test": random.integers(0, 256, (9, 6, 6, 3), np.uint8),
        "y_test": np.arange(9) % 3,
    }
    np.savez(tmp_path / "a.npz", **arrays)  # type: ignore[arg-type]
    (tmp_path / "b").mkdir()
    for name, array in arrays.items():
        np.save(tmp_path / "b" / f"{name}.npy", array)
    from dat.data import ReadOptions

    held = load(str(tmp_path / "a.npz"))
    for name in ("a.npz", "b"):
        mapped = load(str(tmp_path / name), ReadOptions(memory=0))
        assert isinstance(mapped.train, ImageData) and isinstance(held.train, ImageData)
        assert isinstance(mapped.train.images, MemoryMapped)
        assert torch.equal(torch.cat(list(chunks(mapped.train.tensor()))), held.train.tensor())
        assert torch.equal(mapped.train.labels, held.train.labels)
        assert (mapped.mean, mapped.std) == (held.mean, held.std)


def test_floats_out_of_range_are_detected_on_disk_too(tmp_path: Path) -> None:
    images = np.full((5, 1, 2, 2), 0.5, np.float32)
    images[3] = 255
    np.save(tmp_path / "x.npy", images)
    mapped = map_array(tmp_path / "x.npy")
    assert isinstance(mapped, MemoryMapped)
    with pytest.raises(ValueError, match=r"image 3 has pixels from 255 .*divide uint8 by 255"):
        ImageData.of(mapped, torch.zeros(5, dtype=torch.int64))
    images[3] = 1 + 5e-7
    np.save(tmp_path / "y.npy", images)
    mapped = map_array(tmp_path / "y.npy")
    assert isinstance(mapped, MemoryMapped)
    data = ImageData.of(mapped, torch.zeros(5, dtype=torch.int64))
    assert float(data.images[torch.arange(5)].max()) == 1.0


@settings(max_examples=40)
@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4), data=st.data())
def test_joined_sets_are_one(
    sizes: list[int], data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("joined")
    whole = torch.randint(0, 256, (sum(sizes), 3, 4, 4), dtype=torch.uint8)
    pieces: list[torch.Tensor | LazyImages] = []
    for number, piece in enumerate(whole.split(sizes)):
        if data.draw(st.booleans()):
            np.save(folder / f"{number}.npy", piece.numpy())
            mapped = map_array(folder / f"{number}.npy")
            assert isinstance(mapped, MemoryMapped)
            pieces.append(mapped)
        else:
            pieces.append(piece)
    joined = join(pieces)
    numbers = st.integers(0, sum(sizes) - 1)
    rows = torch.tensor(data.draw(st.lists(numbers, min_size=1, max_size=9)))
    assert torch.equal(joined[rows], whole[rows])
    if isinstance(joined, LazyImages):
        back = torch.arange(len(rows)).flip(0)
        assert torch.equal(joined.take(rows)[back], whole[rows[back]])


def test_a_short_array_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((9, 3, 4, 4), np.uint8))
    raw = (tmp_path / "x.npy").read_bytes()
    (tmp_path / "x.npy").write_bytes(raw[:-10])
    with pytest.raises(ValueError, match="truncated: 422 bytes, expected 432"):
        map_array(tmp_path / "x.npy")
