"""A study: the runs behind one table or figure of the paper, described in a YAML file.

title, about     what the study shows, and what is scaled down and why
like             another study, from which this one inherits the base and, unless it has its own,
                 the rows
base             settings that all rows share
seeds            number of seeds; every row is run with each
timed            epochs of an extra run per row that is only timed, after all others and one at a
                 time; C and T are then means over these epochs, without the first
columns          columns of the table, by the names in `figures.py`
rows             the rows of the table, in order:
  name           the row's name in the table
  settings       settings that override the base
  workers        M
  command        train (the default), finetune or selftrain
  origin         finetune: the row whose runs are fine-tuned
  tune           a setting and its candidate values; the highest RA on held-out images with the
                 first seed decides
  labeller       selftrain: settings of the model that labels
  labels         the row's position in the plot
  paper          the paper's values
  shown          false for a row that is needed by another, but not in the table
measure          further measurements of each run, besides TA and RA: `evaluate`, `certify`, `sweep`
plot             the kind of plot, with its options (`plots.py`)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from importlib import resources
from itertools import takewhile
from typing import Any

import yaml

from dat.config.schema import RunConfig, merge
from dat.core.settings import SettingError, did_you_mean

SCALES = ("desk", "paper")
THEOREM = "theorem1"
"""A study without training runs (`theorem.py`)."""
COMMANDS = ("train", "finetune", "selftrain")
MEASURES = ("evaluate", "certify", "sweep")


@dataclass(frozen=True, kw_only=True)
class StudyRow:
    """One row of a table."""

    name: str
    settings: dict[str, Any]
    """All settings, including those of the base."""
    workers: int = 1
    command: str = "train"
    origin: str | None = None
    tune: dict[str, list[Any]] = field(default_factory=dict)
    labeller: dict[str, Any] = field(default_factory=dict)
    labels: dict[str, Any] = field(default_factory=dict)
    paper: dict[str, float | None] = field(default_factory=dict)
    shown: bool = True

    def config(self, edits: Mapping[str, Any] | None = None) -> RunConfig:
        """The config, validated as by `dat train`."""
        return RunConfig.read(merge(self.settings, edits or {}))

    def tunings(self) -> list[dict[str, Any]]:
        """The edits to try; a single empty one if nothing is tuned."""
        if not self.tune:
            return [{}]
        ((key, values),) = self.tune.items()
        group, _, rest = key.partition(".")
        return [{group: {rest: value} if rest else value} for value in values]


@dataclass(frozen=True, kw_only=True)
class Study:
    """A table or figure."""

    name: str
    scale: str
    title: str
    about: str
    rows: tuple[StudyRow, ...]
    seeds: int = 1
    timed: int = 0
    columns: tuple[str, ...] = ("TA", "RA")
    measure: dict[str, Any] = field(default_factory=dict)
    plot: dict[str, Any] = field(default_factory=dict)

    @property
    def data(self) -> set[str]:
        """The datasets that it needs."""
        return {str(row.settings.get("data", {}).get("name", "digits")) for row in self.rows}

    def row(self, name: str) -> StudyRow:
        return next(row for row in self.rows if row.name == name)


def names(scale: str) -> list[str]:
    """The names of all studies."""
    ending = f".{scale}.yaml"
    files = resources.files(__name__.rpartition(".")[0]).joinpath("studies").iterdir()
    return sorted(file.name.removesuffix(ending) for file in files if file.name.endswith(ending))


def read_study(name: str, scale: str = "desk") -> Study:
    """A built-in study, validated."""
    return parse_study(name, scale, _values(name, scale))


def study_header(name: str, scale: str) -> dict[str, str]:
    """The comment at the top of a built-in study's file: its command, hardware, cost and so on;
    empty for any other study."""
    if name not in names(scale):
        return {}
    lines = takewhile(lambda line: line.startswith("# "), _contents(name, scale).splitlines())
    entries = (line.removeprefix("# ").partition(" ") for line in lines)
    return {key: text.strip() for key, _, text in entries}


def _contents(name: str, scale: str) -> str:
    if name not in names(scale):
        raise SettingError(f"unknown study {name!r}{did_you_mean(name, names(scale))}")
    folder = resources.files(__name__.rpartition(".")[0]).joinpath("studies")
    return folder.joinpath(f"{name}.{scale}.yaml").read_text()


def _values(name: str, scale: str) -> dict[str, Any]:
    """The contents of a study's file, merged with the study that it inherits from."""
    values: dict[str, Any] = yaml.safe_load(_contents(name, scale))
    like = values.pop("like", None)
    if like is None:
        return values
    parent = _values(like, scale)
    rows = [{key: row[key] for key in row if key != "paper"} for row in parent["rows"]]
    base = merge(parent.get("base", {}), values.get("base", {}))
    return {"rows": rows} | values | {"base": base}


def parse_study(name: str, scale: str, values: dict[str, Any]) -> Study:
    """Build a study from the contents of a file."""
    where, values = f"{name}.{scale}", dict(values)
    base = values.pop("base", {})
    rows = tuple(_row(where, base, dict(row)) for row in values.pop("rows"))
    _check(where, values, {"title", "about", "seeds", "timed", "columns", "measure", "plot"})
    _check(f"{where}.measure", values.get("measure", {}), set(MEASURES))
    known = {row.name for row in rows}
    if len(known) < len(rows):
        raise SettingError(f"study {where}: rows must have different names")
    tuned = {row.name for row in rows if row.tune}
    for row in rows:
        if row.origin in tuned:
            raise SettingError(f"study {where}: {row.name}: its origin must not be tuned")
        if row.origin is not None and row.origin not in known:
            raise SettingError(f"study {where}: {row.name}: there is no row {row.origin}")
        if (row.command == "finetune") != (row.origin is not None):
            raise SettingError(
                f"study {where}: {row.name}: finetune needs an origin, and only finetune has one"
            )
    columns = tuple(values.pop("columns", ("TA", "RA")))
    return Study(name=name, scale=scale, rows=rows, columns=columns, **values)


def _row(where: str, base: dict[str, Any], values: dict[str, Any]) -> StudyRow:
    known = {field.name for field in fields(StudyRow)}
    _check(f"{where}: {values.get('name')}", values, known)
    row = StudyRow(**values | {"settings": merge(base, values.get("settings", {}))})
    if row.command not in COMMANDS:
        raise SettingError(
            f"study {where}: {row.name}: command must be one of {', '.join(COMMANDS)}"
        )
    if len(row.tune) > 1:
        raise SettingError(f"study {where}: {row.name}: only one setting can be tuned")
    if row.command == "train":
        for edits in row.tunings():
            row.config(edits)
    return row


def _check(where: str, values: Mapping[str, Any], known: set[str]) -> None:
    for key in values:
        if key not in known:
            raise SettingError(f"study {where}: unknown {key!r}{did_you_mean(key, sorted(known))}")
