"""`dat recipes`: the table, its filter, and its JSON."""

from __future__ import annotations

import json

import pytest

from dat.cli.recipes import Recipe, show_radius
from dat.config.recipes import names
from tests.cli.test_cli import call


def listed(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    _, text, _ = call(capsys, "recipes", *words, "--json")
    return [recipe["recipe"] for recipe in json.loads(text)]


def test_the_table_fits_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    _, table, _ = call(capsys, "recipes")
    lines = table.partition("\n\n")[0].splitlines()
    assert len(lines) > len(names())
    assert max(len(line) for line in lines) <= 80


def test_a_row_has_method_cost_and_figures_below_its_task(
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, table, _ = call(capsys, "recipes", "imagenet-fgsm")
    lines = [line.split() for line in table.splitlines()]
    assert lines[0] == ["Recipe", "Method", "Cost", "TA", "Robust"]
    assert lines[1] == ["imagenet,", "linf", "2/255"]
    assert lines[2] == [*("imagenet-fgsm", "DAT-FGSM", "333", "GPU", "h", "58.02*", "AA", "36.02*")]


def test_our_own_figures_have_no_mark() -> None:
    assert Recipe.named("digits").row() == [
        "  digits",
        "DAT-PGD",
        "40 seconds",
        "99.40",
        "RA 78.10",
    ]
    assert Recipe.named("mnist-narrow").row()[2:] == ["-", "-", "-"]


def test_words_select_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    assert listed(capsys) == names()
    assert listed(capsys, "cifar10", "AWP") == ["cifar10-trades-awp"]
    assert set(listed(capsys, "cifar10")) == {it for it in names() if it.startswith("cifar10-")} | {
        "cifar10"
    }
    assert "cifar10-fast" in listed(capsys, "8/255", "fgsm")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["cifra10"], "no recipe has the word 'cifra10': did you mean cifar10?"),
        (["qqqqq"], "no recipe has the word 'qqqqq'; `dat recipes` lists all"),
        (["digits", "imagenet"], "no recipe has all of the words digits, imagenet; use fewer"),
    ],
)
def test_words_without_a_recipe_are_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = call(capsys, "recipes", *words)
    assert (code, out, err.strip()) == (2, "", f"error: {message}")


def test_json_has_what_the_header_states(capsys: pytest.CaptureFixture[str]) -> None:
    _, text, _ = call(capsys, "recipes", "cifar10-fast", "--json")
    (recipe,) = json.loads(text)
    assert (recipe["recipe"], recipe["task"]) == ("cifar10-fast", "cifar10")
    assert (recipe["threat"], recipe["method"]) == ("linf 8/255", "Fast AT")
    assert recipe["figures"] == {"ta": 83.34, "ra": 46.06, "aa": 43.21}
    assert recipe["measured_by_us"] is False
    assert "fast_adversarial" in recipe["source"] and recipe["about"]


@pytest.mark.parametrize(
    ("eps", "shown"), [(0.3, "0.3"), (8 / 255, "8/255"), (0.2, "0.2"), (2 / 255, "2/255")]
)
def test_a_radius_is_shown_as_in_papers(eps: float, shown: str) -> None:
    assert show_radius(eps) == shown
