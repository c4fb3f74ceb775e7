"""No command imports code that a run's folder names, unless the user consents."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import dat
from dat.cli import main
from dat.config.build import make_model
from dat.config.model_spec import ModelSpec
from dat.config.recipes import read
from dat.config.runs import read_run
from dat.config.schema import RunConfig
from dat.config.trust import UntrustedCode, code_arguments, is_of_run, named_code, repeated_code
from dat.core.imports import is_import_path
from dat.data import load
from dat.export import export_run
from dat.jobs.clusters import Queue, script
from dat.jobs.clusters.job import ClusterJob
from dat.jobs.launch import dat_command
from dat.train import save_weights

EVIL = """
from pathlib import Path
from torch import nn
Path("imported").touch()

class Net(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.linear = nn.Linear(64, classes)
    def forward(self, x):
        return self.linear(x.flatten(1))

def digits():
    from dat.data import load
    return load("digits")
"""
MODEL, DATA = "model.name=evil:Net", "data.name=evil:digits"
TINY: dict[str, Any] = {
    "attack": {"name": "pgd", "steps": 1},
    "train": {"epochs": 1, "batch": 128, "log": []},
    "evaluate": {"attacks": ["pgd-1"], "report": 4, "images": 4},
    "data": {"name": "digits", "labels": 200, "unlabelled": "rest"},
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the module that must not be imported, and with foreign runs that name it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    Path("evil.py").write_text(EVIL)
    make_run("theirs", {"model": {"name": "evil:Net"}})
    make_run("fed", {"data": {"name": "evil:digits"}, "model": {"name": "cnn", "width": 4}})
    forget()
    yield tmp_path
    forget()


def forget() -> None:
    Path("imported").unlink(missing_ok=True)
    sys.modules.pop("evil", None)


def make_run(name: str, values: dict[str, Any]) -> None:
    """A run's config and weights, without training."""
    values = {**TINY, **values, "data": TINY["data"] | values.get("data", {})}
    config = RunConfig.read(values)
    Path(name).mkdir()
    (Path(name) / "config.yaml").write_text(yaml.safe_dump({"recipe": "mine"} | config.dump()))
    save_weights(make_model(config, load("digits")), Path(name) / "best.safetensors")


def call(capsys: pytest.CaptureFixture[str], words: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert isinstance(ended.value.code, int)
    return ended.value.code, capsys.readouterr().err


def imported() -> bool:
    return Path("imported").exists()


COMMANDS = {
    "evaluate": "evaluate RUN --out none --no-checks --quiet",
    "evaluate, several workers": "evaluate RUN --workers 2",
    "verify": "verify RUN/config.yaml --model RUN",
    "certify": "certify RUN --sigma 0.1 --n 20 --n0 4 --out none --quiet",
    "sweep": "sweep RUN --eps 0 --quiet",
    "export": "export RUN --out exported",
    "label": "label RUN --quiet",
    "bench evaluate": "bench evaluate RUN --images 4 --batch 4 --repeats 1 --attack pgd-1",
    "report": "report RUN --images 4 --quiet",
    "finetune": "finetune RUN digits train.epochs=1 attack.steps=1 train.batch=640 --quiet",
    "resume": "train --resume RUN --quiet",
    "train": "train RUN/config.yaml --quiet --out again",
    "selftrain": "selftrain RUN/config.yaml --quiet --out again",
    "profile": "profile RUN/config.yaml --steps 1 data.unlabelled=none",
    "plan": "plan RUN/config.yaml",
    "launch": "launch slurm RUN/config.yaml --nodes 2",
}
"""Every command that builds something from a run's folder."""
FINISHED = ("evaluate", "certify", "sweep", "export", "label", "report", "finetune", "profile")
"""Commands that the tests run to the end; the others are slow, or need a checkpoint."""


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(("run", "word"), [("theirs", MODEL), ("fed", DATA)])
def test_code_of_a_runs_folder_is_refused(
    command: str, run: str, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, err = call(capsys, COMMANDS[command].replace("RUN", run))
    assert code == 2
    (line,) = err.splitlines()
    name, value = word.split("=")
    code_of = f"the run's config imports code: {name} = '{value}'. "
    assert line.startswith((f"error: {run}: {code_of}", f"error: {run}/config.yaml: {code_of}"))
    assert "--trust" in line
    assert f"add {word} to the command" in line or "Set finetune.size" in line
    assert not imported()


@pytest.mark.parametrize("command", FINISHED)
@pytest.mark.parametrize("how", ["--trust", MODEL])
def test_code_that_the_user_names_or_trusts_is_imported(
    command: str, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, err = call(capsys, f"{COMMANDS[command].replace('RUN', 'theirs')} {how}")
    assert (code, imported()) == (0, True), err


@pytest.mark.parametrize("how", ["--trust", DATA, "--data evil:digits"])
def test_so_is_code_that_loads_the_data(how: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, err = call(capsys, f"{COMMANDS['evaluate'].replace('RUN', 'fed')} {how}")
    assert (code, imported()) == (0, True), err


@pytest.mark.parametrize("command", ["resume", "train", "plan", "launch", "bench evaluate"])
@pytest.mark.parametrize("how", ["--trust", MODEL])
def test_other_commands_start_their_work(
    command: str, how: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Reached(Exception):
        """The work has started, with the code of the run."""

    def work(config: Any, *arguments: object, **options: object) -> None:
        assert getattr(config, "config", config).model.name == "evil:Net"
        raise Reached

    monkeypatch.setattr("dat.jobs.train.train", work)
    monkeypatch.setattr("dat.tools.planning.job.plan", work)
    monkeypatch.setattr("dat.jobs.evaluate.ModelSpec.make", work)
    code, err = call(capsys, f"{COMMANDS[command].replace('RUN', 'theirs')} {how}")
    assert code == (0 if command == "launch" else 1)
    assert command == "launch" or "Reached" in err


@pytest.mark.parametrize("word", ["model.name=evil:Other", "data.name=evil:Net", "model.name=cnn"])
def test_naming_other_code_is_not_consent(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("resume", "export", "finetune", "report"):
        code, err = call(capsys, f"{COMMANDS[command].replace('RUN', 'theirs')} {word}")
        assert (code, len(err.splitlines()), imported()) == (2, 1, False), command


def test_replacing_the_network_by_a_built_in_one_needs_no_trust() -> None:
    assert read_run(Path("theirs"), {"model": {"name": "cnn"}})[1].model.name == "cnn"


def test_the_error_lists_all_names(capsys: pytest.CaptureFixture[str]) -> None:
    make_run("both", {"model": {"name": "evil:Net"}, "data": {"unlabelled": "evil:digits"}})
    forget()
    code, err = call(capsys, "evaluate both")
    assert code == 2 and not imported()
    assert err == (
        "error: both: the run's config imports code: data.unlabelled = 'evil:digits' and "
        "model.name = 'evil:Net'. If you trust it, add data.unlabelled=evil:digits "
        "model.name=evil:Net to the command, or pass --trust\n"
    )
    code, err = call(capsys, f"label both {MODEL} --unlabelled rest --quiet")
    assert (code, imported()) == (0, True), err  # the option replaces the setting


def test_commands_that_only_show_a_run_need_no_trust(capsys: pytest.CaptureFixture[str]) -> None:
    result = {"method": "AT", "attack": "pgd-1", "ta": 1.0, "ra": 1.0, "images": 4, "workers": 1}
    Path("theirs/result.json").write_text(json.dumps(result | {"batch": 64, "warnings": []}))
    for command in ("compare theirs --json", "config theirs/config.yaml"):
        assert call(capsys, command)[0] == 0
    code, err = call(capsys, "report theirs --quiet")
    assert code == 0 and Path("theirs/report.html").is_file()
    assert err.startswith(
        "warning: theirs: the run's config imports code: model.name = 'evil:Net'."
    )
    assert err.endswith("; the report omits the error analysis\n") and err.count("\n") == 1
    assert not imported()


def test_fine_tuning_does_not_load_data_that_it_does_not_need(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = COMMANDS["finetune"].replace("RUN", "fed")
    code, err = call(capsys, f"{command} finetune.size=8")
    assert (code, imported()) == (0, False), err


@pytest.mark.parametrize("model", ["{name: 'evil:Net'}", "'evil:Net'"])
def test_naming_code_in_the_users_recipe_is_consent_to_fine_tuning(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("mine.yaml").write_text(f"{{base: digits, model: {model}}}")
    command = COMMANDS["finetune"].replace("RUN digits", "theirs RECIPE")
    code, err = call(capsys, command.replace("RECIPE", "mine.yaml"))
    assert (code, imported()) == (0, True), err
    forget()
    Path("next.yaml").write_text("base: theirs/config.yaml")
    for recipe in ("next.yaml", "theirs/config.yaml"):
        code, err = call(capsys, command.replace("RECIPE", recipe))
        assert (code, imported()) == (2, False), err


def test_recipes_may_name_code_but_not_through_a_run() -> None:
    Path("mine.yaml").write_text("model: {name: 'evil:Net'}")
    assert read("mine.yaml").model.name == "evil:Net"
    assert not imported()
    Path("next.yaml").write_text("base: theirs/config.yaml")
    with pytest.raises(UntrustedCode, match=r"^theirs/config.yaml: the run's config imports code"):
        read("next.yaml")
    assert read("next.yaml", {"model": {"name": "evil:Net"}}).model.name == "evil:Net"
    assert read("next.yaml", trust=True).model.name == "evil:Net"
    Path("next.yaml").write_text("{base: theirs/config.yaml, model: 'evil:Net'}")
    assert read("next.yaml").model.name == "evil:Net"


def test_the_base_of_a_runs_config_is_not_the_users_recipe() -> None:
    Path("theirs/deep").mkdir()
    Path("theirs/deep/base.yaml").write_text("model: {name: 'evil:Net'}")
    Path("theirs/config.yaml").write_text("base: deep/base.yaml")
    with pytest.raises(UntrustedCode):
        read("theirs/config.yaml")
    Path("link.yaml").symlink_to("theirs/config.yaml")
    assert is_of_run(Path("link.yaml")) and is_of_run(Path("theirs/deep/base.yaml"))


CODE = "model: {name: 'evil:Net'}"


@pytest.mark.parametrize(
    ("files", "recipe"),
    [
        ({"a/config.yaml": "recipe: digits", "a/b/c/r.yaml": CODE}, "a/b/c/r.yaml"),
        ({"a/config.yaml": CODE, "a/model.safetensors": ""}, "a/config.yaml"),
        ({"a/config.yaml": "seed: 1", "a/best.safetensors": "", "a/b/r.yml": CODE}, "a/b/r.yml"),
        ({"copied.yaml": "{recipe: digits, model: {name: 'evil:Net'}}"}, "copied.yaml"),
        ({"config.yaml": "'recipe': digits", "a/r.yaml": CODE}, "a/../a/r.yaml"),
    ],
)
def test_files_in_a_run_are_not_the_users_recipes(files: dict[str, str], recipe: str) -> None:
    write(files)
    with pytest.raises(UntrustedCode):
        read(recipe)
    Path("link.yaml").symlink_to(recipe)
    with pytest.raises(UntrustedCode):
        read("link.yaml")
    assert read(recipe, {"model": {"name": "evil:Net"}}) == read(recipe, trust=True)
    assert not imported()


@pytest.mark.parametrize(
    ("files", "recipe"),
    [
        ({"a/config.yaml": CODE, "a/checkpoints/1": "", "a/metrics.jsonl": ""}, "a/config.yaml"),
        ({"a/config.yaml": "x: recipe", "a/r.yaml": CODE}, "a/r.yaml"),
        ({"a/config.yaml": "- recipe", "a/r.yaml": CODE}, "a/r.yaml"),
        ({"a/config.yaml": "a: !secret b", "a/r.yaml": CODE}, "a/r.yaml"),
        ({"a/config.yaml": "[" * 9999, "a/r.yaml": CODE}, "a/r.yaml"),
        ({"a/net.safetensors": "", "a/r.yaml": CODE}, "a/r.yaml"),
    ],
)
def test_a_users_project_is_not_a_run(files: dict[str, str], recipe: str) -> None:
    write(files)
    assert read(recipe).model.name == "evil:Net"


def write(files: dict[str, str]) -> None:
    for name, text in files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)


@pytest.mark.parametrize("text", ["- a", "", "a", "a: [", "a: 2020-99-99", "[" * 2000, "{1: 2}"])
def test_an_invalid_config_gives_a_one_line_error(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("theirs/config.yaml").write_text(text)
    code, err = call(capsys, "evaluate theirs")
    assert (code, err.count("\n")) == (2, 1), err


def test_python_functions_need_edits_or_trust() -> None:
    named = {"model": {"name": "evil:Net"}}
    for refused in (
        lambda: read_run(Path("theirs")),
        lambda: ModelSpec.of_run(Path("theirs")),
        lambda: export_run("theirs", out="exported"),
    ):
        with pytest.raises(UntrustedCode):
            refused()
    assert not imported()
    assert ModelSpec.of_run(Path("theirs"), edits=named).config == (
        ModelSpec.of_run(Path("theirs"), trust=True).config
    )
    export_run("theirs", out="exported", edits=named)
    forget()
    with pytest.raises(ValueError, match="custom code"):
        dat.load("exported")
    assert not imported()


class Started(Exception):
    """Raised instead of starting a process: its command line and environment."""


def _start_nothing(*arguments: Any, **options: Any) -> None:
    lists = (argument for argument in arguments if isinstance(argument, list))
    command = next(words for words in lists if sys.executable in words)
    raise Started(command, options.get("env") or {})


def _bench_comm() -> None:
    from dat.tools.bench.comm import CommPlan, bench_comm

    bench_comm(CommPlan(values=8), 2, [], ["bench", "comm"])


def _calibrate() -> None:
    from dat.tools.planning.calibration import calibrate

    calibrate()


def _reproduce() -> None:
    from dat.tools.reproduce.runs import start

    start(["train", "digits"], sys.stderr)


def _launch() -> None:
    from dat.jobs.launch import launch

    launch(2, ["train", "digits"])


@pytest.mark.parametrize("start", [_bench_comm, _calibrate, _reproduce, _launch])
def test_child_processes_do_not_have_the_current_folder_on_their_path(
    start: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def elastic_launch(config: object, program: str) -> Callable[..., None]:
        return lambda *words: _start_nothing([program, *words])

    monkeypatch.setattr("dat.tools.bench.comm.run_workers", _start_nothing)
    monkeypatch.setattr("dat.tools.planning.calibration.run_workers", _start_nothing)
    monkeypatch.setattr("dat.tools.planning.calibration.shutil.which", lambda name: None)
    monkeypatch.setattr("dat.tools.reproduce.runs.subprocess.run", _start_nothing)
    monkeypatch.setattr("torch.distributed.launcher.api.elastic_launch", elastic_launch)
    with pytest.raises(Started) as started:
        start()
    assert started.value.args[0][:4] == [sys.executable, "-P", "-m", "dat"]


def test_neither_do_the_agents_of_a_test_bed_and_their_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from dat.tools.bench.nodes import Node
    from dat.tools.bench.workers import LOCAL

    monkeypatch.setattr("dat.tools.bench.nodes.subprocess.Popen", _start_nothing)
    words = ["torchrun", "--rdzv-conf", "is_host=1", "-m", "dat", "train", "digits"]
    with pytest.raises(Started) as started:
        Node(LOCAL, words, cwd=Path(), log=Path("log"))
    assert started.value.args[1]["PYTHONSAFEPATH"] == "1"


def test_one_function_makes_the_command_of_all_child_processes() -> None:
    source = Path(dat.__file__).parent
    commands = {
        str(path.relative_to(source))
        for path in source.rglob("*.py")
        if re.search(r'sys.executable, ("-P", )?"-m", "dat"', path.read_text())
    }
    assert commands == {"jobs/launch.py"}


def test_a_module_in_the_current_folder_shadows_no_other() -> None:
    Path("yaml.py").write_text("open('imported', 'w')")
    done = subprocess.run(dat_command("recipes"), capture_output=True, text=True, check=False)
    assert (done.returncode, imported()) == (0, False), done.stderr


@pytest.mark.slow
def test_workers_do_not_import_from_the_current_folder(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run("here", {"model": {"name": "cnn", "width": 4}})
    monkeypatch.chdir("here")
    Path("yaml.py").write_text("open('imported', 'w')")
    with pytest.raises(SystemExit) as ended:
        main(["evaluate", ".", "--out", "none", "--no-checks", "--quiet", "--workers", "2"])
    assert (ended.value.code, imported()) == (0, False), capfd.readouterr().err


def test_self_training_repeats_the_names_for_its_own_runs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("mine.yaml").write_text(yaml.safe_dump(TINY | {"model": {"name": "evil:Net"}}))
    code, err = call(capsys, "selftrain mine.yaml --quiet --out both")
    assert (code, imported()) == (0, True), err
    assert f"dat label both/base --unlabelled rest --out both/pseudo.npz {MODEL}\n" in err


def test_a_requeued_job_repeats_the_names_for_its_user(capsys: pytest.CaptureFixture[str]) -> None:
    text = script(ClusterJob(code=(MODEL,)), Queue())
    assert f'train=(train --resume "$run" {MODEL})' in text
    Path("mine.yaml").write_text("model: {name: 'evil:Net'}")
    with pytest.raises(SystemExit):
        main(["launch", "slurm", "mine.yaml", "--nodes", "2"])
    text = capsys.readouterr().out
    assert f'--resume "$run" {MODEL})' in text and "train=(train mine.yaml --out" in text


def test_the_names_that_are_code() -> None:
    config = RunConfig.read(
        {"model": {"name": "a.b:c"}, "data": {"name": "c:/x.npz", "unlabelled": "d:e"}}
    )
    assert named_code(config) == {"model.name": "a.b:c", "data.unlabelled": "d:e"}
    assert code_arguments(config) == ["data.unlabelled=d:e", "model.name=a.b:c"]
    assert repeated_code(config, ["model.name=a.b:c", "model.name=a.b:d", "seed=1"]) == [
        "model.name=a.b:c"
    ]
    names = ("a:b", "a.b:c", "a", ":b", "a:", "a/b:c", "a:b:c")
    assert [is_import_path(name) for name in names] == [True, True, *[False] * 5]


def test_every_setting_that_is_imported_is_checked() -> None:
    """Every call of import_callable belongs to a setting that is declared to name code."""
    source = Path(dat.__file__).parent
    calls = [
        match[1]
        for path in source.rglob("*.py")
        for match in re.finditer(r'import_callable\([^)]*what="([\w.]+)"', path.read_text())
    ]
    config = RunConfig.read({"model": {"name": "a:b"}, "data": {"name": "c:d"}})
    assert sorted(calls) == sorted(named_code(config)) == ["data.name", "model.name"]


def test_studies_name_no_code() -> None:
    """Therefore `dat reproduce` evaluates and resumes its runs without asking for consent."""
    from dat.tools.reproduce import names, read_study

    studies = [read_study(name, scale) for scale in ("desk", "paper") for name in names(scale)]
    rows = [row for study in studies for row in study.rows]
    assert len(rows) > 10
    assert not any(named_code(RunConfig.read(row.settings)) for row in rows)
