"""The command line as a user meets it: its tables, its JSON, and what it says to bad input."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from dat.cli import main

TINY = (
    "model.width=4",
    "attack.steps=1",
    "train.epochs=1",
    "train.batch=640",
    "evaluate.attacks=pgd-1",
    "evaluate.report=20",
)


def call(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(words)
    out, err = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, out, err


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("cli") / "run"
    with pytest.raises(SystemExit) as ended:
        main(["train", "digits", *TINY, "train.ema=0.5", "--quiet", "--json", "--out", str(out)])
    assert ended.value.code == 0
    return out


def test_a_run_leaves_its_folder(finished: Path) -> None:
    names = {path.name for path in finished.iterdir()}
    assert names == {
        "best.safetensors",
        "last.safetensors",
        "ema-best.safetensors",
        "ema-last.safetensors",
        "config.yaml",
        "environment.json",
        "events",
        "examination.json",
        "gallery",
        "logs",
        "metrics.jsonl",
        "report.html",
        "result.json",
    }
    assert any((finished / "events").iterdir())
    assert [path.name for path in (finished / "logs").iterdir()] == ["worker-0.log"]
    environment = json.loads((finished / "environment.json").read_text())
    assert environment["workers"] == 1
    assert environment["torch"].startswith("2.")
    metrics = json.loads((finished / "metrics.jsonl").read_text())
    assert {"epoch", "lr", "loss", "holdout_ra", "ema_ra", "seconds"} <= metrics.keys()


@pytest.mark.parametrize("weights", ["best", "ema-best"])
def test_evaluate_repeats_the_result(
    finished: Path, weights: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = call(capsys, "evaluate", str(finished), "--weights", weights, "--json")
    assert code == 0
    found, result = json.loads(out), json.loads((finished / "result.json").read_text())
    prefix = "ema_" if weights.startswith("ema") else ""
    assert (found["ta"], found["ra"]) == (result[f"{prefix}ta"], result[f"{prefix}ra"])


def test_evaluate_takes_other_settings(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "evaluate", str(finished), "threat.eps=0", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["ra"] == found["ta"]


def test_compare_as_table_and_json(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, table, _ = call(capsys, "compare", str(finished), str(finished))
    assert code == 0
    header, *rows = table.splitlines()[:3]
    assert " ".join(header.split()) == "Run TA RA EMA TA EMA RA Method M Batch C (s) T (s) MB/it"
    assert rows[0] == rows[1]
    assert rows[0].split()[0] == finished.name and " AT " in rows[0]
    _, text, _ = call(capsys, "compare", str(finished), "--json")
    assert json.loads(text)[0]["method"] == "AT"


def test_recipes_and_config(capsys: pytest.CaptureFixture[str]) -> None:
    _, table, _ = call(capsys, "recipes")
    _, text, _ = call(capsys, "recipes", "--json")
    names = [recipe["recipe"] for recipe in json.loads(text)]
    assert {"digits", "digits-fgsm", "digits-standard"} <= set(names)
    assert all(name in table for name in names)
    _, text, _ = call(capsys, "config", "digits", "attack.steps=7", "--json")
    rows = {row["path"]: row for row in json.loads(text)}
    assert rows["attack.steps"] == {
        "path": "attack.steps",
        "value": "7",
        "help": "ascent steps k",
        "allowed": "whole number, at least 1",
    }
    _, table, _ = call(capsys, "config", "digits")
    assert "attack.steps" in table


def test_settings_may_stand_anywhere(capsys: pytest.CaptureFixture[str]) -> None:
    _, text, _ = call(capsys, "config", "digits", "seed=3", "--json", "attack=fgsm")
    rows = {row["path"]: row["value"] for row in json.loads(text)}
    assert (rows["seed"], rows["attack.name"]) == ("3", "fgsm")


@pytest.mark.parametrize(
    "command",
    [
        *("", "train", "finetune", "evaluate", "sweep", "export", "compare", "recipes", "config"),
        "profile",
    ],
)
def test_help_teaches_by_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, *command.split(), "--help")
    assert code == 0
    assert f"  dat {command}" in out


BAD = {
    "unknown recipe": ("train digit", "unknown recipe 'digit': did you mean digits?"),
    "missing recipe file": ("train mine.yaml", "recipe mine.yaml: no such file"),
    "unknown key": ("train digits atack.steps=5", "unknown setting atack: did you mean attack?"),
    "unknown inner key": (
        "train digits attack.step=5",
        "unknown setting attack.step: did you mean attack.steps or",
    ),
    "wrong type": (
        "train digits attack.steps=many",
        "attack.steps = 'many': must be a whole number",
    ),
    "negative eps": ("train digits threat.eps=-0.1", "threat.eps = -0.1: must be at least 0"),
    "nan": ("train digits threat.eps=nan", "threat.eps = nan: must be at least 0"),
    "unknown component": (
        "train digits optimizer.name=lamp",
        "optimizer.name = 'lamp': unknown: did you mean lamb?",
    ),
    "unknown model": (
        "train digits model.name=cnm",
        "model.name = 'cnm': unknown: did you mean cnn?",
    ),
    "no key=value": ("train digits attack.steps", "settings are given as key=value"),
    "no such data": ("train digits data.name=digit", "data.name = 'digit': unknown: did you mean"),
    "large batch": (
        "train digits train.batch=5000",
        "train.batch = 5000: there are only 1293 training images",
    ),
    "no module": ("train digits model.name=nowhere:net", "nowhere"),
    "no run": ("evaluate runs/none", "runs/none: not the folder of a run"),
    "nothing to evaluate": ("evaluate", "specify one run folder, or --model, --weights and"),
    "only settings to evaluate": ("evaluate threat.eps=0.1", "specify one run folder, or --model"),
    "two runs to evaluate": ("evaluate runs/a runs/b", "specify one run folder, or --model"),
    "run and model": (
        "evaluate runs/a --model nets:net --data digits",
        "runs/a: specify a run or --model, not both",
    ),
    "model without data": ("evaluate --model nets:net", "--model: requires --data"),
    "model that is nowhere": (
        "evaluate --model nowhere:net --data digits",
        "model.name = 'nowhere:net': cannot import nowhere",
    ),
    "model without a module": (
        "evaluate --model net --data digits",
        "model.name = 'net': must be cnn, ",
    ),
    "model on no such data": (
        "evaluate --model cnn --data digit",
        "data.name = 'digit': unknown: did you mean digits?",
    ),
    "model under no such attack": (
        "evaluate --model cnn --data digits --attacks clean,pdg-20",
        "evaluate.attacks: attack 'pdg-20': unknown: did you mean pgd-20?",
    ),
    "model without such weights": (
        "evaluate --model cnn --data digits --weights net.safetensors",
        "net.safetensors: no such weights",
    ),
    "examples without a folder": (
        "evaluate --model cnn --data digits --out none --examples",
        "--examples: requires a folder, not --out none",
    ),
    "no run to sweep": ("sweep runs/none", "runs/none: not the folder of a run"),
    "only settings to sweep": ("sweep seed=1", "specify one or more run folders"),
    "only settings to compare": ("compare seed=1", "seed=1: not the folder of a run"),
    "nccl": ("train digits comm.backend=nccl", "comm.backend = nccl: needs cuda, not cpu"),
    "warmup": ("train digits schedule.warmup=99", "schedule.warmup = 99: must be at most"),
    "no cuda": ("train digits comm.device=cuda", "comm.device = cuda: this machine has no CUDA"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_gets_one_clear_line(
    case: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words, expected = BAD[case]
    code, out, err = call(capsys, *words.split(), *(["--quiet"] if "train" in words else []))
    assert code == 2
    assert out == ""
    assert len(err.splitlines()) == 1
    assert err.startswith("error: ")
    assert expected in err
    assert not any(tmp_path.iterdir())


def test_bad_arrays_are_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    images, labels = np.full((9, 8, 8), 0.5, np.float32), np.arange(9) % 3
    bright, odd = images.copy(), labels.copy()
    bright[4] = 1.2
    odd[5] = -1
    for x, y, expected in (
        (bright, labels, "image 4 has pixels from 1.2 to 1.2: must be in [0, 1]"),
        (images, odd, "label -1 of image 5: must be from 0 to 2"),
    ):
        np.savez("data.npz", x_train=x, y_train=y, x_test=images, y_test=labels)
        code, _, err = call(capsys, "train", "digits", "data.name=data.npz", "--quiet")
        assert code == 2
        assert err.startswith("error: ")
        assert expected in err


def test_a_folder_in_use_is_left_alone(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    for folder, hint in ((finished, "--overwrite"), (tmp_path, "remove it yourself")):
        before = sorted(path.name for path in folder.iterdir())
        code, _, err = call(capsys, "train", "digits", "--out", str(folder))
        assert code == 2
        assert "already exists; choose another --out" in err
        assert hint in err
        assert sorted(path.name for path in folder.iterdir()) == before
    code, _, err = call(capsys, "train", "digits", "--overwrite", "--out", str(tmp_path))
    assert code == 2
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_what_looks_like_markup_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    code, table, _ = call(capsys, "config", "digits", "about=[/oops] [bold]x")
    assert code == 0
    assert "[/oops] [bold]x" in table


def test_a_runs_name_may_have_an_equals_sign(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Names that tell a setting, such as eps=0.1, are what a sweep's folders are called."""
    run = shutil.copytree(finished, tmp_path / "eps=0.1")
    code, out, _ = call(capsys, "compare", str(run), "--json")
    assert code == 0
    assert [result["run"] for result in json.loads(out)] == [str(run)]
    code, out, err = call(capsys, "evaluate", str(run), "--out", "none", "--json")
    assert code == 0, err
    assert json.loads(out)["run"] == str(run)


