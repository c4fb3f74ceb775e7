"""`model.pretrained`: from the weights of a library or of a file to a run.

The library is a stand-in with the signatures of timm; tests/models/test_libraries.py has the real
one.
"""

from __future__ import annotations

import importlib.machinery
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import dat
from dat.config.build import make_model
from dat.config.finetune import resolve_finetuning
from dat.config.model_spec import ModelSpec
from dat.config.runs import read_run
from dat.config.schema import RunConfig
from dat.data import Splits, load
from dat.models import Normalize, Resized, build_model, normalized
from dat.train import save_weights
from tests.cli.test_cli import call

FAST: tuple[str, ...] = ("attack.steps=1", "train.epochs=1", "train.batch=640", "comm.threads=1")
FAST += ("evaluate.report=0", "evaluate.attacks=pgd-1", "train.log=none")
MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)


class Peer(nn.Module):
    """A network of the library."""

    def __init__(self, num_classes: int = 7, in_chans: int = 3, dim: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(in_chans, dim, 3, stride=2)
        self.head = nn.Linear(dim, num_classes)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.stem(x).relu().mean((2, 3)))


def create_model(
    model_name: str,
    pretrained: bool = False,
    pretrained_cfg: Any = None,
    checkpoint_path: Any = None,
    **kwargs: Any,
) -> nn.Module:
    net = Peer(**{k: v for k, v in kwargs.items() if v is not None})
    if pretrained:  # as timm does, all but a head of another size
        for name, value in WEIGHTS.items():
            if not name.startswith("head") or len(value) == len(net.head.weight):
                net.get_parameter(name).data.copy_(value)
    return net


