"""Pictures in Parquet files, in the form that Hugging Face's hub has them."""

from __future__ import annotations

import io
import json
import pickle
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from dat.data import ImageData, ReadOptions, load
from dat.data.pictures import Pictures
from tests.data import pictures as made


def png(seed: int) -> bytes:
    raw = io.BytesIO()
    Image.fromarray(made.pixels(seed, 12, 12)).save(raw, "PNG")
    return raw.getvalue()


def write(
    file: Path, count: int, *, first: int = 0, names: bool = True, plain: bool = False
) -> None:
    """One row a picture, labels 0, 1, 2 in turn; the notes that the library `datasets` leaves."""
    raw = [png(first + row) for row in range(count)]
    images = (
        raw
        if plain
        else [{"bytes": picture, "path": f"{row}.png"} for row, picture in enumerate(raw)]
    )
    table = pa.table({"image": images, "label": [row % 3 for row in range(count)]})
    notes = {"info": {"features": {"label": {"names": ["ant", "bee", "cow"]}}}}
    if names:
        table = table.replace_schema_metadata({"huggingface": json.dumps(notes)})
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, file)


def test_a_downloaded_hub_folder_is_read(tmp_path: Path) -> None:
    write(tmp_path / "data" / "train-00000-of-00002.parquet", 6)
    write(tmp_path / "data" / "train-00001-of-00002.parquet", 3, first=6)
    write(tmp_path / "data" / "test-00000-of-00001.parquet", 3, first=9)
    splits = load(str(tmp_path))
    train = splits.train
    assert isinstance(train, ImageData) and isinstance(train.images, torch.Tensor)
    assert (len(train), len(splits.test)) == (9, 3) and train.names == ("ant", "bee", "cow")
    for row in range(9):
        expected = torch.from_numpy(made.pixels(row, 12, 12)).permute(2, 0, 1)
        assert torch.equal(train.images[row], expected)
    later = load(str(tmp_path), ReadOptions(memory=0)).train
    assert isinstance(later, ImageData) and isinstance(later.images, Pictures)
    again = pickle.loads(pickle.dumps(later.images))  # as a loader's process gets it
    assert torch.equal(again[torch.arange(9)], train.images)


def test_one_file_is_split(tmp_path: Path) -> None:
    write(tmp_path / "all.parquet", 30, names=False, plain=True)
    splits = load(str(tmp_path / "all.parquet"))
    assert (len(splits.train), len(splits.test)) == (24, 6)
    assert splits.test.names == ("0", "1", "2") and splits.test.counts().tolist() == [2, 2, 2]


def test_errors_are_reported(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"

    def refused() -> str:
        with pytest.raises(ValueError, match=r"^data\.name = ") as error:
            load(str(file))
        return str(error.value)

    file.write_bytes(b"PAR1 no")
    assert "not a Parquet file" in refused()
    pq.write_table(pa.table({"text": ["a"], "label": [0]}), file)
    assert "has the columns text, label: needs pictures" in refused()
    pq.write_table(pa.table({"image": [png(0)], "label": ["ant"]}), file)
    assert "label must be integers" in refused()
    pq.write_table(pa.table({"image": [png(0), b"junk"] * 5, "label": [0, 1] * 5}), file)
    assert "row 1 of image: cannot be read" in refused()
    (tmp_path / "b").mkdir()
    write(tmp_path / "b" / "everything.parquet", 3)
    with pytest.raises(ValueError, match=r"must be named train\*\.parquet, test\*\.parquet"):
        load(str(tmp_path / "b"))


def test_unreadable_rows_are_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DAT_DATA", str(tmp_path / "cache"))
    file = tmp_path / "a.parquet"
    rows = [png(0), b"junk"] + [png(row) for row in range(2, 20)]
    pq.write_table(pa.table({"image": rows, "label": [0, 1] * 10}), file)
    splits = load(str(file), ReadOptions(corrupt="skip"))
    assert len(splits.train) + len(splits.test) == 19
