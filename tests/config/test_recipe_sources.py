"""The tables of docs/recipes.md give the settings that the recipes have."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dat.config.recipes import header, names, read
from dat.config.schema import parse_edits

PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"
OWN = ("digits", "fashion-mnist")
ROW = re.compile(r"\| `([a-z]+\.\w+)` \| ([^|]+) \| ([^|]+) \|")


def tables() -> dict[str, list[tuple[str, str]]]:
    """By recipe, the settings that the page lists, with their values."""
    _, *sections = PAGE.read_text().split("\n## ")
    found = {}
    for section in sections:
        name, _, text = section.partition("\n")
        found[name] = [(key, value) for key, value, source in ROW.findall(text) if source.strip()]
    return found


ROWS = [(name, key, value) for name, table in tables().items() for key, value in table]


def test_every_recipe_from_elsewhere_has_a_table() -> None:
    published = [name for name in names() if not name.startswith(OWN) and "narrow" not in name]
    assert sorted(tables()) == published
    assert all(header(name).source for name in published)
    assert all(len(table) >= 3 for table in tables().values())


@pytest.mark.parametrize(("name", "key", "value"), ROWS, ids="-".join)
def test_a_recipe_has_the_value_of_its_source(name: str, key: str, value: str) -> None:
    if key == "model.args":
        assert read(name).model.args == {"drop_path_rate": 0.05}, value
        return
    assert read(name, parse_edits([f"{key}={value}"])) == read(name)
