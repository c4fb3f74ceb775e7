"""Weights on disk: written atomically, and never executed."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

from dat.train import load_weights, save_weights


class Payload:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.path,)


def net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))


def test_round_trip(tmp_path: Path) -> None:
    model, other = net(), net()
    save_weights(model, tmp_path / "w.safetensors")
    load_weights(other, tmp_path / "w.safetensors")
    for ours, theirs in zip(model.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)
    assert [path.name for path in tmp_path.iterdir()] == ["w.safetensors"]


def test_shared_weights_are_saved(tmp_path: Path) -> None:
    tied = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    tied[1].weight = tied[0].weight
    save_weights(tied, tmp_path / "w.safetensors")
    load_weights(tied, tmp_path / "w.safetensors")


def test_a_failed_write_keeps_the_old_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "w.safetensors"
    save_weights(net(), path)
    before = path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="no space left"):
        save_weights(net(), path)
    assert path.read_bytes() == before


def test_truncated_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    with pytest.raises(ValueError, match="no such weights"):
        load_weights(net(), path)
    save_weights(net(), path)
    complete = path.read_bytes()
    for size in (0, 4, 20, len(complete) // 2, len(complete) - 1):
        path.write_bytes(complete[:size])
        with pytest.raises(ValueError, match="not a valid safetensors file"):
            load_weights(net(), path)


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    save_weights(nn.Conv2d(1, 2, 3), tmp_path / "w.safetensors")
    with pytest.raises(ValueError, match=r"does not fit the model \(Missing key"):
        load_weights(net(), tmp_path / "w.safetensors")


def test_a_pickle_is_not_executed(tmp_path: Path) -> None:
    trap = tmp_path / "executed"
    path = tmp_path / "w.safetensors"
    path.write_bytes(pickle.dumps(Payload(trap)))
    with pytest.raises(ValueError, match="not a valid safetensors file"):
        load_weights(net(), path)
    torch.save({"x": Payload(trap)}, path)
    with pytest.raises(ValueError, match="not a valid safetensors file"):
        load_weights(net(), path)
    assert not trap.exists()
    pickle.loads(pickle.dumps(Payload(trap)))
    assert trap.exists()  # the payload was live


@pytest.mark.parametrize("wrap", ["bare", "checkpoint", "list", "ddp"])
def test_files_of_torch_save_are_read(tmp_path: Path, wrap: str) -> None:
    """A state dict, a checkpoint that contains one, or one with the names of a wrapped model."""
    theirs, ours = net(), net()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(1.0)
    state = theirs.state_dict()
    saved: object = {
        "bare": state,
        "checkpoint": {"epoch": 3, "model": {"state_dict": state}},
        "list": {"state_dict": state, "losses": [1.0, 2.0]},
        "ddp": {f"module.{name}": value for name, value in state.items()},
    }[wrap]
    torch.save(saved, tmp_path / "theirs.pt")
    load_weights(ours, tmp_path / "theirs.pt")
    assert all(torch.equal(value, state[name]) for name, value in ours.state_dict().items())


def test_files_without_a_state_dict_are_refused(tmp_path: Path) -> None:
    torch.save([1, 2, 3], tmp_path / "list.pt")
    with pytest.raises(ValueError, match=r"list\.pt: contains no state dict"):
        load_weights(net(), tmp_path / "list.pt")
    (tmp_path / "broken.pt").write_bytes(b"PK broken")
    with pytest.raises(ValueError, match=r"broken\.pt: not plain weights"):
        load_weights(net(), tmp_path / "broken.pt")


def test_a_pickled_model_is_not_executed(tmp_path: Path) -> None:
    torch.save(net(), tmp_path / "model.pt")
    with pytest.raises(ValueError, match=r"model\.pt: .* save model\.state_dict\(\)"):
        load_weights(net(), tmp_path / "model.pt")


def test_a_whole_pickled_model_is_refused_in_one_line(tmp_path: Path) -> None:
    torch.save(nn.Linear(2, 2), tmp_path / "net.pt")
    with pytest.raises(ValueError, match=r"a whole model\?.*; save model.state_dict\(\) instead$"):
        load_weights(nn.Linear(2, 2), tmp_path / "net.pt")
