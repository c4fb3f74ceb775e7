"""Checkpoints are written atomically, verified, and read without executing code."""

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
from safetensors.torch import load_file

from dat.train import checkpoint
from dat.train.checkpoint import (
    InvalidCheckpoint,
    all_checkpoints,
    pack,
    prune,
    read,
    remove_unfinished,
    unpack,
    write,
)
from dat.train.checkpointer import Checkpoint

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


@settings(max_examples=200)
@given(tree=trees)
def test_unpack_inverts_pack(tree: Any) -> None:
    tensors: dict[str, torch.Tensor] = {}
    packed = json.loads(json.dumps(pack(tree, tensors)))
    assert same(unpack(packed, tensors), tree)


def test_only_data_is_packed() -> None:
    with pytest.raises(TypeError, match="a set cannot be saved in a checkpoint"):
        pack({"odd": {1, 2}}, {})


def state(step: int) -> dict[str, Any]:
    return {"updates": step, "model": {"w": torch.full((50,), float(step))}, "note": "as it was"}


def save(root: Path, step: int) -> Path:
    tensors: dict[str, torch.Tensor] = {}
    packed = pack(state(step), tensors)
    return write(root, step, packed, tensors, 0)


def test_round_trip(tmp_path: Path) -> None:
    folder = save(tmp_path, 7)
    checkpoint.write_worker(tmp_path, 8, 0, {"left": torch.ones(3)})
    tensors: dict[str, torch.Tensor] = {}
    packed = pack(state(8), tensors)
    other = write(tmp_path, 8, packed, tensors, 1)
    restored, worker_files = read(folder)
    assert same(restored, state(7)) and list(worker_files) == []
    restored, worker_files = read(other)
    assert [path.name for path in worker_files] == ["worker-0.safetensors"]


def damages() -> list[tuple[str, str]]:
    files = ("state.safetensors", "worker-0.safetensors", "manifest.json")
    return [(file, kind) for file in files for kind in ("cut", "flip", "gone", "empty", "junk")]


@pytest.mark.parametrize(("file", "kind"), damages())
def test_damage_is_reported_and_the_checkpoint_before_is_used(
    tmp_path: Path, file: str, kind: str
) -> None:
    save(tmp_path, 5)
    checkpoint.write_worker(tmp_path, 9, 0, {"left": torch.ones(3)})
    tensors: dict[str, torch.Tensor] = {}
    packed = pack(state(9), tensors)
    folder = write(tmp_path, 9, packed, tensors, 1)
    raw = bytearray((folder / file).read_bytes())
    if kind == "gone":
        (folder / file).unlink()
    else:
        middle = len(raw) // 2
        new: dict[str, bytes] = {
            "cut": bytes(raw[:middle]),
            "flip": bytes(raw[:middle] + bytes([raw[middle] ^ 1]) + raw[middle + 1 :]),
            "empty": b"",
            "junk": os.urandom(len(raw)),
        }
        (folder / file).write_bytes(new[kind])
    with pytest.raises(InvalidCheckpoint, match=str(folder)):
        read(folder)
    reports: list[str] = []
    last = Checkpoint.last(tmp_path, reports.append)
    assert last is not None and last.updates == 5
    assert len(reports) == 1 and str(folder) in reports[0] and "going back" in reports[0]


@settings(max_examples=60)
@given(where=st.floats(0, 0.999), value=st.integers(1, 255), which=st.integers(0, 1))
def test_every_changed_byte_is_detected(
    where: float, value: int, which: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = save(tmp_path_factory.mktemp("bytes"), 3)
    path = folder / ("manifest.json", "state.safetensors")[which]
    raw = bytearray(path.read_bytes())
    raw[int(where * len(raw))] ^= value
    path.write_bytes(raw)
    try:
        restored, _ = read(folder)
    except InvalidCheckpoint:
        return
    assert same(restored, state(3))  # whitespace in the JSON may differ


def test_a_manifest_cannot_name_files_outside_its_folder(tmp_path: Path) -> None:
    folder = save(tmp_path, 3)
    secret = tmp_path / "secret"
    secret.write_bytes(b"x")
    body = json.loads((folder / "manifest.json").read_bytes())
    body.pop("blake2b")
    body["files"]["../secret"] = {"size": 1, "blake2b": checkpoint._digest(b"x")}
    signed = body | {"blake2b": checkpoint._signature(body)}
    (folder / "manifest.json").write_text(json.dumps(signed))
    with pytest.raises(InvalidCheckpoint, match="missing"):
        read(folder)


def test_a_pickle_is_not_a_checkpoint(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "boom"),)

    folder = save(tmp_path, 3)
    for file in ("state.safetensors", "manifest.json"):
        (folder / file).write_bytes(pickle.dumps(Bomb()))
        with pytest.raises(InvalidCheckpoint):
            read(folder)
    assert not (tmp_path / "boom").exists()


