"""A run's model given away: what is in the folder, and that it answers as the run's model does."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

import dat
from dat.cli import main
from dat.config.build import make_model
from dat.config.runs import read_run
from dat.config.schema import RunConfig
from dat.core.smoothing import Smoothed
from dat.data import load
from dat.export import folder as job
from dat.export import formats
from dat.models import MODELS
from dat.train import save_weights

HAS_ONNX = all(importlib.util.find_spec(name) for name in ("onnx", "onnxscript", "onnxruntime"))
needs_onnx = pytest.mark.skipif(not HAS_ONNX, reason="needs pip install 'dat-robust[onnx]'")
ALL = ("hub", "torchscript", "exported", *(["onnx"] if HAS_ONNX else []))
TINY = {"model": {"name": "cnn", "width": 4}}


def make_run(folder: Path, values: dict[str, Any], result: dict[str, Any] | None = None) -> Path:
    """What training leaves behind, without the training: random weights do for an export."""
    config = RunConfig.read(values)
    model = make_model(config, load("digits"))
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump({"recipe": "mine"} | config.dump()))
    save_weights(model, folder / "best.safetensors")
    if result:
        (folder / "result.json").write_text(json.dumps(result))
    return folder


def images() -> Tensor:
    return torch.rand(5, 1, 8, 8, generator=torch.Generator().manual_seed(1))


def model_of(run: Path) -> nn.Module:
    _, config = read_run(run, trust=True)
    model = make_model(config, load("digits"))
    dat.load_weights(model, run / "best.safetensors")
    return config.objective.deployed(model).eval()


def call(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(words)
    out, err = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, out, err


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With real figures: trained, evaluated, certified."""
    out = tmp_path_factory.mktemp("export") / "run"
    tiny = ("model.width=4", "attack.steps=1", "train.epochs=1", "train.batch=640", "train.ema=0.5")
    attacks = "pgd-1,autoattack"
    commands = (
        ("train", "digits", *tiny, f"evaluate.attacks={attacks}", "evaluate.images=10", "--quiet"),
        ("evaluate", "--attacks", "pgd-2", "--images", "20", "--no-checks", "--quiet"),
        ("evaluate", "--attacks", "pgd-2", "--weights", "ema-last", "--no-checks", "--quiet"),
        ("certify", "--sigma", "0.1", "--radii", "0.05,0.1", "--n", "100", "--images", "5"),
    )
    for command, *words in commands:
        place = ["--out", str(out)] if command == "train" else [str(out)]
        with pytest.raises(SystemExit) as ended:
            main([command, *words, *place])
        assert ended.value.code == 0
    return out


def test_the_command_leaves_a_folder_for_model_hubs(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "mine"
    code, text, err = call(capsys, "export", str(run), "--out", str(out), "--json")
    assert code == 0, err
    printed = json.loads(text)
    assert [(entry["format"], entry["difference"]) for entry in printed["files"]] == [("hub", 0.0)]
    assert {path.name for path in out.iterdir()} == {
        "README.md",
        "config.json",
        "model.safetensors",
    }
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]

    description = json.loads((out / "config.json").read_text())
    assert description["dat"] == dat.__version__
    model = description["network"]["model"]
    assert (model["name"], model["width"], model["pretrained"]) == ("cnn", 4, False)
    assert (description["shape"], description["classes"]) == ([1, 8, 8], 10)
    assert description["mean"] == pytest.approx(load("digits").mean)
    assert description["threat"] == {"norm": "linf", "eps": 0.2}
    assert description["training"]["method"] == "AT"
    figures = [(entry["name"], entry["under"], entry["images"]) for entry in description["figures"]]
    assert figures == [
        ("TA", "no attack", 10),
        ("RA", "pgd-1, linf 0.2", 10),
        ("AA", "autoattack, linf 0.2", 10),
        ("TA", "no attack", 20),  # of an evaluation of these weights, not of others
        ("RA", "pgd-2, linf 0.2", 20),
        ("CA", "certified within l2 0.05, sigma 0.1", 5),
        ("CA", "certified within l2 0.1, sigma 0.1", 5),
    ]
    result = json.loads((run / "result.json").read_text())
    values = [entry["value"] for entry in description["figures"][:3]]
    assert values == [result["ta"], result["ra"], result["aa"]]


def test_the_card_has_front_matter_figures_and_code(run: Path, tmp_path: Path) -> None:
    dat.export_run(run, out=tmp_path / "mine")
    card = (tmp_path / "mine" / "README.md").read_text()
    _, front, body = card.split("---\n", 2)
    values = yaml.safe_load(front)
    assert values["library_name"] == "dat"
    assert "adversarial-robustness" in values["tags"]
    metrics = values["model-index"][0]["results"][0]["metrics"]
    assert metrics[1]["name"] == "RA (pgd-1, linf 0.2)"
    assert "| RA |" in body and "| CA |" in body
    assert "What the numbers do not promise" in body
    assert 'dat.load("FOLDER")' in body
    assert str(run) not in card + (tmp_path / "mine" / "config.json").read_text()


