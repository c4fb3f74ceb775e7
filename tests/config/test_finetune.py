"""`dat finetune`: from one run to another task."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dat.cli import main
from dat.config.build import make_model
from dat.config.finetune import make_optimizer, resolve_finetuning
from dat.config.runs import read_run
from dat.config.schema import ModelConfig, RunConfig
from dat.data import Splits, load
from dat.models import Resized, blocks
from dat.optim import OPTIMIZERS
from tests.cli.test_cli import call

JsonCommand = Callable[..., Any]
FAST = (
    "attack.steps=1",
    "train.epochs=1",
    "train.batch=640",
    "evaluate.report=0",
    "evaluate.attacks=pgd-1",
)
QUICK = (*FAST, "comm.threads=1")
OWN = """
import torch
from torch import nn
from torch.nn.functional import avg_pool2d

from dat.data import ImageData, load

def changed(change, classes=5):
    data = load("digits")
    return tuple(
        ImageData.of(change(part.images), part.labels % classes, classes=classes)
        for part in (data.train, data.test)
    )

def five():
    return changed(lambda images: images)

def small():
    return changed(lambda images: avg_pool2d(images, 2))

def color():
    return changed(lambda images: images.repeat(1, 3, 1, 1))

def large():
    return changed(lambda images: images.repeat_interleave(2, 2).repeat_interleave(2, 3))

class Seven(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2))
        self.fc = nn.Linear(16, 7)
    def forward(self, x):
        return self.fc(self.body(x).flatten(1))