@pytest.mark.parametrize("text", ["{}", "[]", "half a resul"])
def test_a_broken_result_is_refused(
    text: str, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text((finished / "config.yaml").read_text())
    (tmp_path / "result.json").write_text(text)
    code, _, err = call(capsys, "compare", str(finished), "--json", str(tmp_path))
    assert code == 2
    assert err == f"error: {tmp_path / 'result.json'}: not a result\n"


NETS = """
import torch
from torch import nn

class Few(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 7))
    def forward(self, x):
        return self.net(x)

def deep():
    return nn.Linear(5, 10)

def unused(classes):
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, classes))
    net.register_parameter("spare", nn.Parameter(torch.ones(3)))
    return net

def raising():
    raise KeyError("lost")

class Sick(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()
    @staticmethod
    def backward(context, gradient):
        return gradient * float("nan")

class Sickens(nn.Sequential):
    def forward(self, x):
        return Sick.apply(super().forward(x))

def sick(classes):
    return Sickens(nn.Flatten(), nn.Linear(64, classes))
"""


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        ("Few", 2, "the model gives (2, 7) for 2 images of 10 classes: must be (2, 10)"),
        ("deep", 2, "the model cannot take images of shape (1, 8, 8)"),
        ("unused", 2, "parameter net.spare does not contribute to the loss"),
        ("raising", 2, "failed when called with no arguments: KeyError: 'lost' ("),
        ("sick", 3, "epoch 1, step 1: the gradient of net.1.weight is not finite"),
    ],
)
def test_networks_that_cannot_be_trained(
    name: str,
    code: int,
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "odd_nets.py").write_text(NETS)
    words = (f"model.name=odd_nets:{name}", "attack=none", "train.batch=640", "--quiet")
    found, _, err = call(capsys, "train", "digits", *words)
    assert found == code
    assert message in err
    assert len(err.splitlines()) == 1
    assert not list(tmp_path.glob("runs/*/*.safetensors"))