def test_a_loaded_model_answers_as_the_runs_does(run: Path, tmp_path: Path) -> None:
    dat.export_run(run, out=tmp_path / "mine")
    model = dat.load(tmp_path / "mine")
    assert not model.training
    assert torch.equal(model(images()), model_of(run)(images()))


def test_without_an_out_each_weights_have_their_folder(run: Path) -> None:
    exported = dat.export_run(run, weights="ema-last")
    assert exported["folder"] == str(run / "export" / "ema-last")
    description = json.loads((run / "export" / "ema-last" / "config.json").read_text())
    assert [figure["under"] for figure in description["figures"]] == [
        "no attack",
        "pgd-2, linf 0.2",
    ]


QUICK = ("cnn", "mnist-cnn", "preact-resnet18", "resnet50", "wrn-28-10", "vit-4", "vit-16")
"""Exporting takes seconds: relatives of these networks are exported by the slow tests."""


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in MODELS]
)
def test_every_network_in_every_format(name: str, tmp_path: Path) -> None:
    # a layer norm over two values is next to a sign: it makes a difference of what is rounding
    width = 8 if name.startswith(("vit", "convnext")) else 2
    run = make_run(tmp_path / "run", {"model": {"name": name, "width": width}})
    exported = dat.export_run(run, formats=ALL, out=tmp_path / "out")
    assert [file["format"] for file in exported["files"]] == list(ALL)
    assert all(file["difference"] < 1e-4 for file in exported["files"])
    assert "These weights have not been evaluated." in (tmp_path / "out" / "README.md").read_text()


def test_what_was_fine_tuned_or_smoothed_comes_along(tmp_path: Path) -> None:
    values = {
        **TINY,
        "finetune": {"weights": "/home/me/a.pt", "classes": 4, "channels": 3, "size": 16},
        "objective": {"name": "smooth", "sigma": 0.1, "votes": 3},
    }
    run = make_run(tmp_path / "run", values)
    exported = dat.export_run(run, formats=ALL, out=tmp_path / "out")
    assert len(exported["files"]) == len(ALL)
    model = dat.load(tmp_path / "out")
    assert isinstance(model, Smoothed) and isinstance(model.network, dat.Resized)
    assert torch.equal(model(images()), model_of(run)(images()))
    assert "/home/me" not in (tmp_path / "out" / "config.json").read_text()


@needs_onnx
def test_onnx_is_read_by_its_own_runtime_for_any_batch(tmp_path: Path) -> None:
    import onnxruntime

    run = make_run(tmp_path / "run", TINY)
    dat.export_run(run, formats=["onnx"], out=tmp_path / "out")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"README.md", "config.json", "model.onnx"}
    session = onnxruntime.InferenceSession(
        tmp_path / "out" / "model.onnx", providers=["CPUExecutionProvider"]
    )
    for count in (1, 3, 5):
        x = images()[:count]
        (logits,) = session.run(["logits"], {"images": x.numpy()})
        torch.testing.assert_close(torch.from_numpy(logits), model_of(run)(x), rtol=1e-4, atol=1e-5)