def headless(classes):
    return nn.Sequential(nn.Conv2d(1, classes, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
"""


def train(*words: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["train", *words, "--quiet", "--json"])
    assert ended.value.code == 0


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two small runs: one with batch normalization, one without."""
    out = tmp_path_factory.mktemp("finetune")
    train("digits", *QUICK, "model.width=4", "train.ema=0.5", "--out", str(out / "cnn"))
    net = ("model.name=preact-resnet18", "model.width=2")
    train("digits", *QUICK, *net, "--out", str(out / "preact"))
    return out


@pytest.fixture
def own(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Copy the runs to the current folder, next to a user's module. Returns the module's name."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    name = f"own_{tmp_path.name}"  # unique, because modules are imported only once
    (tmp_path / f"{name}.py").write_text(OWN)
    return name


@pytest.fixture
def run_json(capsys: pytest.CaptureFixture[str]) -> JsonCommand:
    """Runs a command and parses its JSON."""

    def run_json(*words: str) -> Any:
        code, out, err = call(capsys, *words, "--quiet", "--json")
        assert code == 0, err
        return json.loads(out)

    return run_json


@pytest.fixture
def tune(own: str, run_json: JsonCommand) -> JsonCommand:
    """Fine-tunes and returns the result."""

    def tune(run: str, data: str, *words: str, out: str = "tuned") -> Any:
        recipe = ("digits", *QUICK, f"data.name={own}:{data}")
        return run_json("finetune", *run.split(), *recipe, *words, "--out", out)

    return tune


def recorded(run: str) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load(Path(run, "config.yaml").read_text())
    return config


def body(path: str, prefix: str) -> dict[str, Tensor]:
    """The bare network's weights in a file, without its head."""
    state = load_file(path)
    bare = {key.removeprefix(prefix): value for key, value in state.items() if prefix in key}
    return {key: value for key, value in bare.items() if key not in HEAD}


HEAD = ("head.2.weight", "head.2.bias", "linear.weight", "linear.bias")


def model_of(config: RunConfig, *, start: bool = False) -> tuple[nn.Module, Splits]:
    data = load(config.data.name)
    return make_model(
        resolve_finetuning(config, data) if start else config, data, start=start
    ), data


# The fine-tuned model


def test_only_the_head_is_new(tune: JsonCommand, run_json: JsonCommand, own: str) -> None:
    result = tune("cnn", "five")
    assert result["recipe"] == "digits"
    config = recorded("tuned")
    assert config["model"] == ModelConfig(name="cnn", width=4).dump()
    assert config["finetune"] == {
        "weights": str(Path("cnn/best.safetensors").resolve()),
        "classes": 10,
        "channels": 1,
        "size": None,
        "layers": "all",
        "decay": 1.0,
    }
    state = load_file("tuned/best.safetensors")
    assert state["net.net.head.2.weight"].shape[0] == 5

    origin = load_file("cnn/best.safetensors")
    model, data = model_of(read_run(Path("tuned"), trust=True)[1], start=True)
    for key, value in model.state_dict().items():
        before = origin[key.removeprefix("net.")]
        if key.removeprefix("net.net.") in HEAD:
            assert len(value) == 5
        else:
            assert torch.equal(value, before), key
    assert not torch.equal(state["net.net.features.0.weight"], origin["net.features.0.weight"])
    assert data.train.classes == 5


def test_evaluation_does_not_need_the_pretrained_run(
    tune: JsonCommand, run_json: JsonCommand
) -> None:
    result = tune("preact", "five", "train.ema=0.5")
    shutil.rmtree("preact")
    for weights, prefix in (("best", ""), ("ema-best", "ema_")):
        report = run_json("evaluate", "tuned", "--trust", "--weights", weights)
        assert (report["ta"], report["ra"]) == (result[f"{prefix}ta"], result[f"{prefix}ra"])
    radii = ("--sigma", "0.1", "--radii", "0.05", "--images", "3", "--n", "200")
    assert run_json("certify", "tuned", "--trust", *radii)["images"] == 3


@pytest.mark.parametrize("weights", ["last", "ema-best", "cnn/ema-last.safetensors"])
def test_any_weights_of_a_run_can_be_fine_tuned(tune: JsonCommand, weights: str) -> None:
    tune("cnn", "five", "--weights", weights, "finetune.layers=head")
    file = Path(weights) if "/" in weights else Path("cnn", f"{weights}.safetensors")
    before, after = body(str(file), "net."), body("tuned/last.safetensors", "net.net.")
    assert len(before) == 6
    assert all(torch.equal(value, after[key]) for key, value in before.items())


@pytest.mark.parametrize(
    ("layers", "learning"), [("head", ()), ("1", ()), ("2", ("stages.3",)), ("6", ("",))]
)
def test_frozen_layers_do_not_change_a_bit(
    tune: JsonCommand, layers: str, learning: tuple[str, ...]
) -> None:
    words = ("train.attack_bn=train", "train.ema=0.5", "train.awp=0.01", "train.epochs=2")
    tune("preact", "five", f"finetune.layers={layers}", *words)
    before = body("preact/best.safetensors", "net.")
    for weights in ("last", "ema-last"):
        after = body(f"tuned/{weights}.safetensors", "net.net.")
        assert after.keys() == before.keys()
        for key, value in before.items():
            learns = key.startswith(learning) if learning else False
            assert torch.equal(value, after[key]) is not learns, key


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_supports_layer_wise_rates(tune: JsonCommand, optimizer: str) -> None:
    name = f"optimizer.name={optimizer}"
    tune("cnn", "five", name, "finetune.decay=0.25", "schedule.name=constant")
    _, config = read_run(Path("tuned"), trust=True)
    model, _ = model_of(config)
    make = make_optimizer(config)
    assert callable(make)
    groups = make(model).param_groups
    rates = {p: group["initial_lr"] for group in groups for p in group["params"]}
    peak = config.optimizer(model, batch=640).param_groups[0]["lr"]
    for factor, block in zip((1 / 16, 1 / 4, 1), blocks(model), strict=True):
        assert {rates[p] for p in block.parameters} == {peak * factor}
    metrics = json.loads(Path("tuned/metrics.jsonl").read_text())
    assert metrics["lr"] == peak


def test_a_run_can_be_repeated_from_its_config(tune: JsonCommand, run_json: JsonCommand) -> None:
    tune("cnn", "small", "finetune.layers=2", "finetune.decay=0.5")
    config = recorded("tuned")
    del config["recipe"]
    Path("again.yaml").write_text(yaml.safe_dump(config))
    run_json("train", "again.yaml", "--out", "again")
    assert recorded("again")["finetune"] == config["finetune"]
    ours, theirs = (load_file(f"{run}/last.safetensors") for run in ("tuned", "again"))
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


# Images of other shapes


def test_smaller_images_are_upsampled_inside_the_model(
    tune: JsonCommand, run_json: JsonCommand
) -> None:
    result = tune("cnn", "small")
    assert recorded("tuned")["finetune"]["size"] == 8
    assert run_json("evaluate", "tuned", "--trust", "--attacks", "clean")["ta"] == result["ta"]
    model, data = model_of(read_run(Path("tuned"), trust=True)[1])
    assert isinstance(model, Resized)
    assert data.train.images.shape[1:] == (1, 4, 4)
    tune("cnn", "small", "finetune.size=none", out="as-they-are")
    assert recorded("as-they-are")["finetune"]["size"] is None
    tune("cnn", "small", "finetune.size=12", out="larger")
    assert recorded("larger")["finetune"]["size"] == 12
    tune("cnn", "large", out="large")
    assert recorded("large")["finetune"]["size"] is None


def test_a_fine_tuned_run_can_be_fine_tuned(tune: JsonCommand, own: str) -> None:
    tune("cnn", "small", out="first")
    tune("first", "small", "finetune.layers=head", out="second")
    assert recorded("second")["finetune"]["classes"] == 5
    assert recorded("second")["finetune"]["size"] == 8
    before = body("first/best.safetensors", "net.net.")
    after = body("second/last.safetensors", "net.net.")
    assert all(torch.equal(value, after[key]) for key, value in before.items())


def test_gray_images_are_repeated_for_a_color_network(
    tune: JsonCommand, run_json: JsonCommand, own: str
) -> None:
    words = ("model.width=4", f"data.name={own}:color", "--out", "colored")
    run_json("train", "digits", *QUICK, *words)
    result = tune("colored", "small", "--trust")
    assert recorded("tuned")["finetune"]["channels"] == 3
    assert run_json("evaluate", "tuned", "--trust")["ta"] == result["ta"]
    mean = load_file("tuned/best.safetensors")["net.normalize.mean"]
    assert torch.equal(mean, load_file("colored/best.safetensors")["normalize.mean"])


# Users' models


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_a_users_model_is_fine_tuned(
    tune: JsonCommand, run_json: JsonCommand, own: str, suffix: str
) -> None:
    torch.manual_seed(0)
    body = {"body.0.weight": torch.randn(4, 3, 3, 3), "body.0.bias": torch.randn(4)}
    state = body | {"fc.weight": torch.randn(7, 16), "fc.bias": torch.randn(7)}
    if suffix == ".pt":
        torch.save({"model": state}, "net.pt")
    else:
        save_file(state, "net.safetensors")
    words = ("--weights", f"net{suffix}", "finetune.layers=head", "finetune.size=10")
    result = tune(f"--model {own}:Seven", "small", *words)
    config = recorded("tuned")
    assert config["model"] == ModelConfig(name=f"{own}:Seven").dump()
    assert (config["finetune"]["classes"], config["finetune"]["channels"]) == (7, 3)
    after = load_file("tuned/last.safetensors")
    for key, value in body.items():
        assert torch.equal(after[f"net.net.{key}"], value)
    assert after["net.normalize.mean"].flatten().tolist() == [0.0] * 3
    assert after["net.normalize.std"].flatten().tolist() == [1.0] * 3
    assert after["net.net.fc.weight"].shape == (5, 16)
    Path(f"net{suffix}").unlink()
    assert run_json("evaluate", "tuned", "--trust")["ta"] == result["ta"]
    tune("tuned", "five", "finetune.layers=head", f"model.name={own}:Seven", out="again")
    again = load_file("again/last.safetensors")
    assert all(torch.equal(again[f"net.net.{key}"], value) for key, value in body.items())


def test_a_runs_weights_fit_its_factory(tune: JsonCommand) -> None:
    words = ("--weights", "cnn/best.safetensors", "model.width=4", "finetune.layers=head")
    tune("--model cnn", "five", *words)
    before = load_file("cnn/best.safetensors")
    after = load_file("tuned/last.safetensors")
    assert torch.equal(after["net.normalize.mean"], before["normalize.mean"])
    assert torch.equal(after["net.net.features.0.weight"], before["net.features.0.weight"])


# Invalid input


BAD = {
    "no recipe": ("cnn", "specify a run folder and a recipe, or --model, --weights and a recipe"),
    "no run": ("nowhere digits", "nowhere: not the folder of a run (no config.yaml in it)"),
    "other way round": ("digits cnn", "digits: not the folder of a run"),
    "no such recipe": ("cnn digit", "unknown recipe 'digit': did you mean digits?"),
    "too many": ("cnn preact digits", "specify a run folder and a recipe"),
    "run and model": ("cnn digits --model cnn --weights x", "--model: specify exactly one recipe"),
    "model alone": ("digits --model cnn", "--model: requires --weights, the file to start from"),
    "no such weights": ("cnn digits --weights bets", "bets: no such weights"),
    "weights in pieces": (
        "cnn digits --weights broken.safetensors",
        "broken.safetensors: not a valid safetensors file (",
    ),
    "weights of another": (
        "preact digits --weights cnn/best.safetensors",
        "cnn/best.safetensors: does not fit the model (Missing key",
    ),
    "other classes": (
        "cnn digits finetune.classes=7",
        "cnn/best.safetensors: does not fit the model (size mismatch for net.head.2.weight",
    ),
    "other network": (
        "cnn digits model.width=8",
        "model.width = 8: the network is that of cnn; omit this setting",
    ),
    "two networks": (
        "digits --model cnn --weights cnn/best.safetensors model.name=resnet50",
        "model.name = resnet50: the network is that of cnn; omit this setting",
    ),
    "weights twice": (
        "cnn digits finetune.weights=x.pt",
        "finetune.weights = x.pt: use --weights instead",
    ),
    "no layers": (
        "cnn digits finetune.layers=body",
        "finetune.layers = 'body': must be all, head, or a whole number, at least 1",
    ),
    "too many layers": (
        "cnn digits finetune.layers=4",
        "finetune.layers = '4': must be all, head, or a number from 1 to 3: the network's blocks "
        "are features, head, head.2",
    ),
    "decay": ("cnn digits finetune.decay=0", "finetune.decay = 0: must be above 0 and at most 1"),
    "smaller": (
        "cnn digits finetune.size=6",
        "finetune.size = 6: the images are 8 x 8: must be at least 8, or none",
    ),
    "color": (
        "cnn digits data.name=OWN:color",
        "finetune.channels = 1: the images have 3 channels: must be 3; only gray images are "
        "repeated",
    ),
    "no head": (
        "digits --model OWN:headless --weights cnn/best.safetensors",
        "Sequential has no head: its last layer must be linear",
    ),
    "no group": ("cnn digits finetune=3", "finetune = '3': must be a group of settings"),
    "onto itself": ("cnn digits --overwrite --out ./cnn", "--out cnn is the pre-trained run"),
    "nothing to tune": (
        "TRAIN digits finetune.layers=head",
        "finetune.weights = none: specify weights to start from (dat finetune, or model.pr",
    ),
    "nothing to start from": (
        "TRAIN digits finetune.weights=gone.pt",
        "gone.pt: no such weights",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_invalid_input_gives_a_one_line_error(
    own: str, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    Path("broken.safetensors").write_bytes(b"half")
    before = sorted(path.name for path in Path().iterdir())
    words, expected = BAD[case]
    command, words = ("train", words[6:]) if words.startswith("TRAIN") else ("finetune", words)
    code, out, err = call(capsys, command, *words.replace("OWN", own).split(), "--quiet")
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 1
    assert expected in err
    left = sorted(path.name for path in Path().iterdir() if path.name != "__pycache__")
    assert left == before
    assert Path("cnn/best.safetensors").is_file()


def test_a_pretrained_run_without_its_data(
    tune: JsonCommand, own: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The weights contain everything but the image size."""
    config = recorded("cnn")
    config["data"]["name"] = "gone.npz"
    Path("cnn/config.yaml").write_text(yaml.safe_dump(config))
    code, _, err = call(capsys, "finetune", "cnn", "digits", "--quiet")
    assert code == 2
    assert err == (
        "error: cnn: cannot determine its image size (data.name = gone.npz: no such file); "
        "set finetune.size\n"
    )
    tune("cnn", "small", "finetune.size=8")


def test_the_default_folder_of_a_fine_tuned_run(
    own: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("finetune", "cnn", "digits", *QUICK, f"data.name={own}:five", "--quiet")
    code, out, _ = call(capsys, *words)
    assert code == 0
    assert out.endswith("runs/digits-finetuned: best weights, metrics, TensorBoard events\n")
    assert Path("runs/digits-finetuned/result.json").is_file()
