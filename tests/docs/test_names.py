"""Names in the pages are names in the code: links, settings, files, functions, commands, errors."""

from __future__ import annotations

import ast
import dataclasses
import re
from functools import cache
from pathlib import Path

import pytest
import yaml

import dat
from dat.cli.parser import parser
from dat.config.recipes import read
from dat.config.schema import RunConfig, parse_edits
from dat.core.settings import SettingError
from tests.docs import pages

ROOT = pages.ROOT
TODAY = [page for page in pages.names() if page != "docs/log.md"]
"""The log speaks of its day."""
FILE = re.compile(r"((?:[\w-]+/)*[\w-]+\.(?:py|c|yaml|tex|toml))(?::([\w.]+))?")
SETTING = re.compile(r"[a-z]+\.[a-z_]+(=\S*)?")
EXAMPLES = {"mynets/small.py", "script.py"}
"""Files of the reader's."""


@pytest.mark.parametrize("page", pages.names())
def test_links_lead_somewhere(page: str) -> None:
    here = (ROOT / page).parent
    for link in pages.links(page):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = (here / path).resolve() if path else ROOT / page
        assert target.exists(), f"{page}: {link}"
        if anchor:
            known = pages.anchors(target.relative_to(ROOT).as_posix())
            assert anchor in known, f"{page}: {link}: no such heading, but {sorted(known)}"


def test_no_page_is_left_out_of_the_navigation() -> None:
    """But the log, which is for maintainers."""
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    listed = set(re.findall(r"'([\w/]+\.md)'", str(site["nav"])))
    pages_on_disk = {path.name for path in (ROOT / "docs").glob("*.md")}
    assert site["not_in_nav"] == "log.md"
    assert listed == pages_on_disk - {"log.md"} | {
        *("changelog.md", "contributing.md", "benchmarks/README.md")
    }


@cache
def defined(path: Path) -> frozenset[str]:
    """What a module defines: functions, classes, and what is in classes."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        found |= {it.id for it in targets if isinstance(it, ast.Name)}
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            inner = [it for it in node.body if isinstance(it, ast.FunctionDef)]
            found |= {f"{node.name}.{it.name}" for it in inner}
    return frozenset(found)


@pytest.mark.parametrize("page", TODAY)
def test_files_and_functions_that_are_named_exist(page: str) -> None:
    for span in pages.spans(page):
        match = FILE.fullmatch(span.split()[-1] if span.startswith("python ") else span)
        match = FILE.fullmatch(span.split()[1]) if span.startswith("python b") else match
        if not match or match[1] in EXAMPLES or match[1].endswith(("my.yaml", "large.yaml")):
            continue
        places = [ROOT / match[1], ROOT / "src" / "dat" / match[1], ROOT / "benchmarks" / match[1]]
        found = [it for it in places if it.is_file()] or [
            it for it in (ROOT / "src" / "dat").rglob(match[1]) if "/" not in match[1]
        ]
        assert found or match[1] in ("config.yaml", "mkdocs.yml"), f"{page}: {span}"
        if match[2]:
            assert match[2] in defined(found[0]), f"{page}: {span}"


def test_every_row_of_the_algorithm_names_code() -> None:
    """A name by itself belongs to the file before it; functions are looked up above."""
    rows = re.findall(r"^\| (.+?) \| (.+?) \| (.+?) \|$", pages.text("docs/algorithm.md"), re.M)
    rows = [row for row in rows if not row[0].startswith(("paper", "---"))]
    assert len(rows) > 30
    for paper, _, where in rows:
        spans = re.findall(r"`([^`]+)`", where)
        files = [it.partition(":")[0] for it in spans if ".py" in it or ".c" in it]
        assert files, paper
        known = {it for path in files if ".py" in path for it in defined(ROOT / "src/dat" / path)}
        alone = [it for it in spans if re.fullmatch(r"[A-Z]\w+", it)]
        assert set(alone) <= known, paper


def test_the_algorithm_has_every_numbered_equation() -> None:
    """(1) to (4) of the paper, (A1) to (A6) of its appendix, and the theorems."""
    text = pages.text("docs/algorithm.md")
    table = text[: text.index("## Where the paper leaves a choice")]
    for number in ("(1)", "(2)", "(3)", "(4)", *(f"(A{n})" for n in range(1, 7))):
        assert number in table, number
    for name in ("Theorem 1", "Theorem A", "Algorithm 1", "Algorithm A2"):
        assert name in table, name


@cache
def settings() -> dict[str, tuple[frozenset[str], tuple[str, ...]]]:
    """Of each group, all keys of all its components, and the components' names."""
    found = {}
    for field in dataclasses.fields(RunConfig):
        registry = field.metadata.get("registry", {})
        default = field.default_factory
        kinds = [*registry.values()] or ([default] if dataclasses.is_dataclass(default) else [])
        keys = {key for kind in kinds for key in kind.fields_by_key()}
        named = {"name"} if registry else set()
        if keys:
            found[field.name] = (frozenset(keys | named), tuple(registry))
    return found


