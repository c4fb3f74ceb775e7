"""The interface of loggers."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from dat.core.deprecation import renamed_names
from dat.core.files import atomic_write

IDS = "loggers.json"
"""In a run's folder: the id of the run in each logger."""
BY_STEP, BY_EPOCH = "step", "epoch"
"""The counter that metrics belong to."""


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """What a logger knows of a run when it starts or resumes."""

    folder: Path
    config: Mapping[str, Any] = field(default_factory=dict)
    """Every setting, in groups."""
    updates: int = 0
    """Steps before this start. Logged metrics of later steps are left over from an interrupted
    run."""

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    def settings(self) -> dict[str, Any]:
        """The config, flattened: `attack.steps` and so on."""
        return dict(_flatten(self.config, ""))

    def saved_id(self, logger: str) -> str | None:
        """The id of an interrupted run in this logger."""
        try:
            id = json.loads((self.folder / IDS).read_text()).get(logger)
        except (OSError, ValueError, AttributeError):
            return None
        return id if isinstance(id, str) else None

    def save_id(self, logger: str, id: str) -> None:
        """Save the run's id, for resuming it."""
        path = self.folder / IDS
        ids = json.loads(path.read_text()) if path.is_file() else {}
        atomic_write(path, f"{json.dumps(ids | {logger: id}, indent=2)}\n".encode())


def _flatten(values: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


__getattr__ = renamed_names(__name__, Run="RunInfo")


def numbers(result: Mapping[str, Any]) -> dict[str, float]:
    """The numeric values of a run's result."""
    return {
        key: float(value)
        for key, value in result.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


class Logger(ABC):
    """Records a run's metrics; only rank 0 has one."""

    package: ClassVar[str]
    """The package that must be installed."""

    @abstractmethod
    def begin(self, run: RunInfo) -> None:
        """A run starts, or resumes."""

    @abstractmethod
    def log(self, values: Mapping[str, float], step: int, *, by: str = BY_EPOCH) -> None:
        """Log the metrics of an epoch or of a step, both counted from 1."""

    @abstractmethod
    def end(self, result: Mapping[str, Any] | None) -> None:
        """Log the final metrics, or None if the run was cut off, and close the logger."""
