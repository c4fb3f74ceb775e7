"""What every logger is."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from dat.files import write_whole

KEPT = "loggers.json"
"""In a run's folder: by which id each tool knows the run."""
BY_STEP, BY_EPOCH = "step", "epoch"
"""What figures are counted by."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a logger is told of a run when it begins, or goes on."""

    folder: Path
    config: Mapping[str, Any] = field(default_factory=dict)
    """Every setting, in groups."""
    updates: int = 0
    """Steps that were taken before; figures of later ones are those of a run that was cut off."""

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    def settings(self) -> dict[str, Any]:
        """The config without its groups: `attack.steps` and so on."""
        return dict(_flat(self.config, ""))

    def kept(self, tool: str) -> str | None:
        """The id that the tool gave the run before, if it was interrupted."""
        try:
            found = json.loads((self.folder / KEPT).read_text()).get(tool)
        except (OSError, ValueError, AttributeError):
            return None
        return found if isinstance(found, str) else None

    def keep(self, tool: str, id: str) -> None:
        """For when the run is resumed."""
        path = self.folder / KEPT
        known = json.loads(path.read_text()) if path.is_file() else {}
        write_whole(path, f"{json.dumps(known | {tool: id}, indent=2)}\n".encode())


def _flat(values: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def numbers(result: Mapping[str, Any]) -> dict[str, float]:
    """Of a run's final figures, those that a chart can show."""
    return {
        key: float(value)
        for key, value in result.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


class Logger(ABC):
    """Takes a run's figures; only the first worker has one."""

    package: ClassVar[str]
    """What has to be installed."""

    @abstractmethod
    def begin(self, run: Run) -> None:
        """A run begins, or goes on where it was interrupted."""

    @abstractmethod
    def log(self, values: Mapping[str, float], step: int, *, by: str = BY_EPOCH) -> None:
        """Figures of an epoch, or of a step; each kind counts from 1."""

    @abstractmethod
    def end(self, result: Mapping[str, Any] | None) -> None:
        """The final figures; none if the run was cut off."""
