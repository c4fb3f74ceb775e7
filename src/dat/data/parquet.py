"""Pictures in Parquet files as on the Hugging Face hub: a column of bytes and one of labels.

Needs pyarrow (`pip install 'dat-robust[parquet]'`). Every worker keeps the encoded pictures in
memory; `dat data shard` writes them to files.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from dat.data.columns import PictureColumn
from dat.data.folder import TESTS, Listing, split_listing

IMAGES = ("image", "img", "images", "png", "jpg")
LABELS = ("label", "labels", "fine_label", "class")


class ParquetPictures(PictureColumn):
    """A column of the files in `source`; each process reads the files itself."""

    def name(self, row: int) -> str:
        return f"{self.source[0].parent}, {super().name(row)}"

    def paths(self) -> Sequence[Path]:
        files: Sequence[Path] = self.source
        return files

    def _count(self) -> int:
        return len(self._column)

    def _encoded(self, row: int) -> object:
        value = self._column[row].as_py()
        return value.get("bytes") if isinstance(value, dict) else value

    @cached_property
    def _column(self) -> Any:
        return _table(self.source, [self.column]).column(self.column)

    def __getstate__(self) -> dict[str, Any]:
        return {"source": self.source, "column": self.column, "rows": self.rows}


def list_parquet(path: Path, test_share: float) -> tuple[Listing, Listing]:
    """Split a file, or read a folder whose file names start with train and test."""
    if path.is_file():
        return split_listing(_listing([path]), test_share)
    files = sorted(path.rglob("*.parquet"))
    train = [file for file in files if file.name.startswith("train")]
    candidates = ([file for file in files if file.name.startswith(name)] for name in TESTS)
    test = next((matching for matching in candidates if matching), [])
    if not train or not test:
        names = ", ".join(f"{name}*.parquet" for name in ("train", *TESTS))
        raise ValueError(f"Parquet files must be named {names}; found {files[0].name}, ...")
    train_listing = _listing(train)
    return train_listing, _listing(test, train_listing.names)


def _listing(files: Sequence[Path], known: tuple[str, ...] | None = None) -> Listing:
    schema = _schema(files[0])
    image = next((column for column in IMAGES if column in schema.names), None)
    label = next((column for column in LABELS if column in schema.names), None)
    if image is None or label is None:
        raise ValueError(
            f"{files[0].name} has the columns {', '.join(schema.names)}: needs pictures "
            f"({', '.join(IMAGES)}) and labels ({', '.join(LABELS)})"
        )
    values = _table(files, [label]).column(label).to_pylist()
    if not values or not all(isinstance(value, int) and value >= 0 for value in values):
        raise ValueError(f"{files[0].name}: {label} must be integers from 0, one per picture")
    labels = torch.tensor(values)
    names = known or _class_names(schema, label) or tuple(map(str, range(int(labels.max()) + 1)))
    return Listing(ParquetPictures(files, image), labels, names)


def _class_names(schema: Any, label: str) -> tuple[str, ...]:
    """The class names in Hugging Face's metadata, if any."""
    try:
        metadata = json.loads(schema.metadata[b"huggingface"])
        return tuple(map(str, metadata["info"]["features"][label]["names"]))
    except (KeyError, TypeError, ValueError):
        return ()


def _schema(file: Path) -> Any:
    try:
        return _arrow().read_schema(file)
    except (OSError, ValueError) as error:
        raise ValueError(f"{file.name}: not a Parquet file ({error})") from None


def _table(files: Sequence[Path], columns: list[str]) -> Any:
    import pyarrow

    try:
        tables = [_arrow().read_table(file, columns=columns) for file in files]
        return pyarrow.concat_tables(tables)
    except (OSError, ValueError) as error:
        raise ValueError(f"{files[0].name}: cannot be read ({error})") from None


def _arrow() -> Any:
    try:
        from pyarrow import parquet
    except ImportError:
        raise ValueError(
            "Parquet files need pyarrow; run: pip install 'dat-robust[parquet]'"
        ) from None
    return parquet