FILES = (".py", ".md", ".json", ".yaml", ".safetensors", ".onnx", ".torchscript", ".pt2")


@pytest.mark.parametrize("page", TODAY)
def test_settings_that_are_named_exist(page: str) -> None:
    for span in pages.spans(page):
        given = [word for word in span.split() if SETTING.fullmatch(word)]
        given = [word for word in given if word.partition(".")[0] in settings()]
        if span.endswith(FILES) or "(" in span:
            continue
        for word in given:
            group, _, rest = word.partition(".")
            key = rest.partition("=")[0]
            assert key in settings()[group][0], f"{page}: {span}"
        valued = [word for word in given if "=" in word and is_value(word.partition("=")[2])]
        if valued and len(valued) == len(span.split()):
            assert possible(valued), f"{page}: {span}"


def is_value(text: str) -> bool:
    """Not a placeholder such as N or mine, nor `...`."""
    return bool(text) and not text.isupper() and text != "mine" and "..." not in text


def possible(words: list[str]) -> bool:
    """With some choice of the components that are not named."""
    group = words[0].partition(".")[0]
    named = any(word.startswith(f"{group}.name=") for word in words)
    others = [] if named else [[f"{group}.name={it}"] for it in settings()[group][1]]
    for other in others or [[]]:
        try:
            read("digits", parse_edits([*other, *words]))
        except SettingError:
            continue
        return True
    return False


@pytest.mark.parametrize("page", TODAY)
def test_commands_within_the_prose_exist(page: str) -> None:
    known = parser().format_help()
    for span in pages.spans(page):
        words = span.split()
        if words[0] != "dat" or len(words) < 2 or words[1].isupper():
            continue
        assert re.search(rf"^    {re.escape(words[1])}\b", known, re.M) or words[1] == "--help", (
            f"{page}: {span}"
        )


@cache
def said() -> str:
    """Every string in the source, a null between them and where a value is put in."""
    found = []
    for path in (ROOT / "src" / "dat").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [getattr(it, "value", None) for it in node.values]
                found.append("\0".join(it if isinstance(it, str) else "" for it in parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return " ".join("\0".join(found).split())


def test_messages_are_quoted_as_they_are_said() -> None:
    page = pages.text("docs/troubleshooting.md")
    cells = re.findall(r"^\| `(.+?)`", page, re.M)
    bold = [*re.findall(r"^\*\*`(.+?)`\*\*", page, re.M), *re.findall(r"\(`(the loss .+?)`", page)]
    messages = cells + bold
    assert len(messages) > 35
    for message in messages:
        for piece in filter(
            None, (it.strip(" ;") for it in re.split(r"\.\.\.|\(\.\.\.\)", message))
        ):
            assert piece in said() or piece in ": ()", f"{message}: {piece!r} is said nowhere"


def test_the_reference_has_every_public_name_once() -> None:
    found = re.findall(r"^::: dat\.(\w+)$", pages.text("docs/reference.md"), flags=re.MULTILINE)
    assert sorted(found) == sorted(dat.__all__)
