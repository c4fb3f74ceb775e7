"""A study: one table or figure of the paper as runs to make, in a YAML file.

title, about     what it shows, and what was scaled and why
like             another study, whose base it takes over and, unless it has its own, whose rows
base             settings that all rows share
seeds            how many; every row is run with each
timed            epochs of a run of each row that is only timed, one at a time, when all others are
                 over; C and T are then of these epochs but the first
columns          of the table, by the names in `figures.py`
rows             a list, in the table's order:
  name           in the table
  settings       over those of the base
  workers        M
  command        train (the default), finetune or selftrain
  origin         finetune: the row whose run it starts from
  tune           a setting and the values to choose from, by held-out RA with the first seed
  labeller       selftrain: settings of the model that labels
  labels         where it stands in the plot
  paper          the paper's own figures
  shown          false for a row that only serves another
measure          what is measured of each run besides TA and RA: `evaluate`, `certify`, `sweep`
plot             which picture (plots.py)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from importlib import resources
from typing import Any

import yaml

from dat.config import RunConfig, merge
from dat.fields import SettingError, did_you_mean

SCALES = ("desk", "paper")
COMMANDS = ("train", "finetune", "selftrain")
MEASURES = ("evaluate", "certify", "sweep")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of a table."""

    name: str
    settings: dict[str, Any]
    """All of them, the base's too."""
    workers: int = 1
    command: str = "train"
    origin: str | None = None
    tune: dict[str, list[Any]] = field(default_factory=dict)
    labeller: dict[str, Any] = field(default_factory=dict)
    labels: dict[str, Any] = field(default_factory=dict)
    paper: dict[str, float | None] = field(default_factory=dict)
    shown: bool = True

    def config(self, edits: Mapping[str, Any] | None = None) -> RunConfig:
        """Checked, as `dat train` would."""
        return RunConfig.read(merge(self.settings, edits or {}))

    def tunings(self) -> list[dict[str, Any]]:
        """What is tried, one setting at a time; nothing to choose is one try."""
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
    rows: tuple[Row, ...]
    seeds: int = 1
    timed: int = 0
    columns: tuple[str, ...] = ("TA", "RA")
    measure: dict[str, Any] = field(default_factory=dict)
    plot: dict[str, Any] = field(default_factory=dict)

    @property
    def data(self) -> set[str]:
        """The sets that it needs."""
        return {str(row.settings.get("data", {}).get("name", "digits")) for row in self.rows}

    def row(self, name: str) -> Row:
        return next(row for row in self.rows if row.name == name)


def names(scale: str) -> list[str]:
    """The studies that there are."""
    ending = f".{scale}.yaml"
    files = resources.files(__name__.rpartition(".")[0]).joinpath("studies").iterdir()
    return sorted(it.name.removesuffix(ending) for it in files if it.name.endswith(ending))


def read_study(name: str, scale: str = "desk") -> Study:
    """A built-in study, checked."""
    return parse_study(name, scale, _values(name, scale))


def _values(name: str, scale: str) -> dict[str, Any]:
    """What a study's file says, and the one it is like."""
    if name not in names(scale):
        raise SettingError(f"unknown study {name!r}{did_you_mean(name, names(scale))}")
    folder = resources.files(__name__.rpartition(".")[0]).joinpath("studies")
    values: dict[str, Any] = yaml.safe_load(folder.joinpath(f"{name}.{scale}.yaml").read_text())
    like = values.pop("like", None)
    if like is None:
        return values
    above = _values(like, scale)
    rows = [{key: it for key, it in row.items() if key != "paper"} for row in above["rows"]]
    base = merge(above.get("base", {}), values.get("base", {}))
    return {"rows": rows} | values | {"base": base}


def parse_study(name: str, scale: str, values: dict[str, Any]) -> Study:
    """From what a file says."""
    where, values = f"{name}.{scale}", dict(values)
    base = values.pop("base", {})
    rows = tuple(_row(where, base, dict(row)) for row in values.pop("rows"))
    _check(where, values, {"title", "about", "seeds", "timed", "columns", "measure", "plot"})
    _check(f"{where}.measure", values.get("measure", {}), set(MEASURES))
    made = {row.name for row in rows}
    if len(made) < len(rows):
        raise SettingError(f"study {where}: rows must have names of their own")
    tuned = {row.name for row in rows if row.tune}
    for row in rows:
        if row.origin in tuned:
            raise SettingError(f"study {where}: {row.name}: its origin must not be tuned")
        if row.origin is not None and row.origin not in made:
            raise SettingError(f"study {where}: {row.name}: there is no row {row.origin}")
        if (row.command == "finetune") != (row.origin is not None):
            raise SettingError(f"study {where}: {row.name}: finetune and origin go together")
    columns = tuple(values.pop("columns", ("TA", "RA")))
    return Study(name=name, scale=scale, rows=rows, columns=columns, **values)


def _row(where: str, base: dict[str, Any], values: dict[str, Any]) -> Row:
    known = {it.name for it in fields(Row)}
    _check(f"{where}: {values.get('name')}", values, known)
    row = Row(**values | {"settings": merge(base, values.get("settings", {}))})
    if row.command not in COMMANDS:
        raise SettingError(f"study {where}: {row.name}: command is one of {', '.join(COMMANDS)}")
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
