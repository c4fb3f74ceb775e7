"""Pictures in Parquet files, as Hugging Face's hub keeps them: a column of bytes, one of labels.

Needs pyarrow (`pip install 'dat[parquet]'`). The encoded pictures stay in memory at every worker;
`dat data shard` writes them as files.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from dat.data.folder import TESTS, Listing, split_listing

IMAGES = ("image", "img", "images", "png", "jpg")
LABELS = ("label", "labels", "fine_label", "class")


@dataclass(frozen=True)
class Blobs:
    """A column of encoded pictures; each process reads the files itself."""

    files: Sequence[Path]
    column: str
    rows: Sequence[int] | None = None

    def __len__(self) -> int:
        return len(self._column) if self.rows is None else len(self.rows)

    def read(self, row: int) -> bytes:
        found = self._column[self._row(row)].as_py()
        raw = found.get("bytes") if isinstance(found, dict) else found
        if not isinstance(raw, bytes):
            raise ValueError("holds no bytes of a picture")
        return raw

    def name(self, row: int) -> str:
        return f"{self.files[0].parent}, row {self._row(row)} of {self.column}"

    def take(self, rows: Sequence[int]) -> Blobs:
        return Blobs(self.files, self.column, [self._row(row) for row in rows])

    def paths(self) -> Sequence[Path]:
        return self.files

    def _row(self, row: int) -> int:
        return row if self.rows is None else self.rows[row]

    @cached_property
    def _column(self) -> Any:
        return _table(self.files, [self.column]).column(self.column)

    def __getstate__(self) -> dict[str, Any]:
        return {"files": self.files, "column": self.column, "rows": self.rows}


def list_parquet(path: Path, test_share: float) -> tuple[Listing, Listing]:
    """A file, split; or a folder with files whose names begin with train and test."""
    if path.is_file():
        return split_listing(_listing([path]), test_share)
    files = sorted(path.rglob("*.parquet"))
    train = [file for file in files if file.name.startswith("train")]
    kinds = ([file for file in files if file.name.startswith(name)] for name in TESTS)
    tests = next((found for found in kinds if found), [])
    if not train or not tests:
        names = ", ".join(f"{name}*.parquet" for name in ("train", *TESTS))
        raise ValueError(f"Parquet files must be named {names}; here are {files[0].name}, ...")
    first = _listing(train)
    return first, _listing(tests, first.names)


def _listing(files: Sequence[Path], known: tuple[str, ...] | None = None) -> Listing:
    columns = _schema(files[0])
    image = next((it for it in IMAGES if it in columns.names), None)
    label = next((it for it in LABELS if it in columns.names), None)
    if image is None or label is None:
        raise ValueError(
            f"{files[0].name} has the columns {', '.join(columns.names)}: needed are pictures "
            f"({', '.join(IMAGES)}) and labels ({', '.join(LABELS)})"
        )
    values = _table(files, [label]).column(label).to_pylist()
    if not values or not all(isinstance(it, int) and it >= 0 for it in values):
        raise ValueError(f"{files[0].name}: {label} must be whole numbers from 0, one a picture")
    labels = torch.tensor(values)
    names = known or _names(columns, label) or tuple(map(str, range(int(labels.max()) + 1)))
    return Listing(Blobs(files, image), labels, names)


def _names(schema: Any, label: str) -> tuple[str, ...]:
    """The classes' names, where Hugging Face's own notes have them."""
    try:
        notes = json.loads(schema.metadata[b"huggingface"])
        return tuple(map(str, notes["info"]["features"][label]["names"]))
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
        return pyarrow.concat_tables([_arrow().read_table(it, columns=columns) for it in files])
    except (OSError, ValueError) as error:
        raise ValueError(f"{files[0].name}: cannot be read ({error})") from None


def _arrow() -> Any:
    try:
        from pyarrow import parquet
    except ImportError:
        raise ValueError("Parquet files need pyarrow: pip install 'dat[parquet]'") from None
    return parquet
