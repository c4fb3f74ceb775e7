"""The documentation as data: a page's code blocks, commands, words in code, links and anchors."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent.parent
ROOTED = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
INDENTED = re.compile(r"(?<=\n\n)(?:    .*(?:\n|$)|\n(?=    ))+")
CODE = re.compile(r"(?<!`)`([^`\n]+(?:\n[^`\n]+)?)`(?!`)")
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
OUTPUT = ("text", "python", "yaml", "json")
"""Fences that hold no commands."""


class Block(NamedTuple):
    """A piece of a page that can be run."""

    page: str
    line: int
    kind: str
    """python, yaml, or command."""
    text: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


@cache
def names() -> tuple[str, ...]:
    """All pages, by their path from the root."""
    found = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md"))
    return *ROOTED, *found


@cache
def text(page: str) -> str:
    return (ROOT / page).read_text()


@cache
def blocks(page: str) -> tuple[Block, ...]:
    """What can be run, in order."""
    found = [*_fenced(page), *_indented(page)]
    return tuple(sorted(found, key=lambda block: block.line))


def commands(page: str) -> list[Block]:
    return [block for block in blocks(page) if block.kind == "command"]


def words_of(command: str) -> list[str]:
    """A command line without what stands before `dat` and without remarks behind it."""
    joined = re.sub(r"\\\n\s*", "", command).strip()
    bare = re.split(r"\s+#\s|(?<=\S)\s{2,}", joined)[0]
    words = shlex.split(
        re.split(r"\s(?:>>?|\|)\s", bare)[0]
    )  # where its output goes is the shell's
    start = next(i for i, word in enumerate(words) if word == "dat" or word.endswith("/dat"))
    return words[start + 1 :]


def spans(page: str) -> list[str]:
    """Words in code within the prose, each in one line."""
    prose = FENCE.sub("", text(page))
    return [" ".join(span.split()) for span in CODE.findall(prose)]


def links(page: str) -> list[str]:
    return LINK.findall(FENCE.sub("", text(page)))


@cache
def anchors(page: str) -> frozenset[str]:
    """Of the page's headings, where GitHub and MkDocs make the same of them."""
    prose = FENCE.sub("", text(page))
    titles = re.findall(r"^#+ (.*)$", prose, flags=re.MULTILINE)
    found = [re.sub(r"[^\w\- ]", "", it.lower()).strip().replace(" ", "-") for it in titles]
    return frozenset(it for it in found if "--" not in it)  # MkDocs would leave out a hyphen


def _fenced(page: str) -> Iterator[Block]:
    for match in FENCE.finditer(text(page)):
        line = text(page).count("\n", 0, match.start()) + 2
        if match[1] in ("python", "yaml"):
            yield Block(page, line, match[1], match[2])
        elif match[1] not in OUTPUT:
            yield from _commands(page, line, match[2])


def _indented(page: str) -> Iterator[Block]:
    hidden = FENCE.sub(lambda match: "\n" * match[0].count("\n"), text(page))
    for match in INDENTED.finditer(hidden):
        yield from _commands(page, hidden.count("\n", 0, match.start()) + 1, match[0])


def _commands(page: str, line: int, block: str) -> Iterator[Block]:
    for match in re.finditer(r"^[ ]*(?:.*\\\n)*.+$", block, flags=re.MULTILINE):
        if is_command(match[0]):
            here = line + block.count("\n", 0, match.start())
            yield Block(page, here, "command", match[0])


def is_command(line: str) -> bool:
    """It calls `dat`, by itself, with a variable set, through sudo or through a launcher."""
    before = r"(?:[A-Z_]+=\S+ |sudo |\S*/)*"
    return re.match(rf"\s*(?:{before}dat|(?:torchrun|python) .*-m dat)\s", line) is not None
