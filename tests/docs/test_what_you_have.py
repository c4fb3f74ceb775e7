"""Every row of the table "What you have, what you type" works: Python is executed, a command is
one that the page runs, settings are accepted, and an example is one that is tested."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dat
from dat.config.recipes import read
from dat.config.schema import parse_edits
from tests.docs import pages
from tests.docs.preparation import ecosystem
from tests.test_examples import NEEDS

PAGE = "docs/own.md"


def rows() -> list[tuple[str, str]]:
    """What you have, and what you type, without the rows that are headings."""
    section = pages.text(PAGE).partition("## What you have, what you type")[2].partition("\n## ")[0]
    lines = [line.strip("| ").split(" | ") for line in section.splitlines() if line[:1] == "|"]
    return [(line[0], line[1]) for line in lines[2:] if len(line) == 2]


class Output(nn.Module):
    """Returns what models of Hugging Face return."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.net(x)}


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    x, y = torch.rand(32, 1, 8, 8), torch.arange(32) % 10
    model = dat.build_model("cnn", 10, channels=1, width=2)
    dataset = TensorDataset(x, y)
    return {
        "dat": dat,
        "model": model,
        "theirs": Output(model).eval(),
        "x": x,
        "y": y,
        "threat": dat.ThreatModel(eps=0.1),
        "dataset": dataset,
        "stream": iter(dataset),
        "loader": DataLoader(dataset, batch_size=8),
        "folder": ecosystem()["folder"],
    }


def test_the_table_is_there() -> None:
    assert len(rows()) >= 27


@pytest.mark.parametrize(("have", "type_"), rows(), ids=[row[0] for row in rows()])
def test_a_row_works(have: str, type_: str, names: dict[str, Any]) -> None:
    code = re.findall(r"`([^`]+)`", type_)
    links = re.findall(r"\]\(\.\./examples/([^)]+)\)", type_)
    assert code or links
    assert all(link in NEEDS and Path("examples", link).exists() for link in links)
    for text in code:
        if text.startswith("dat "):
            assert any(block.text.split() == text.split() for block in pages.commands(PAGE))
        elif text.startswith("model."):
            check_model(text.split())
        else:
            result = eval(text, names)
            assert result is not None or text.endswith(".fit()")
            if isinstance(result, dat.Accuracy):
                assert result.images == 32


def check_model(settings: list[str]) -> None:
    """A recipe accepts the settings, and a network of DAT can be built."""
    model = read("digits", parse_edits(settings)).model
    if model.name and not set("/:") & set(model.name):
        with torch.device("meta"):
            dat.build_model(model.name, 10, activation=model.activation, args=model.args)
