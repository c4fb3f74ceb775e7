"""What the pages show can be run: their Python is, their recipes are valid, and their commands are
understood; those of pages that can be followed are run, with less data and fewer epochs."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist

import dat
from dat.cli import main
from dat.cli.parser import parser
from dat.config.recipes import read
from tests.docs import pages
from tests.docs.pages import Block, words_of
from tests.docs.preparation import CHECKED, PREPARED
from tests.docs.resolving import resolve

FOLLOWED = ("docs/tutorial.md", "docs/own.md")
"""Pages on which everything is run, in order, in one folder."""
SHORT = {
    "train": "model.width=4 attack.steps=1 train.epochs=1 train.batch=640 evaluate.attacks=pgd-1",
    "evaluate": "--images 4",
    "sweep": "--images 4 --eps 0,0.1 --steps 1,2",
    "certify": "--images 4 --n 1000",
    "profile": "--steps 1 model.width=4 attack.steps=1",
}
"""What is added to a command of theirs; of an option that is given twice the last counts."""


def of_kind(kind: str) -> list[Block]:
    return [block for page in pages.names() for block in pages.blocks(page) if block.kind == kind]


def with_python() -> list[str]:
    return sorted({block.page for block in of_kind("python")} - {*FOLLOWED})


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Each test is alone in a folder, and leaves no workers behind."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [it for it in sys.modules if it.partition(".")[0] == "mynets"]:
        del sys.modules[name]
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("page", with_python())
def test_the_python_of_a_page_runs(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType(f"page_{Path(page).stem}")  # dataclasses look theirs up
    monkeypatch.setitem(sys.modules, module.__name__, module)
    names = vars(module)
    names |= {"dat": dat, "torch": torch}
    if page in PREPARED:
        names |= PREPARED[page]()
    for block in pages.blocks(page):
        if block.kind == "python":
            execute(block, names)
    if page in CHECKED:
        CHECKED[page](names)


def execute(block: Block, names: dict[str, object]) -> None:
    """Line numbers in a traceback are the page's. A block that is a file is also written."""
    if file := re.match(r"# (\S+\.py)\n", block.text):
        Path(file[1]).parent.mkdir(parents=True, exist_ok=True)
        Path(file[1]).write_text(block.text)
    code = "\n" * (block.line - 1) + block.text
    exec(compile(code, block.page, "exec", dont_inherit=True), names)


@pytest.mark.parametrize("block", of_kind("yaml"), ids=lambda block: block.place)
def test_a_recipe_of_a_page_is_valid(block: Block) -> None:
    config = read(str(written(block)))
    if "eps: 8/255" in block.text:
        assert config.threat.eps == pytest.approx(8 / 255)
        assert config.train.options.averaging.decay == 0.999


def written(block: Block) -> Path:
    """A recipe under the name in its first line."""
    first = re.match(r"# (\S+\.yaml)\n", block.text)
    assert first, f"{block.place}: the first line is its name, as in `# my.yaml`"
    path = Path(first[1])
    path.write_text(block.text)
    return path


@pytest.mark.parametrize("block", of_kind("command"), ids=lambda block: block.place)
def test_a_command_of_a_page_is_understood(block: Block) -> None:
    try:
        resolve(words_of(block.text))
    except SystemExit:
        pytest.fail(f"{block.place}: the parser refuses {block.text.strip()}")


@pytest.mark.parametrize(
    "wrong",
    [
        "dat trian digits",
        "dat train digit",
        "dat train digits atack.steps=5",
        "dat train digits attack.steps=0",
        "dat train digits --wrokers 2",
        "dat evaluate runs/digits --attacks pgdd-20",
        "dat sweep runs/digits --eps 0,a",
        "dat finetune runs/large train.epochs=3",
        "dat reproduce table9",
        "dat bench attack --against nobody",
        "dat data fetch cifar11",
        "torchrun --nnodes 2 ... -m dat train imagenet data.nam=x",
    ],
)
def test_a_wrong_command_would_be_noticed(wrong: str) -> None:
    assert pages.is_command(wrong)
    with pytest.raises((ValueError, AssertionError, SystemExit)):
        resolve(words_of(wrong))


def test_there_are_commands_on_every_page_that_had_them() -> None:
    """Else the reader of pages would have gone blind."""
    count = {page: len(pages.commands(page)) for page in pages.names()}
    assert count["README.md"] > 2 and count["docs/index.md"] > 20
    assert min(count[page] for page in FOLLOWED) > 5
    assert min(count[f"docs/{it}.md"] for it in ("data", "methods", "evaluation", "speed")) > 2


def subcommands() -> list[tuple[str, argparse.ArgumentParser]]:
    """Every command, those of two words as well."""
    found = []

    def visit(command: argparse.ArgumentParser, path: tuple[str, ...]) -> None:
        choices = [it.choices for it in command._actions if it.choices and not it.option_strings]
        below = [it for it in choices if isinstance(it, dict)]
        for word, child in (below[0] if below else {}).items():
            visit(child, (*path, word))
        if not below:
            found.append((" ".join(path), command))

    visit(parser(), ())
    return found


@pytest.mark.parametrize(("name", "command"), subcommands(), ids=[it[0] for it in subcommands()])
def test_the_help_of_a_command_has_examples_that_work(
    name: str, command: argparse.ArgumentParser
) -> None:
    shown = command.format_help().partition("examples:")[2]
    examples = re.findall(r"^  \S(?:.*\\\n)*.*$", shown, flags=re.MULTILINE)
    own = [line for line in examples if pages.is_command(line)]
    assert any(f"dat {name}" in line for line in own)
    for line in own:
        resolve(words_of(line))


@pytest.mark.parametrize("page", FOLLOWED)
def test_a_page_can_be_followed(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    for block in pages.blocks(page):
        if block.kind == "python":
            execute(block, names)
        elif block.kind == "yaml":
            written(block)
        else:
            run(words_of(block.text), block.place, capsys)


def run(words: list[str], place: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A command for real, by one worker, small."""
    while "--workers" in words:
        where = words.index("--workers")
        words = words[:where] + words[where + 2 :]
    words = words + shlex.split(SHORT.get(words[0], ""))
    if words[0] == "train" and "digits-standard" in words:
        words.remove("attack.steps=1")
    with pytest.raises(SystemExit) as ended:
        main(words)
    said = capsys.readouterr()
    assert ended.value.code == 0, f"{place}: dat {' '.join(words)}: {said.err}"
