"""Read the folder of a run, finished or not."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dat.core.files import (
    CONFIG,
    ENVIRONMENT,
    ERROR_ANALYSIS,
    GALLERY,
    MEASURED,
    METRICS,
    RESULT,
    WARNINGS,
)

Values = dict[str, Any]


@dataclass(frozen=True)
class RunRecord:
    """The contents of a run's folder."""

    path: Path
    name: str
    """Unique on the page."""
    config: Values
    environment: Values
    epochs: Sequence[Values]
    result: Values | None
    """None until the run is finished."""
    examined: Values | None
    measured: Sequence[Values]
    """Results of `dat evaluate`, `dat certify` and `dat sweep`, the latest last."""
    run_warnings: Sequence[str]
    """Warnings during training."""

    @property
    def warnings(self) -> list[str]:
        """All warnings, without duplicates."""
        warnings = [*self.run_warnings]
        for source in (self.result, self.examined, *self.measured):
            warnings += (source or {}).get("warnings", [])
        if self.result is None:
            warnings.append("the run is not finished: these are the figures so far")
        return list(dict.fromkeys(warnings))

    def newest(self, kind: str, *, having: str = "") -> Values | None:
        """The latest result of a command on the best weights, if it includes the suite `having`."""
        for result in reversed(self.measured):
            matches = result.get("kind") == kind and result.get("weights", "best") == "best"
            if matches and (not having or having in result.get("suites", {})):
                return result
        return None

    @property
    def aa(self) -> tuple[float, int] | None:
        """Accuracy under AutoAttack and the number of images, from training or `dat evaluate`."""
        if self.result and self.result.get("aa") is not None:
            return float(self.result["aa"]), int(self.result["images"])
        result = self.newest("evaluate", having="autoattack")
        return (float(result["suites"]["autoattack"]["ra"]), result["images"]) if result else None

    def picture(self, number: int, kind: str) -> str:
        """An image of the gallery as a data URI."""
        data = (self.path / GALLERY / f"{number:02d}-{kind}.png").read_bytes()
        return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def gather(runs: Sequence[Path]) -> list[RunRecord]:
    """Read the folders of runs."""
    names = short_names(runs)
    return [_read(run, name) for run, name in zip(runs, names, strict=True)]


def _read(run: Path, name: str) -> RunRecord:
    if not (run / CONFIG).is_file():
        raise ValueError(f"{run}: not the folder of a run (no {CONFIG} in it)")
    try:
        config = dict(yaml.safe_load((run / CONFIG).read_text()))
    except (yaml.YAMLError, TypeError, ValueError):
        raise ValueError(f"{run / CONFIG}: not a config") from None
    warnings = run / WARNINGS
    return RunRecord(
        path=run,
        name=name,
        config=config,
        environment=_json(run / ENVIRONMENT) or {},
        epochs=_lines(run / METRICS),
        result=_json(run / RESULT),
        examined=_json(run / ERROR_ANALYSIS),
        measured=_lines(run / MEASURED),
        run_warnings=warnings.read_text().splitlines() if warnings.is_file() else [],
    )


def _json(path: Path) -> Values | None:
    if not path.is_file():
        return None
    try:
        return dict(json.loads(path.read_text()))
    except (TypeError, ValueError):
        raise ValueError(f"{path}: not valid JSON; remove it to continue without it") from None


def _lines(path: Path) -> list[Values]:
    """One JSON object per line; the last line may be incomplete while a run is going on."""
    values: list[Values] = []
    lines = path.read_text().splitlines() if path.is_file() else []
    for number, line in enumerate(lines):
        try:
            values.append(dict(json.loads(line)))
        except (TypeError, ValueError):
            if number + 1 < len(lines):
                raise ValueError(f"{path}: line {number + 1} is not JSON") from None
    return values


def flatten(values: Values, prefix: str = "") -> Values:
    """The settings of a config by their paths, such as `attack.steps`."""
    flat: Values = {}
    for key, value in values.items():
        nested = isinstance(value, dict) and value
        flat |= flatten(value, f"{prefix}{key}.") if nested else {prefix + key: value}
    return flat


def short_names(runs: Sequence[Path]) -> list[str]:
    """The shortest path suffixes that tell the runs apart."""
    paths = [run.resolve() for run in runs]
    if len(set(paths)) < len(paths):
        raise ValueError("the same run is given twice")
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    raise AssertionError("different paths differ in some component")
