"""A column of encoded pictures in a table, the base of Parquet files and of datasets of the hub."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self


@dataclass(frozen=True)
class PictureColumn(ABC):
    """Selected rows of a column of encoded pictures; None: all rows."""

    source: Any
    column: str
    rows: Sequence[int] | None = None

    def __len__(self) -> int:
        return self._count() if self.rows is None else len(self.rows)

    def read(self, row: int) -> bytes:
        raw = self._encoded(self._row(row))
        if not isinstance(raw, bytes):
            raise ValueError("contains no encoded picture")
        return raw

    def name(self, row: int) -> str:
        return f"row {self._row(row)} of {self.column}"

    def take(self, rows: Sequence[int]) -> Self:
        return replace(self, rows=[self._row(row) for row in rows])

    @abstractmethod
    def paths(self) -> Iterable[Path]:
        """The files that contain the pictures."""

    @abstractmethod
    def _count(self) -> int:
        """Number of rows of the table."""

    @abstractmethod
    def _encoded(self, row: int) -> object:
        """The bytes in this row of the table, if it has a picture."""

    def _row(self, row: int) -> int:
        return row if self.rows is None else self.rows[row]