def test_a_file_that_disagrees_is_not_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(path: Path) -> formats.Predictor:
        model = formats._read_torchscript(path)
        return lambda x: model(x) * 1.01

    altered = formats.Format("model.torchscript", formats._torchscript, read)
    monkeypatch.setitem(formats.TRACED, "torchscript", altered)
    run = make_run(tmp_path / "run", TINY)
    with pytest.raises(ValueError, match="torchscript: the exported model disagrees"):
        dat.export_run(run, formats=["hub", "torchscript"], out=tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_an_answer_that_is_not_finite_disagrees() -> None:
    model = nn.Flatten()
    assert job._difference(model, lambda x: model(x) * float("nan"), images(), "onnx") == float(
        "inf"
    )
    assert job._difference(model, lambda x: model(x)[:1], images(), "onnx") == float("inf")
    assert job._difference(model, model, images(), "onnx") == 0.0


def test_a_fixed_batch_size_is_reported() -> None:
    def exported(x: torch.Tensor) -> torch.Tensor:
        return x.reshape(len(images()), -1) if len(x) == len(images()) else x[len(x) :][0]

    message = "onnx: the exported model takes batches of .* only, .* instead of len"
    with pytest.raises(ValueError, match=message):
        job._difference(nn.Flatten(), exported, images(), "onnx")


class Viewing(nn.Module):
    """Flattens with view and len, as many published networks do."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3, padding=1)
        self.linear = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(self.conv(x).view(len(x), -1))
        return out


@pytest.mark.parametrize("name", [name for name in ALL if name != "hub"])
def test_view_and_len_take_any_batch_size(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = Viewing().eval()
    exported = formats.write_traced(name, model, images(), tmp_path)
    for count in (1, 3, len(images())):
        x = images()[:count]
        torch.testing.assert_close(exported(x), model(x), rtol=1e-4, atol=1e-5)
    assert "len" not in globals()
    assert capfd.readouterr() == ("", "")


OWN = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.linear = nn.Linear(64, classes)
    def forward(self, x):
        return self.linear(x.flatten(1))

class Winding(Net):
    def forward(self, x):
        return super().forward(x) if x.sum() > 0 else super().forward(-x)
"""


def test_code_of_ones_own_is_imported_only_when_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_nets.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    run = make_run(tmp_path / "run", {"model": {"name": "own_nets:Net"}})
    with pytest.raises(ValueError, match=r"the run's config imports code: .*own_nets:Net'"):
        dat.export_run(run, out=tmp_path / "out")
    dat.export_run(run, out=tmp_path / "out", trust=True)
    with pytest.raises(ValueError, match="the network is own_nets:Net, custom code"):
        dat.load(tmp_path / "out")
    model = dat.load(tmp_path / "out", network="own_nets:Net")
    assert torch.equal(model(images()), model_of(run)(images()))
    assert "network='own_nets:Net'" in (tmp_path / "out" / "README.md").read_text()

    winding = make_run(tmp_path / "winding", {"model": {"name": "own_nets:Winding"}})
    with pytest.raises(
        ValueError, match=r"--format exported: cannot write this network \("
    ) as refused:
        dat.export_run(winding, formats=["exported"], out=tmp_path / "other", trust=True)
    assert len(str(refused.value).splitlines()) == 1
    assert not (tmp_path / "other").exists()


def test_a_folder_in_use_is_left_alone(tmp_path: Path) -> None:
    run, out = make_run(tmp_path / "run", TINY), tmp_path / "out"
    dat.export_run(run, formats=["torchscript"], out=out)
    with pytest.raises(
        ValueError, match="already exists: choose another --out, or --overwrite to replace"
    ):
        dat.export_run(run, out=out)
    dat.export_run(run, out=out, overwrite=True)
    assert not (out / "model.torchscript").exists()
    (out / "thesis.txt").write_text("years of work")
    with pytest.raises(
        ValueError, match="already exists: choose another --out, or remove it yourself"
    ):
        dat.export_run(run, out=out, overwrite=True)
    with pytest.raises(ValueError, match="remove it yourself"):
        dat.export_run(run, out=out / "thesis.txt", overwrite=True)
    assert (out / "thesis.txt").read_text() == "years of work"


BAD = {
    "no run": ("export nowhere", "nowhere: not the folder of a run"),
    "two runs": ("export a b", "specify one run folder"),
    "other settings": (
        "export {run} threat.eps=1",
        "threat.eps=1: an export keeps the run's settings",
    ),
    "unknown format": ("export {run} --format onyx", "--format onyx: unknown: did you mean onnx?"),
    "no format": ("export {run} --format ,", "--format: name at least one of hub, onnx"),
    "no weights": ("export {run} --weights last", "last.safetensors: no such weights"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_gets_one_clear_line(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run, (words, expected) = make_run(tmp_path / "run", TINY), BAD[case]
    code, out, err = call(capsys, *words.format(run=run).split())
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert expected in err
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_missing_package_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match=r"--format onnx: needs onnx; run: pip install 'dat-robust\[onnx\]'"
    ):
        dat.export_run(tmp_path, formats=["onnx"])


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            {"network": {"model": {"name": "cnm"}, "finetune": {}}},
            "model.name = 'cnm': unknown: did you mean cnn",
        ),
        ({"network": {}}, "'model'"),
        ({"shape": [1, 8]}, "not enough values"),
        ({"classes": "many"}, "not written by dat export"),
        ({"smoothing": {"sigma": -1}}, "must be above 0"),
        ({"layout": 7}, "layout = 7: must be 1; update dat"),
        ({"network": {"model": {"name": "cnn", "width": 5}, "finetune": {}}}, "does not fit"),
    ],
)
def test_what_somebody_else_wrote_is_checked(
    edit: dict[str, Any], message: str, tmp_path: Path
) -> None:
    dat.export_run(make_run(tmp_path / "run", TINY), out=tmp_path / "out")
    path = tmp_path / "out" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | edit))
    with pytest.raises(ValueError) as refused:  # noqa: PT011
        dat.load(tmp_path / "out")
    assert message in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not an exported model"):
        dat.load(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="not written by dat export"):
        dat.load(tmp_path)
