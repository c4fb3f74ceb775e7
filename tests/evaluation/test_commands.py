"""`dat evaluate` and `dat sweep` as a user meets them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dat.attacks import APGD, Square, suites
from dat.cli import main
from dat.data import class_balanced_subset, load
from tests.cli.test_cli import call
from tests.evaluation.cases import CPU

JsonCommand = Callable[..., Any]
ATTACKS = "clean,fgsm,pgd-2,square-10"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose network withstands some of the attacks."""
    out = tmp_path_factory.mktemp("commands") / "run"
    words = ["model.width=4", "attack.steps=2", "train.epochs=6", "train.batch=96"]
    words += [
        "threat.eps=0.08",
        "evaluate.report=0",
        "evaluate.attacks=pgd-2",
        "comm.threads=1",
        "train.ema=0.5",
    ]
    with pytest.raises(SystemExit) as ended:
        main(["train", "digits", *words, "--quiet", "--json", "--out", str(out)])
    assert ended.value.code == 0
    return out


@pytest.fixture
def run(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, in an empty current folder."""
    monkeypatch.chdir(tmp_path)
    return shutil.copytree(trained, tmp_path / "run")


@pytest.fixture
def run_json(capsys: pytest.CaptureFixture[str]) -> JsonCommand:
    """A command's JSON."""

    def run_command(*words: str) -> Any:
        code, out, err = call(capsys, *words, "--json")
        assert code == 0, err
        return json.loads(out)

    return run_command


@pytest.fixture
def table(capsys: pytest.CaptureFixture[str]) -> Callable[..., list[list[str]]]:
    """A command's tables, line by line, in words."""

    def table(*words: str) -> list[list[str]]:
        code, out, err = call(capsys, *words)
        assert code == 0, err
        return [line.split() for line in out.splitlines() if line]

    return table


@pytest.fixture
def quick_autoattack(monkeypatch: pytest.MonkeyPatch) -> None:
    members = {"apgd-ce": APGD(steps=2), "square": Square(queries=5)}
    monkeypatch.setitem(suites.SUITES, "autoattack", lambda classes: members)


def test_each_attack_has_its_figures(run: Path, run_json: JsonCommand) -> None:
    report = run_json("evaluate", str(run), "--attacks", ATTACKS)
    assert list(report["suites"]) == ATTACKS.split(",")
    assert (report["run"], report["weights"], report["workers"]) == (str(run), "best", 1)
    assert report["images"] == 360
    assert report["attack"] == "fgsm, linf 0.08"
    assert report["ra"] == report["suites"]["fgsm"]["ra"]
    assert report["suites"]["clean"] == {"ra": report["ta"], "fell": {}, "costs": {}}
    assert "aa" not in report
    standing = round(report["ta"] * 3.6)
    for name in ATTACKS.split(",")[1:]:
        suite = report["suites"][name]
        assert suite["ra"] == pytest.approx((standing - suite["fell"][name]) / 3.6)
        assert suite["costs"][name]["seconds"] > 0
    costs = report["suites"]["pgd-2"]["costs"]["pgd-2"]
    assert (costs["forwards"], costs["backwards"]) == (3 * standing, 2 * standing)
    assert 0 < report["suites"]["pgd-2"]["ra"] < report["suites"]["square-10"]["ra"] < report["ta"]
    assert report["warnings"] == []
    assert report["network"] == "frozen copy"


def test_without_attacks_it_is_the_runs_own_evaluation(run: Path, run_json: JsonCommand) -> None:
    result = json.loads((run / "result.json").read_text())
    for weights, prefix in (("best", ""), ("ema-best", "ema_")):
        report = run_json("evaluate", str(run), "--weights", weights)
        assert list(report["suites"]) == ["pgd-2"]
        assert (report["ta"], report["ra"]) == (result[f"{prefix}ta"], result[f"{prefix}ra"])
        assert report["weights"] == weights


def test_autoattack_is_shown_attack_by_attack(
    run: Path, table: Callable[..., list[list[str]]], run_json: JsonCommand, quick_autoattack: None
) -> None:
    words = ("evaluate", str(run), "--attacks", "pgd-2,autoattack")
    report = run_json(*words)
    assert report["aa"] == report["suites"]["autoattack"]["ra"]
    lines = table(*words)
    assert " ".join(lines[0]) == "Run Weights TA (%) pgd-2 (%) autoattack (%)"
    assert lines[1] == [str(run), "best", *(f"{report[key]:.2f}" for key in ("ta", "ra", "aa"))]
    assert lines[2][:3] == ["TA:", "clean", "accuracy;"]
    assert "360 test images, linf 0.08." in " ".join(lines[2])
    headers = "autoattack Broken RA (%) Forward passes Backward passes s"
    assert " ".join(lines[3]) == headers
    assert [line[0] for line in lines[4:7]] == ["clean", "apgd-ce", "square"]
    assert lines[4][1:] == [f"{report['ta']:.2f}"]
    fell = report["suites"]["autoattack"]["fell"]
    assert [line[1] for line in lines[5:7]] == [str(fell["apgd-ce"]), str(fell["square"])]
    assert lines[6][2] == f"{report['aa']:.2f}"


def test_fewer_images_fall_as_among_all(run: Path, run_json: JsonCommand) -> None:
    report = run_json("evaluate", str(run), "--images", "40", "--attacks", "pgd-2")
    assert report["images"] == 40
    (verdicts,) = run.glob("evaluations/pgd-2-*/verdicts.json")
    fell = json.loads(verdicts.read_text())["pgd-2"]
    run_json("evaluate", str(run), "--images", "9999", "--attacks", "pgd-2")
    (other,) = set(run.glob("evaluations/pgd-2-*/verdicts.json")) - {verdicts}
    numbers = class_balanced_subset(load("digits").test, 40).numbers
    assert numbers is not None
    among_all = json.loads(other.read_text())["pgd-2"]
    assert numbers[fell].tolist() == [row for row in among_all if row in numbers.tolist()]


def test_verdicts_are_kept_beside_the_run_or_elsewhere_or_nowhere(
    run: Path, run_json: JsonCommand
) -> None:
    words = ("evaluate", str(run), "--attacks", "clean,pgd-2", "--images", "20")
    run_json(*words, "--out", "none")
    assert not (run / "evaluations").exists()
    assert not Path("none").exists()
    run_json(*words, "--out", "else/where")
    assert not (run / "evaluations").exists()
    assert len(list(Path("else/where").glob("pgd-2-*/verdicts.json"))) == 1
    first = run_json(*words)
    (place,) = (run / "evaluations").iterdir()
    before = {path.name: path.stat().st_mtime_ns for path in place.glob("*.safetensors")}
    again = run_json(*words)
    assert first["suites"] == again["suites"]  # down to the seconds: nothing was done again
    assert {p.name: p.stat().st_mtime_ns for p in place.glob("*.safetensors")} == before


def test_examples_are_kept_on_demand(run: Path, run_json: JsonCommand) -> None:
    words = ("evaluate", str(run), "--attacks", "pgd-2", "--images", "50")
    run_json(*words)
    report = run_json(*words, "--examples")
    folders = {path.parent for path in run.glob("evaluations/*/about.json")}
    kept = {
        folder: [load_file(path) for path in folder.glob("*.safetensors")] for folder in folders
    }
    assert sorted("examples" in part for parts in kept.values() for part in parts) == [False, True]
    (part,) = (part for parts in kept.values() for part in parts if "examples" in part)
    rows = part["rows"][part["fell"].bool()]
    assert len(rows) == len(part["examples"]) == report["suites"]["pgd-2"]["fell"]["pgd-2"]
    x, _ = class_balanced_subset(load("digits").test, 50).batch(rows, CPU)
    assert float((part["examples"] - x).abs().max()) <= 0.08 + 1e-6


def test_runs_and_settings_come_in_any_order(run: Path, run_json: JsonCommand) -> None:
    expected = run_json("evaluate", str(run), "threat.eps=0.02", "seed=3", "--attacks", "fgsm")
    words = ("evaluate", "threat.eps=0.02", "--attacks", "fgsm", str(run), "--quiet", "seed=3")
    report = run_json(*words)
    assert report["ra"] == expected["ra"]
    assert report["attack"] == "fgsm, linf 0.02"
    assert report["ra"] > run_json("evaluate", str(run), "--attacks", "fgsm")["ra"]


def test_the_suite_may_be_a_setting(run: Path, run_json: JsonCommand) -> None:
    report = run_json("evaluate", str(run), "evaluate.attacks=clean", "--out", "none")
    assert list(report["suites"]) == ["clean"]
    assert report["ra"] is None
    assert report["attack"] == "linf 0.08"


NETS = """
import torch
from torch import nn

def net(classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))

class Soft(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.net = net(classes)
    def forward(self, x):
        return self.net(x).softmax(1)

def lost():
    raise KeyError("lost")

def few():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 7))

def tall():
    return nn.Sequential(nn.Flatten(), nn.Linear(65, 10))

def sick(classes):
    made = net(classes)
    nn.init.constant_(made[1].weight, float("nan"))
    return made
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of the user's in the current folder; its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    name = f"nets_{tmp_path.name}"  # a module is imported once and for all
    (tmp_path / f"{name}.py").write_text(NETS)
    return name


def linear(path: Path) -> None:
    """Weights with which `net` reads digits: each class's mean image."""
    train = load("digits").train
    x, y = train.batch(torch.arange(len(train)), CPU)
    means = torch.stack([x[y == label].flatten(1).mean(0) for label in range(10)])
    save_file({"1.weight": 4 * means, "1.bias": -2 * means.square().sum(1)}, path)


def test_anybodys_model_is_measured(own: str, run_json: JsonCommand, tmp_path: Path) -> None:
    linear(tmp_path / "net.safetensors")
    model = ("--model", f"{own}:net", "--data", "digits")
    words = ("evaluate", *model, "--weights", "net.safetensors", "--attacks", "pgd-3")
    report = run_json(*words, "threat.eps=0.05")
    assert report["run"] == "net"
    assert report["weights"] == "net"
    assert report["ta"] > 80
    assert 0 < report["ra"] < report["ta"]
    assert report["attack"] == "pgd-3, linf 0.05"
    assert len(list(tmp_path.glob("evaluations/net/pgd-3-*/verdicts.json"))) == 1
    unlearned = run_json("evaluate", *model, "--attacks", "clean")
    assert unlearned["weights"] == "as made"
    assert unlearned["ta"] < 40


def test_networks_of_ours_are_measured_alike(
    run_json: JsonCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("--model", "cnn", "--data", "digits", "--attacks", "clean", "model.width=2")
    assert run_json("evaluate", *words)["run"] == "cnn"


def test_doubts_go_to_standard_error(
    own: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ("evaluate", "--model", f"{own}:Soft", "--data", "digits", "--attacks", "pgd-1")
    code, out, err = call(capsys, *words, "--out", "none", "--json")
    assert code == 0
    report = json.loads(out)
    assert err.splitlines() == [f"warning: {text}" for text in report["warnings"]]
    assert any("outputs are probabilities, not logits" in text for text in report["warnings"])
    code, out, err = call(capsys, *words, "--out", "none", "--json", "--no-checks")
    assert code == 0
    assert err == ""
    assert json.loads(out)["warnings"] == []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nets", "has no function or class 'nets': did you mean net?"),
        ("lost", "failed when called with no arguments: KeyError: 'lost' ("),
        ("few", "the model gives 7 logits per image, but labels go up to 9"),
        ("tall", "the model cannot take images of shape (1, 8, 8) (mat1 and mat2 shapes cannot"),
        ("sick", "the model's logits are not finite for 64 of 64 clean images"),
    ],
)
def test_models_that_cannot_be_measured(
    own: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str, message: str
) -> None:
    words = ("evaluate", "--model", f"{own}:{name}", "--data", "digits", "--attacks", "pgd-1")
    code, out, err = call(capsys, *words)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 1
    assert message in err
    assert not (tmp_path / "evaluations").exists()


BAD = {
    "attack": ("evaluate RUN --attacks pgd20", "evaluate.attacks: attack 'pgd20': unknown: did"),
    "no steps": ("evaluate RUN --attacks pgd-0", "attack 'pgd-0': steps and restarts must be at"),
    "weights": ("evaluate RUN --weights bets", "bets: no such weights"),
    "weights of another": (
        "evaluate RUN --weights other.safetensors",
        "other.safetensors: does not fit the model (",
    ),
    "weights in pieces": (
        "evaluate RUN --weights broken.safetensors",
        "broken.safetensors: not a valid safetensors file (",
    ),
    "run and model": (
        "evaluate RUN --model cnn --data digits",
        ": specify a run or --model, not both",
    ),
    "setting": (
        "evaluate RUN threat.esp=1",
        "unknown setting threat.esp: did you mean threat.eps?",
    ),
    "examples nowhere": (
        "evaluate RUN --examples --out none",
        "--examples: requires a folder",
    ),
    "folder in a file": ("evaluate RUN --out other.safetensors", "other.safetensors"),
    "sweep without steps": (
        "sweep RUN --attack pgd",
        "--attack pgd: must be an attack with its steps, e.g.",
    ),
    "sweep of nothing": (
        "sweep RUN --attack pgd-0",
        "--attack pgd-0: must be an attack with its steps",
    ),
    "sweep of restarts": (
        "sweep RUN --attack pgd-20x5",
        "--attack pgd-20x5: must be an attack with its",
    ),
    "sweep of a suite": ("sweep RUN --attack autoattack-20", "did you mean autoattack?"),
    "sweep of a single step": ("sweep RUN --attack fgsm-20", "did you mean fgsm?"),
    "sweep of a typo": (
        "sweep RUN --attack pdg-20",
        "attack 'pdg-20': unknown: did you mean pgd-20?",
    ),
    "sweep of no number": (
        "sweep RUN --eps 0.1,lots",
        "--eps = 'lots': must be a number, at least 0",
    ),
    "sweep below 0": ("sweep RUN --eps 0.1,-0.1", "--eps = -0.1: must be at least 0"),
    "sweep by 0": ("sweep RUN --eps 1/0", "--eps = '1/0': must be a number, at least 0"),
    "no such picture": (
        "sweep RUN --plot it.txt",
        "it.txt: a plot is written to a file that ends in",
    ),
    "no such place": ("sweep RUN --plot no/it.png", "no/it.png: folder no does not exist"),
    "sweep of a file": ("sweep RUN RUN/config.yaml", "config.yaml: not the folder of a run"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_gets_one_clear_line(
    run: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    save_file({"weight": torch.ones(2)}, "other.safetensors")
    Path("broken.safetensors").write_bytes(b"half")
    words, expected = BAD[case]
    code, out, err = call(capsys, *words.replace("RUN", str(run)).split())
    assert code == 2
    assert out == ""
    assert len(err.splitlines()) == 1
    assert err.startswith("error: ")
    assert expected in err
    assert not (run / "evaluations").exists()


@pytest.mark.parametrize(
    "words", ["evaluate RUN --images 0", "sweep RUN --steps 0", "sweep RUN --steps 5,many", "sweep"]
)
def test_bad_numbers_are_shown_the_usage(
    run: Path, capsys: pytest.CaptureFixture[str], words: str
) -> None:
    code, out, err = call(capsys, *words.replace("RUN", str(run)).split())
    assert (code, out) == (2, "")
    assert err.startswith("usage: dat ")
    assert "Traceback" not in err


def test_a_sweep_as_tables_and_as_json(
    run: Path, table: Callable[..., list[list[str]]], run_json: JsonCommand
) -> None:
    words = ("sweep", str(run), "--eps", "0,4/255,0.08", "--steps", "1,2", "--attack", "pgd-2")
    report = run_json(*words)
    eps, steps = report["curves"]
    assert (report["attack"], report["warnings"]) == ("pgd-2", [])
    assert (eps["run"], eps["over"], eps["values"]) == (str(run), "eps", [0, 4 / 255, 0.08])
    assert (steps["over"], steps["values"]) == ("steps", [1, 2])
    result = json.loads((run / "result.json").read_text())
    assert eps["ra"][0] == result["ta"]
    assert eps["ra"][2] == steps["ra"][1] == result["ra"]
    assert eps["ra"] == sorted(eps["ra"], reverse=True)
    lines = table(*words)
    assert lines[0] == ["eps", str(run), "(%)"]
    assert [line[0] for line in lines[1:4]] == ["0", "4/255", "0.08"]
    assert [line[1] for line in lines[1:4]] == [f"{ra:.2f}" for ra in eps["ra"]]
    assert " ".join(lines[4]) == "RA: robust accuracy (pgd-2, over eps)."
    assert lines[5] == ["steps", str(run), "(%)"]
    assert [line[0] for line in lines[6:8]] == ["1", "2"]
    assert not (run / "evaluations").exists()


def test_a_sweep_over_one_thing_alone(run: Path, run_json: JsonCommand) -> None:
    (curve,) = run_json("sweep", str(run), "--steps", "1", "--images", "30")["curves"]
    assert (curve["over"], curve["values"]) == ("steps", [1])
    words = ("sweep", "evaluate.batch=7", str(run), "--eps", "0.1", "--images", "30", "seed=0")
    (curve,) = run_json(*words)["curves"]
    assert (curve["over"], curve["values"]) == ("eps", [0.1])
    standing = 30 * curve["ra"][0] / 100
    assert standing == pytest.approx(round(standing))
    assert 0 < standing < 30


def test_a_sweep_by_itself_goes_up_to_twice_the_runs_eps(run: Path, run_json: JsonCommand) -> None:
    eps, steps = run_json("sweep", str(run), "--attack", "pgd-1", "--images", "10")["curves"]
    assert eps["values"] == pytest.approx([0.02 * number for number in range(9)])
    assert steps["values"] == [1, 2, 5, 10, 20, 50, 100]


def test_runs_are_swept_side_by_side_and_drawn(
    run: Path, table: Callable[..., list[list[str]]], run_json: JsonCommand
) -> None:
    other = shutil.copytree(run, run.with_name("other"))
    shutil.copy(run / "ema-best.safetensors", other / "best.safetensors")
    words = (str(run), str(other), "--eps", "0,0.08", "--attack", "pgd-2", "--images", "60")
    report = run_json("sweep", *words)
    assert [curve["run"] for curve in report["curves"]] == [str(run), str(other)]
    (alone,) = run_json("sweep", str(run), "--weights", "ema-best", *words[2:])["curves"]
    assert report["curves"][1]["ra"] == alone["ra"]
    for suffix, magic in ((".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")):
        picture = Path(f"it{suffix}")
        lines = table("sweep", *words, "--plot", str(picture))
        assert picture.read_bytes().startswith(magic)
    assert lines[0] == ["eps", str(run), "(%)", str(other), "(%)"]


def test_names_in_a_sweeps_table_are_no_markup(
    run: Path, table: Callable[..., list[list[str]]]
) -> None:
    other = shutil.copytree(run, run.with_name("[bold]"))
    (run.with_name("[")).mkdir()
    odd = shutil.copytree(run, run.with_name("[") / "oops]")
    words = ("--steps", "1", "--images", "10")
    lines = table("sweep", str(other), "[/oops]", *words)
    assert odd.is_dir()
    assert lines[0] == ["steps", str(other), "(%)", "[/oops]", "(%)"]


def test_doubts_about_a_curve_go_to_standard_error(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dat.jobs.sweep.check_curve", lambda over, values, ra: [f"odd over {over}"])
    words = ("sweep", str(run), "--eps", "0.05", "--steps", "1", "--images", "10")
    code, out, err = call(capsys, *words, "--json")
    assert code == 0
    warnings = json.loads(out)["warnings"]
    assert warnings == [f"{run}: odd over eps", f"{run}: odd over steps"]
    assert err.splitlines() == [f"warning: {text}" for text in warnings]