def test_the_latest_checkpoints_are_kept(tmp_path: Path) -> None:
    for step in (1, 20, 3):
        save(tmp_path, step)
    (tmp_path / ".00000009-0.partial").mkdir()
    prune(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00000003", "00000020"]
    assert all_checkpoints(tmp_path / "nowhere") == []


def test_files_of_a_faster_worker_are_kept(tmp_path: Path) -> None:
    """Otherwise rank 0 would wait for them in vain."""
    save(tmp_path, 3)
    for number, step in enumerate((2, 3, 6)):
        checkpoint.write_worker(tmp_path, step, 1, {"left": torch.ones(3)}, number=number)
    prune(tmp_path, 2, number=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".00000006-2.partial", "00000003"]
    remove_unfinished(tmp_path)  # before a run is resumed, nobody is writing
    assert [path.name for path in tmp_path.iterdir()] == ["00000003"]


def test_a_faster_worker_may_write_two_checkpoints_of_a_step(tmp_path: Path) -> None:
    """The last step of an epoch has two checkpoints if `save_every` divides it. Another worker may
    have written its files of both before rank 0 writes its own: each must get the right one."""
    for number in (1, 2):
        checkpoint.write_worker(tmp_path, 8, 1, {"left": torch.full((3,), number)}, number=number)
    for number in (1, 2):
        folder = write(tmp_path, 8, pack(state(8), {}), {}, 1, number=number, timeout=0)
        prune(tmp_path, 2, number=number)
        assert load_file(folder / "worker-1.safetensors")["left"].tolist() == [number] * 3
    assert [path.name for path in tmp_path.iterdir()] == ["00000008"]


def test_rank_0_waits_as_long_as_the_run_waits_for_a_worker(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"no files within 0\.01 s \(comm\.timeout\)"):
        write(tmp_path, 8, pack(state(8), {}), {}, 1, timeout=0.01)


def test_spared_checkpoints_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, step)
    (tmp_path / "00000001" / "manifest.json").write_text("{}")  # a damaged one is not spared
    prune(tmp_path, 1, lambda kept: kept["updates"] in (1, 2))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00000002", "00000004"]


def killed_at(root: Path, stage: int) -> int:
    """Write a checkpoint in a child process that kills itself before the `stage`-th system call of
    the writing. Returns the signal that ended it, or 0."""
    child = os.fork()
    if child:
        return os.WTERMSIG(os.waitpid(child, 0)[1])
    calls = 0

    def dying(function: Any) -> Any:
        def wrapped(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == stage:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)

        return wrapped

    try:
        os.fsync, os.open = dying(os.fsync), dying(os.open)
        for name in ("rename", "open", "mkdir"):
            setattr(Path, name, dying(getattr(Path, name)))
        save(root, 2)
    finally:
        os._exit(0)


def test_a_writer_killed_at_any_stage_leaves_a_valid_checkpoint(tmp_path: Path) -> None:
    """SIGKILL before every single call: either only the old one exists, or the new one, too."""
    updates, stage = [], 0
    while True:
        stage += 1
        root = tmp_path / str(stage)
        save(root, 1)
        ended = killed_at(root, stage)
        last = Checkpoint.last(root, pytest.fail)
        assert last is not None
        updates.append(last.updates)
        if not ended:
            break
        assert ended == signal.SIGKILL
    assert len(updates) >= 9 and updates == sorted(updates) and set(updates) == {1, 2}