def test_a_run_knows_where_its_data_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    images, labels = np.zeros((60, 8, 8), np.uint8), np.arange(60) % 10
    np.savez("my.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)
    words = ("data.name=my.npz", *TINY[:-2], "train.batch=24", "--quiet", "--out", "out")
    assert call(capsys, "train", "digits", *words)[0] == 0
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert call(capsys, "evaluate", "../out")[0] == 0


def test_a_folder_without_permission_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write anywhere
    code, _, err = call(capsys, "train", "digits", *TINY)
    assert code == 2
    assert err == (
        f"error: runs/digits: no permission to write to {tmp_path}; choose another --out\n"
    )


def test_an_error_of_the_system_has_no_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    code, _, err = call(capsys, "new", str(tmp_path / "mine"))
    assert code == 2
    assert err == f"error: {tmp_path / 'mine'}: Permission denied\n"


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5"])
def test_wrong_number_of_workers(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = call(capsys, "train", "digits", f"--workers={text}")
    assert code == 2
    assert "must be a positive integer" in err


def test_unknown_option(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = call(capsys, "train", "digits", "--worker-count", "3")
    assert code == 2
    assert "unknown option --worker-count: see dat train --help" in err


def test_report_writes_a_page(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    code, out, _ = call(
        capsys, *("report", str(finished), "--out", str(page), "--images", "30", "--json")
    )
    assert code == 0
    assert json.loads(out) == {"page": str(page), "plots": []}
    assert "30 test images" in page.read_text()
    assert json.loads((finished / "examination.json").read_text())["images"] == 30


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("report", "nowhere"), "nowhere: not the folder of a run"),
        (("report", "RUN", "--out", "no/where.html"), "folder no does not exist"),
        (("report", "RUN", "a=b"), "a=b: not the folder of a run"),
    ],
)
def test_report_refuses(
    words: tuple[str, ...], message: str, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = call(capsys, *(str(finished) if it == "RUN" else it for it in words))
    assert code == 2
    assert message in err
