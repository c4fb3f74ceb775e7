"""Random, nested and wrong documents and files give a result or a clear error, no traceback."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dat.config.recipes import names, read
from dat.config.runs import read_result, read_run
from dat.config.schema import RunConfig, parse_edits
from dat.data import load
from dat.data.sharding import read_manifest
from dat.train import read_weights
from dat.train.checkpoint import InvalidCheckpoint
from dat.train.checkpoint import read as read_checkpoint

GROUPS = tuple(RunConfig.read({}).dump())
FIELDS = tuple(
    {
        key
        for group in RunConfig.read({}).dump().values()
        if isinstance(group, dict)
        for key in group
    }
)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=12),
    st.sampled_from(
        ["8/255", "1/0", "-1", "nan", "inf", "1e999", "../../x", "a:b", "$x", "!!python"]
    ),
)
words = st.one_of(st.sampled_from(GROUPS), st.sampled_from(FIELDS), st.text(max_size=6))
documents = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(words, inner, max_size=4)),
    max_leaves=20,
)
configs = st.dictionaries(
    st.one_of(st.sampled_from(GROUPS), words),
    st.one_of(documents, st.dictionaries(st.sampled_from(FIELDS), scalars, max_size=4)),
    max_size=5,
)
pytestmark = pytest.mark.fuzz


def is_clear(message: str) -> bool:
    """Whether it is one line, or a header and an indented line for each of several mistakes."""
    header, *rest = message.splitlines()
    several = header.endswith(" mistakes") and len(rest) > 1
    return all(line.startswith("  ") for line in rest) and (several or not rest)


def attempt(work: Any) -> tuple[str, Any]:
    """An error message, or the result."""
    try:
        return "", work()
    except (ValueError, OSError) as error:
        message = str(error)
    assert is_clear(message)
    return message, None


@given(document=configs)
def test_any_document_is_a_config_or_a_clear_error(document: dict[str, Any]) -> None:
    error, config = attempt(lambda: RunConfig.read(document))
    assert error or RunConfig.read(config.dump()) == config


@given(edits=st.lists(st.text(max_size=20), max_size=3))
def test_any_arguments_are_settings_or_a_clear_error(edits: list[str]) -> None:
    attempt(lambda: RunConfig.read(parse_edits(edits)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@given(document=documents)
def test_any_yaml_is_a_recipe_or_a_clear_error(document: Any, folder: Path) -> None:
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(document))
    attempt(lambda: read(str(path)))


EVIL = (
    "!!python/object/apply:os.mkdir [{boom}]",
    "about: !!python/object/apply:os.mkdir [{boom}]",
    "data: &a [*a]",
    "a: &a [1,1]\nb: [*a,*a]",
    "base: ../../../../etc/passwd",
    "base: {boom}",
    "model: {{name: 'os:mkdir'}}",
    "\0",
    "\ufeff- {{",
    "{{" * 2000,
)


@pytest.mark.parametrize("text", EVIL)
def test_no_yaml_is_executed(text: str, folder: Path) -> None:
    boom = folder / "boom"
    path = folder / "evil.yaml"
    path.write_text(text.format(boom=boom) if "{boom}" in text or "{{" in text else text)
    attempt(lambda: read(str(path)))
    assert not boom.exists()


READERS: dict[str, Any] = {
    "config.yaml": lambda path: read_run(path.parent),
    "result.json": lambda path: read_result(path.parent),
    "manifest.json": lambda path: read_manifest(path.parent),
    "w.safetensors": read_weights,
    "w.pt": read_weights,
    "x.npz": lambda path: load(str(path)),
    "x.parquet": lambda path: load(str(path)),
}


@given(which=st.sampled_from(sorted(READERS)), raw=st.binary(max_size=200), start=st.integers(0, 3))
def test_any_bytes_are_refused(which: str, raw: bytes, start: int, folder: Path) -> None:
    files = folder / "files"
    files.mkdir(exist_ok=True)
    prefixes = (b"", b"PK\x03\x04", b"{", b"\x80\x04")
    (files / which).write_bytes(prefixes[start] + raw)
    if which == "result.json":
        values = RunConfig.read({}).dump()
        (files / "config.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises((ValueError, OSError)) as error:
        READERS[which](files / which)
    assert is_clear(str(error.value))


@given(document=documents)
def test_any_manifest_is_refused(document: Any, folder: Path) -> None:
    checkpoint = folder / "00000001"
    checkpoint.mkdir(exist_ok=True)
    (checkpoint / "manifest.json").write_text(json.dumps(document))
    with pytest.raises(InvalidCheckpoint):
        read_checkpoint(checkpoint)
    with pytest.raises(ValueError, match="not the manifest of a part"):
        read_manifest(checkpoint)


def test_a_payload_in_weights_is_not_executed(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "boom"),)

    for name in ("w.pt", "w.pth", "w.bin", "w.ckpt"):
        torch.save({"state_dict": Bomb()}, tmp_path / name)
        with pytest.raises(ValueError, match=name):
            read_weights(tmp_path / name)
    assert not (tmp_path / "boom").exists()


@pytest.mark.parametrize("recipe", names())
def test_every_recipe_is_read_back_from_its_dump(recipe: str) -> None:
    config = read(recipe)
    assert RunConfig.read(yaml.safe_load(yaml.safe_dump(config.dump()))) == config
