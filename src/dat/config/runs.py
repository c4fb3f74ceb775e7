"""Reads the config and the result of a run's folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from dat.config.schema import RunConfig, merge
from dat.config.trust import refuse_code
from dat.core.files import CONFIG, ERROR_ANALYSIS, METRICS, RESULT, WEIGHTS
from dat.core.settings import SettingError


def read_run(
    run: Path, edits: dict[str, Any] | None = None, *, trust: bool = False
) -> tuple[str, RunConfig]:
    """The recipe's name and the config of a run's folder.

    The folder may come from somebody else: code that it names (`package.module:name`) is refused
    unless the edits name it too. `trust` accepts it; so may a caller that builds nothing.
    """
    path = run / CONFIG
    if not path.is_file():
        raise ValueError(f"{run}: not the folder of a run (no {CONFIG} in it)")
    try:
        values = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise ValueError(f"{path}: not a config")
    recipe = str(values.pop("recipe", "?"))
    try:
        config = RunConfig.read(merge(values, edits or {}))
    except SettingError as error:
        raise error.in_source(str(path)) from None
    if not trust:
        refuse_code(config, edits or {}, run)
    return recipe, config


def read_result(run: Path) -> dict[str, Any]:
    """The result of a finished run."""
    read_run(run, trust=True)  # nothing is built
    path = run / RESULT
    if not path.is_file():
        raise ValueError(f"{run}: the run is not finished (no {RESULT} in it)")
    try:
        result: dict[str, Any] = dict(json.loads(path.read_text()))
        return {"run": str(run), "method": result["method"], "attack": result["attack"]} | result
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path}: not a result") from None


def read_progress(run: Path) -> dict[str, Any]:
    """The result of a run if it is finished, and in any case the number of completed epochs."""
    _, config = read_run(run, trust=True)  # nothing is built
    finished = (run / RESULT).is_file()
    metrics = run / METRICS
    # the last line may be incomplete while the run continues
    epoch = metrics.read_bytes().count(b"\n") if metrics.is_file() else 0
    progress = {"finished": finished, "epoch": epoch, "epochs": config.train.epochs}
    return {"run": str(run)} | progress | (read_result(run) if finished else {})


def is_analyzed(run: Path) -> bool:
    """Whether a run's report needs no error analysis: it exists already, the settings disable it,
    or there are no weights yet."""
    _, config = read_run(run, trust=True)  # nothing is built
    has_weights = (run / f"{WEIGHTS[0]}.safetensors").is_file()
    return (run / ERROR_ANALYSIS).is_file() or not config.evaluate.report or not has_weights
