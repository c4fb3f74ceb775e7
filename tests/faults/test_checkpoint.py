"""Checkpoints: whole or not there, verified to the last byte, read without executing anything."""

from __future__ import annotations

import json
import os
import pickle
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dat.train import checkpoint
from dat.train.checkpoint import Refused, all_checkpoints, clear, pack, read, tidy, unpack, write
from dat.train.resume import Resumption

leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(max_size=8),
    st.integers(0, 5).map(lambda n: torch.arange(n, dtype=torch.float32)),
)
keys = st.one_of(st.text(max_size=5), st.integers(0, 9))
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys, inner, max_size=3),
    ),
    max_leaves=12,
)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@settings(derandomize=True, deadline=None, max_examples=200)
@given(tree=trees)
def test_what_is_packed_comes_back(tree: Any) -> None:
    tensors: dict[str, torch.Tensor] = {}
    packed = json.loads(json.dumps(pack(tree, tensors)))
    assert same(unpack(packed, tensors), tree)


def test_only_data_is_packed() -> None:
    with pytest.raises(TypeError, match="a set cannot be kept in a checkpoint"):
        pack({"odd": {1, 2}}, {})


def state(step: int) -> dict[str, Any]:
    return {"updates": step, "model": {"w": torch.full((50,), float(step))}, "note": "as it was"}


def put(root: Path, step: int) -> Path:
    tensors: dict[str, torch.Tensor] = {}
    packed = pack(state(step), tensors)
    return write(root, step, packed, tensors, 0)


def test_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    place = put(tmp_path, 7)
    checkpoint.write_own(tmp_path, 8, 0, {"left": torch.ones(3)})
    tensors: dict[str, torch.Tensor] = {}
    packed = pack(state(8), tensors)
    other = write(tmp_path, 8, packed, tensors, 1)
    found, own = read(place)
    assert same(found, state(7)) and list(own) == []
    found, own = read(other)
    assert [path.name for path in own] == ["worker-0.safetensors"]


def damages() -> list[tuple[str, str]]:
    files = ("state.safetensors", "worker-0.safetensors", "manifest.json")
    return [(file, kind) for file in files for kind in ("cut", "flip", "gone", "empty", "junk")]


@pytest.mark.parametrize(("file", "kind"), damages())
def test_damage_is_named_and_the_one_before_is_used(tmp_path: Path, file: str, kind: str) -> None:
    put(tmp_path, 5)
    checkpoint.write_own(tmp_path, 9, 0, {"left": torch.ones(3)})
    tensors: dict[str, torch.Tensor] = {}
    packed = pack(state(9), tensors)
    place = write(tmp_path, 9, packed, tensors, 1)
    raw = bytearray((place / file).read_bytes())
    if kind == "gone":
        (place / file).unlink()
    else:
        middle = len(raw) // 2
        new: dict[str, bytes] = {
            "cut": bytes(raw[:middle]),
            "flip": bytes(raw[:middle] + bytes([raw[middle] ^ 1]) + raw[middle + 1 :]),
            "empty": b"",
            "junk": os.urandom(len(raw)),
        }
        (place / file).write_bytes(new[kind])
    with pytest.raises(Refused, match=str(place)):
        read(place)
    told: list[str] = []
    found = Resumption.last(tmp_path, told.append)
    assert found is not None and found.updates == 5
    assert len(told) == 1 and str(place) in told[0] and "going back" in told[0]


@settings(derandomize=True, deadline=None, max_examples=60)
@given(where=st.floats(0, 0.999), value=st.integers(1, 255), which=st.integers(0, 1))
def test_no_changed_byte_goes_unnoticed(
    where: float, value: int, which: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    place = put(tmp_path_factory.mktemp("bytes"), 3)
    path = place / ("manifest.json", "state.safetensors")[which]
    raw = bytearray(path.read_bytes())
    raw[int(where * len(raw))] ^= value
    path.write_bytes(raw)
    try:
        found, _ = read(place)
    except Refused:
        return
    assert same(found, state(3))  # a blank in the JSON may differ


def test_a_manifest_cannot_point_elsewhere(tmp_path: Path) -> None:
    place = put(tmp_path, 3)
    secret = tmp_path / "secret"
    secret.write_bytes(b"x")
    body = json.loads((place / "manifest.json").read_bytes())
    body.pop("blake2b")
    body["files"]["../secret"] = {"size": 1, "blake2b": checkpoint._digest(b"x")}
    signed = body | {"blake2b": checkpoint._signature(body)}
    (place / "manifest.json").write_text(json.dumps(signed))
    with pytest.raises(Refused, match="missing"):
        read(place)


def test_a_pickle_is_not_a_checkpoint(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "boom"),)

    place = put(tmp_path, 3)
    for file in ("state.safetensors", "manifest.json"):
        (place / file).write_bytes(pickle.dumps(Bomb()))
        with pytest.raises(Refused):
            read(place)
    assert not (tmp_path / "boom").exists()


def test_the_last_few_are_kept(tmp_path: Path) -> None:
    for step in (1, 20, 3):
        put(tmp_path, step)
    (tmp_path / ".00000009.partial").mkdir()
    tidy(tmp_path, 2)
    assert sorted(it.name for it in tmp_path.iterdir()) == ["00000003", "00000020"]
    assert all_checkpoints(tmp_path / "nowhere") == []


def test_what_a_faster_worker_has_begun_stays(tmp_path: Path) -> None:
    """The first worker would wait for its file in vain."""
    put(tmp_path, 3)
    for step in (2, 3, 6):
        checkpoint.write_own(tmp_path, step, 1, {"left": torch.ones(3)})
    tidy(tmp_path, 2)
    assert sorted(it.name for it in tmp_path.iterdir()) == [".00000006.partial", "00000003"]
    clear(tmp_path)  # nobody is at it: before a run goes on
    assert [it.name for it in tmp_path.iterdir()] == ["00000003"]


def test_so_is_one_that_is_spared(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        put(tmp_path, step)
    (tmp_path / "00000001" / "manifest.json").write_text("{}")  # broken: nobody asks for it
    tidy(tmp_path, 1, lambda kept: kept["updates"] in (1, 2))
    assert sorted(it.name for it in tmp_path.iterdir()) == ["00000002", "00000004"]


def killed_at(root: Path, stage: int) -> int:
    """In a process of its own write a checkpoint, and die before the stage-th call to the system
    that the writing makes; the signal that ended it, or 0."""
    child = os.fork()
    if child:
        return os.WTERMSIG(os.waitpid(child, 0)[1])
    seen = 0

    def dying(function: Any) -> Any:
        def wrapped(*arguments: Any, **options: Any) -> Any:
            nonlocal seen
            seen += 1
            if seen == stage:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)

        return wrapped

    try:
        os.fsync, os.open = dying(os.fsync), dying(os.open)
        for name in ("rename", "open", "mkdir"):
            setattr(Path, name, dying(getattr(Path, name)))
        put(root, 2)
    finally:
        os._exit(0)


def test_killed_at_any_stage_of_writing_there_is_a_whole_one(tmp_path: Path) -> None:
    """SIGKILL before every single call: there is the old one alone, or the new one as well."""
    found, stage = [], 0
    while True:
        stage += 1
        root = tmp_path / str(stage)
        put(root, 1)
        ended = killed_at(root, stage)
        last = Resumption.last(root, pytest.fail)
        assert last is not None
        found.append(last.updates)
        if not ended:
            break
        assert ended == signal.SIGKILL
    assert len(found) >= 9 and found == sorted(found) and set(found) == {1, 2}
