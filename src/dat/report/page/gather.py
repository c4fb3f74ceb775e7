"""What a run's folder tells, whether it is finished or not."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dat.train.folder import (
    CONFIG,
    ENVIRONMENT,
    EXAMINATION,
    GALLERY,
    MEASURED,
    METRICS,
    RESULT,
    WARNINGS,
)

Values = dict[str, Any]


@dataclass(frozen=True)
class Told:
    """One run, as its files have it."""

    path: Path
    name: str
    """How it is called in the page; no two are called the same."""
    config: Values
    environment: Values
    epochs: Sequence[Values]
    result: Values | None
    """None while it goes on."""
    examined: Values | None
    measured: Sequence[Values]
    """What `dat evaluate`, `dat certify` and `dat sweep` have found since, the newest last."""
    seen: Sequence[str]
    """What was odd while it ran."""

    @property
    def warnings(self) -> list[str]:
        """Everything that makes a figure doubtful, each once."""
        found = [*self.seen]
        for source in (self.result, self.examined, *self.measured):
            found += (source or {}).get("warnings", [])
        if self.result is None:
            found.append("the run is not finished: these are the figures so far")
        return list(dict.fromkeys(found))

    def newest(self, kind: str, *, having: str = "") -> Values | None:
        """The last measurement of a kind, on the best weights, if it has that suite."""
        for it in reversed(self.measured):
            fits = it.get("kind") == kind and it.get("weights", "best") == "best"
            if fits and (not having or having in it.get("suites", {})):
                return it
        return None

    @property
    def aa(self) -> tuple[float, int] | None:
        """Accuracy under AutoAttack, and on how many images, wherever it was measured."""
        if self.result and self.result.get("aa") is not None:
            return float(self.result["aa"]), int(self.result["images"])
        found = self.newest("evaluate", having="autoattack")
        return (float(found["suites"]["autoattack"]["ra"]), found["images"]) if found else None

    def picture(self, number: int, kind: str) -> str:
        """A picture of the gallery as a data URI."""
        data = (self.path / GALLERY / f"{number:02d}-{kind}.png").read_bytes()
        return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def gather(runs: Sequence[Path]) -> list[Told]:
    """Read the folders of runs."""
    names = _names(runs)
    return [_read(run, name) for run, name in zip(runs, names, strict=True)]


def _read(run: Path, name: str) -> Told:
    if not (run / CONFIG).is_file():
        raise ValueError(f"{run}: not the folder of a run (no {CONFIG} in it)")
    try:
        config = dict(yaml.safe_load((run / CONFIG).read_text()))
    except (yaml.YAMLError, TypeError, ValueError):
        raise ValueError(f"{run / CONFIG}: not a config") from None
    warnings = run / WARNINGS
    return Told(
        path=run,
        name=name,
        config=config,
        environment=_json(run / ENVIRONMENT) or {},
        epochs=_lines(run / METRICS),
        result=_json(run / RESULT),
        examined=_json(run / EXAMINATION),
        measured=_lines(run / MEASURED),
        seen=warnings.read_text().splitlines() if warnings.is_file() else [],
    )


def _json(path: Path) -> Values | None:
    if not path.is_file():
        return None
    try:
        return dict(json.loads(path.read_text()))
    except (TypeError, ValueError):
        raise ValueError(f"{path}: not whole; remove it to go on without it") from None


def _lines(path: Path) -> list[Values]:
    """One JSON object a line; the last line may be half-written while a run goes on."""
    found: list[Values] = []
    lines = path.read_text().splitlines() if path.is_file() else []
    for number, line in enumerate(lines):
        try:
            found.append(dict(json.loads(line)))
        except (TypeError, ValueError):
            if number + 1 < len(lines):
                raise ValueError(f"{path}: line {number + 1} is not JSON") from None
    return found


def _names(runs: Sequence[Path]) -> list[str]:
    """As many of the last parts of the paths as it takes to tell them apart."""
    whole = [run.resolve() for run in runs]
    if len(set(whole)) < len(whole):
        raise ValueError("the same run is given twice")
    for depth in range(1, max(len(path.parts) for path in whole) + 1):
        names = ["/".join(path.parts[-depth:]) for path in whole]
        if len(set(names)) == len(names):
            return names
    raise AssertionError("paths that differ differ in some part")