WEIGHTS = {name: torch.full_like(value, 0.1) for name, value in Peer().state_dict().items()}


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A package `timm` with one network."""
    values = {"num_classes": 7, "input_size": (3, 24, 24), "mean": MEAN, "std": STD}
    timm: Any = ModuleType("timm")
    timm.__spec__ = importlib.machinery.ModuleSpec("timm", None, origin="stand-in")
    timm.create_model, timm.is_model = create_model, lambda name: name == "peer"
    timm.list_models = lambda: ["peer"]
    timm.get_pretrained_cfg = lambda model_name: SimpleNamespace(to_dict=lambda: dict(values))
    monkeypatch.setitem(sys.modules, "timm", timm)
    monkeypatch.chdir(tmp_path)


def color(data: Splits, classes: int | None = None) -> Splits:
    """The digits with three channels, and labels modulo the classes."""

    def changed(part: Any) -> Any:
        count = classes or part.classes
        labels = part.labels % count
        return dat.ImageData.of(part.images.repeat(1, 3, 1, 1), labels, classes=count)

    train, test = changed(data.train), changed(data.test)
    return Splits(train, test, tuple(data.mean * 3), tuple(data.std * 3))


def started(model: dict[str, Any], data: Splits, **finetune: Any) -> tuple[Resized, RunConfig]:
    config = RunConfig.read({"model": model, "finetune": finetune})
    config = resolve_finetuning(config, data)
    net = make_model(config, data, start=True)
    assert isinstance(net, Resized)
    return net, config


def normalization(model: nn.Module) -> tuple[list[float], list[float]]:
    norm = next(module for module in model.modules() if isinstance(module, Normalize))
    return norm.mean.flatten().tolist(), norm.std.flatten().tolist()


def test_the_weights_of_a_library_are_normalized_as_it_says() -> None:
    data = load("digits")
    model, config = started({"name": "timm/peer", "pretrained": True}, data)
    mean_and_std = normalization(model)
    assert mean_and_std[0] == pytest.approx(MEAN) and mean_and_std[1] == pytest.approx(STD)
    assert config.model.mean == MEAN and config.finetune.channels == 3
    x = torch.rand(5, 1, 8, 8)
    net = Peer()
    net.load_state_dict(WEIGHTS)
    head = model.get_submodule("net.net.head")  # new: the digits have other classes
    assert isinstance(head, nn.Linear)
    net.head = head
    assert net.head.out_features == 10
    mean, std = (torch.tensor(values).reshape(3, 1, 1) for values in (MEAN, STD))
    torch.testing.assert_close(model(x), net((x.repeat(1, 3, 1, 1) - mean) / std))


def test_a_run_is_built_again_without_the_weights() -> None:
    data = load("digits")
    model, config = started({"name": "timm/peer", "pretrained": True}, data, size=16)
    config = RunConfig.read(config.dump())
    again = make_model(config, data)
    for key, value in again.state_dict().items():
        assert (
            torch.equal(value, model.state_dict()[key])
            is not key.endswith(("stem.weight", "stem.bias"))
            or "head" in key
        ), key
    again.load_state_dict(model.state_dict())
    x = torch.rand(3, 1, 8, 8)
    assert torch.equal(again(x), model(x))


def test_a_head_of_the_same_classes_is_kept_and_layers_can_be_frozen() -> None:
    data = color(load("digits"), 7)
    model, _ = started({"name": "timm/peer", "pretrained": True}, data, layers="head")
    assert torch.equal(model.get_parameter("net.net.head.weight"), WEIGHTS["head.weight"])
    learning = {name for name, value in model.named_parameters() if value.requires_grad}
    assert learning == {"net.net.head.weight", "net.net.head.bias"}


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
@pytest.mark.parametrize("name", ["timm/peer", "resnet18"])
def test_a_file_has_the_names_of_the_bare_network(name: str, suffix: str) -> None:
    width: dict[str, Any] = {} if name == "timm/peer" else {"width": 2}
    net = build_model(name, 6, channels=3, seed=9, **width)
    path = Path(f"net{suffix}")
    if suffix == ".pth":
        torch.save({"state_dict": net.state_dict()}, path)
    else:
        save_file(net.state_dict(), path)
    own = {} if name == "timm/peer" else {"mean": MEAN, "std": STD}
    given = {"name": name, "pretrained": str(path), **width, **own}
    model, config = started(given, load("digits"))
    assert normalization(model)[0] == pytest.approx(MEAN)
    assert (config.finetune.classes, config.finetune.channels) == (6, 3)
    assert config.model.pretrained == str(path.resolve())
    for key, value in net.state_dict().items():
        head = key.startswith(("head", "fc"))
        assert torch.equal(model.net.get_submodule("net").state_dict()[key], value) is not head

    path.unlink()  # a run's own weights replace it
    assert make_model(config, load("digits"))(torch.rand(2, 1, 16, 16)).shape == (2, 10)


def test_weights_of_a_run_bring_their_normalization() -> None:
    net = normalized(build_model("cnn", 10, channels=1, width=2, seed=9), [0.25], [0.5])
    save_weights(net, Path("run.safetensors"))
    given = {"name": "cnn", "width": 2, "pretrained": "run.safetensors"}
    model, config = started(given, load("digits"))
    assert (config.model.mean, config.model.std) == ((0.25,), (0.5,))
    x = torch.rand(3, 1, 8, 8)
    assert torch.equal(model(x), net(x))  # with its head: the classes are as many


def test_code_in_a_file_is_not_executed() -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return Path.touch, (Path("executed"),)

    torch.save({"state_dict": Evil()}, "evil.pth")
    with pytest.raises(ValueError, match=r"evil.pth: not plain weights"):
        started({"name": "timm/peer", "pretrained": "evil.pth"}, load("digits"))
    assert not Path("executed").exists()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"name": "resnet18", "width": 2}, r"does not say how .*; set model.mean and model.std"),
        ({"name": "timm/peer", "mean": [0.5], "std": [1.0]}, r"model.mean: has 1 .* weights 3"),
        ({"name": "timm/pear"}, r"timm has no such model: did you mean peer\?"),
        ({"name": "timm/peer", "width": 3}, r"model.width = 3: timm/peer has no width"),
    ],
)
def test_what_cannot_be_started_from_is_one_line(model: dict[str, Any], message: str) -> None:
    net = build_model("resnet18", 6, width=2) if model["name"] == "resnet18" else Peer()
    save_file(net.state_dict(), "net.safetensors")
    with pytest.raises(ValueError, match=message):
        started(model | {"pretrained": "net.safetensors"}, load("digits"))


def test_weights_are_evaluated_as_they_are() -> None:
    data = color(load("digits"), 7)
    spec = ModelSpec.of_model("timm/peer", None, "digits")
    model = spec.make(data)
    assert normalization(model)[0] == pytest.approx(MEAN)
    assert torch.equal(model.get_parameter("net.net.head.weight"), WEIGHTS["head.weight"])
    save_file(Peer().state_dict(), "net.safetensors")
    other = ModelSpec.of_model("timm/peer", Path("net.safetensors"), "digits").make(data)
    assert normalization(other)[0] == pytest.approx(MEAN)
    with pytest.raises(ValueError, match=r"the weights have 7 classes, and the data 10"):
        spec.make(load("digits"))


def test_a_users_model_can_be_normalized_by_settings() -> None:
    edits = {"model": {"width": 2, "mean": [0.5], "std": [0.25]}}
    bare = build_model("cnn", 10, channels=1, width=2)
    save_weights(bare, Path("bare.safetensors"))
    model = ModelSpec.of_model("cnn", Path("bare.safetensors"), "digits", edits).make(
        load("digits")
    )
    x = torch.rand(3, 1, 8, 8)
    torch.testing.assert_close(model(x), bare((x - 0.5) / 0.25))


def test_a_run_from_a_librarys_weights(capsys: pytest.CaptureFixture[str]) -> None:
    """Trained, resumable, evaluated, exported and loaded like any other."""
    words = ["model.name=timm/peer", "model.pretrained=true", "model.args.dim=6", *FAST]
    WEIGHTS_OF_SIX = {k: torch.full_like(v, 0.1) for k, v in Peer(dim=6).state_dict().items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[__name__], "WEIGHTS", WEIGHTS_OF_SIX)
        code, _, err = call(capsys, "train", "digits", *words, "--out", "run", "--quiet")
        assert code == 0, err
    config: dict[str, Any] = yaml.safe_load(Path("run/config.yaml").read_text())
    assert config["model"]["args"] == {"dim": 6} and config["model"]["pretrained"] is True
    assert config["model"]["mean"] == list(MEAN)
    assert load_file("run/best.safetensors")["net.net.stem.weight"].shape == (6, 3, 3, 3)
    code, out, err = call(capsys, "evaluate", "run", "--quiet", "--json", "--attacks", "pgd-1")
    assert code == 0, err
    assert json.loads(out)["ta"] >= 0
    dat.export_run("run", out="exported")
    x = torch.rand(2, 1, 8, 8)
    spec = ModelSpec.of_run(Path("run"))
    assert torch.equal(dat.load("exported")(x), spec.make(load("digits")).eval()(x))


def test_fine_tuning_a_librarys_network(capsys: pytest.CaptureFixture[str]) -> None:
    """Images are upsampled to the size that its weights were trained on."""
    words = ("finetune", "--model", "timm/peer", "digits", *FAST, "--out", "tuned", "--quiet")
    code, _, err = call(capsys, *words)
    assert code == 0, err
    _, config = read_run(Path("tuned"))
    assert config.model.pretrained is True and config.finetune.size == 24
    # and from that run to another
    code, _, err = call(capsys, "finetune", "tuned", "digits", *FAST, "--out", "again", "--quiet")
    assert code == 0, err
    _, config = read_run(Path("again"))
    assert config.model.pretrained is False and config.finetune.size == 24
