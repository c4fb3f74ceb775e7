"""`dat recipes`: the built-in recipes."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from dat.cli.arguments import Commands

if TYPE_CHECKING:
    from dat.config import RunConfig
    from dat.config.recipes.header import Header

EXAMPLES = "  dat recipes\n  dat recipes cifar10\n  dat recipes imagenet fgsm --json"
HEADERS = ("Recipe", "Method", "Cost", "TA", "Robust")
NOTE = (
    "TA, Robust: in %; Robust is AA if known, otherwise RA or CA. *: published by the source, not "
    "run by us. -: not known. Sources and what differs from them: --json."
)


def add(commands: Commands) -> None:
    parser = commands.add("recipes", _recipes, "list the built-in recipes", EXAMPLES)
    parser.add_argument(
        "words", nargs="*", metavar="WORD", help="only recipes with all of these words"
    )


def _recipes(arguments: argparse.Namespace, argv: list[str]) -> int:
    from dat.config.recipes import names
    from dat.report import print_json, print_table

    recipes = _select([Recipe.named(name) for name in names()], arguments.words)
    if arguments.json:
        print_json([recipe.as_dict() for recipe in recipes])
    else:
        print_table(HEADERS, _rows(recipes), note=NOTE)
    return 0


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A built-in recipe as it is listed."""

    name: str
    config: RunConfig
    header: Header

    @classmethod
    def named(cls, name: str) -> Recipe:
        from dat.config.recipes import header, read

        return cls(name=name, config=read(name), header=header(name))

    @property
    def threat(self) -> str:
        return f"{self.config.threat.norm} {show_radius(self.config.threat.eps)}"

    @property
    def method(self) -> str:
        """The paper's name of the method. A recipe of LALR is meant for several workers."""
        from dat.jobs.method import WITHOUT_LALR, method_name

        workers = 1 if isinstance(self.config.optimizer, WITHOUT_LALR) else 2
        return method_name(self.config, workers)

    def as_dict(self) -> dict[str, Any]:
        header = self.header
        return {
            "recipe": self.name,
            "about": self.config.about,
            "task": self.config.data.name,
            "threat": self.threat,
            "model": self.config.model.name,
            "method": self.method,
            "command": header.command,
            "hardware": header.hardware,
            "cost": header.cost,
            "result": header.result,
            "figures": dict(header.figures),
            "measured_by_us": bool(header.figures) and header.is_own,
            "source": header.source,
            "differs": header.differs,
        }

    def words(self) -> set[str]:
        """What a recipe is found by: the words of its name, settings and description."""
        config = self.config
        parts = (config.attack, config.objective, config.optimizer)
        classes = (type(part).__name__ for part in parts)
        texts = (self.name, config.data.name, self.threat, config.model.name, *classes)
        text = " ".join((*texts, self.method, config.about)).lower()
        return {*text.split(), *re.findall(r"\w+", text)}

    def row(self) -> list[str]:
        """One row of the table, below the heading of its task."""
        figures = self.header.figures
        mark = "" if self.header.is_own else "*"
        clean = f"{figures['ta']:.2f}{mark}" if "ta" in figures else "-"
        robust = next((name for name in ("aa", "ra", "ca") if name in figures), "")
        shown = f"{robust.upper()} {figures[robust]:.2f}{mark}" if robust else "-"
        return [f"  {self.name}", self.method, self.header.brief_cost, clean, shown]


def _select(recipes: Sequence[Recipe], words: Iterable[str]) -> list[Recipe]:
    """The recipes that have all of the words."""
    from dat.core.mistakes import closest

    selected, wanted = list(recipes), [word.lower() for word in words]
    known = {word for recipe in recipes for word in recipe.words()}
    for word in wanted:
        if word not in known:
            match = closest(word, known)
            tail = f": did you mean {match}?" if match else "; `dat recipes` lists all"
            raise ValueError(f"no recipe has the word {word!r}{tail}")
        selected = [recipe for recipe in selected if word in recipe.words()]
    if not selected:
        raise ValueError(f"no recipe has all of the words {', '.join(wanted)}; use fewer")
    return selected


def _rows(recipes: Iterable[Recipe]) -> list[list[str]]:
    """A heading for each task and threat model, and its recipes below."""

    def heading(recipe: Recipe) -> str:
        return f"{recipe.config.data.name}, {recipe.threat}"

    rows = []
    for title, group in groupby(sorted(recipes, key=heading), key=heading):
        rows.append([title, *[""] * (len(HEADERS) - 1)])
        rows += [recipe.row() for recipe in group]
    return rows


def show_radius(eps: float) -> str:
    """A radius as papers write it: 0.3, or 8/255."""
    is_decimal = eps == float(f"{eps:.2g}")
    return f"{eps:g}" if is_decimal else f"{255 * eps:g}/255"
