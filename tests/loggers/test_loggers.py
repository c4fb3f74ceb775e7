"""Where figures go: TensorBoard as ever, Weights & Biases and MLflow with the real packages."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import dat
from dat.cli import main
from dat.loggers import LOGGERS, Logger, make_loggers
from dat.loggers.base import Run
from dat.train import Logged
from tests.test_cli import TINY

CONFIG = {"seed": 3, "attack": {"name": "pgd", "steps": 5}}
RESULT = {"method": "AT", "ta": 90.0, "ra": 50, "warnings": ["careful"], "aa": None}


def installed(name: str) -> pytest.MarkDecorator:
    there = importlib.util.find_spec(LOGGERS[name].package)
    reason = f"needs pip install 'dat[{name}]'"
    return pytest.mark.skipif(there is None or there.origin is None, reason=reason)


class Diary(Logger):
    """Writes everything down, and fails when it is told to."""

    package = "torch"

    def __init__(self, fails_at: str = "") -> None:
        self.lines: list[Any] = []
        self.fails_at = fails_at

    def _note(self, what: str, *details: object) -> None:
        if what == self.fails_at:
            raise ConnectionError("the server\nis gone")
        self.lines.append((what, *details))

    def begin(self, run: Run) -> None:
        self._note("begin", run.name, run.config, run.updates)

    def log(self, values: Mapping[str, float], step: int, *, by: str = "epoch") -> None:
        self._note(by, step, sorted(values))

    def end(self, result: Mapping[str, Any] | None) -> None:
        self._note("end", result)


def trained(folder: Path, *loggers: Logger, **options: Any) -> Logged:
    """Two epochs of two steps."""
    logged = Logged(folder, loggers, CONFIG, **options)
    images = torch.rand(16, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    trainer = dat.Trainer(
        model=torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 2)),
        data=dat.ImageData.of(images, torch.arange(16) % 2),
        attack=dat.FGSM(),
        epochs=2,
        batch=8,
        listeners=[logged],
    )
    try:
        trainer.fit()
    finally:
        torch.distributed.destroy_process_group()
    return logged


def test_loggers_hear_of_every_step_and_epoch(tmp_path: Path) -> None:
    diary = Diary()
    trained(tmp_path / "mine", diary)
    begin, *lines, end = diary.lines
    assert begin == ("begin", "mine", CONFIG, 0)
    assert end == ("end", None)
    assert [line[:2] for line in lines] == [
        *(("step", 1), ("step", 2), ("epoch", 1)),
        *(("step", 3), ("step", 4), ("epoch", 2)),
    ]
    assert set(lines[0][2]) == {f"step/{it}" for it in ("sent", "busy", "exposed", "between")}
    assert {"epoch", "loss", "lr", "trust_ratio/1.weight"} <= set(lines[2][2])


def test_a_result_that_follows_is_waited_for(tmp_path: Path) -> None:
    diary = Diary()
    logged = trained(tmp_path, diary, result_follows=True)
    assert diary.lines[-1][0] == "epoch"
    logged.close(RESULT)
    logged.close()
    assert diary.lines[-1] == ("end", RESULT)


def test_a_logger_that_cannot_begin_stops_the_run(tmp_path: Path) -> None:
    first = Diary()
    with pytest.raises(ValueError, match=r"train\.log: Diary: the server is gone"):
        trained(tmp_path, first, Diary(fails_at="begin"))
    assert [line[0] for line in first.lines] == ["begin", "end"]


@pytest.mark.parametrize("when", ["step", "epoch", "end"])
def test_a_logger_that_fails_later_is_dropped_with_a_word(
    when: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    diary = Diary()
    trained(tmp_path, Diary(fails_at=when), diary)
    assert capsys.readouterr().err == "no more figures for Diary: the server is gone\n"
    assert diary.lines[-1] == ("end", None)


def test_tensorboard_shows_the_figures(tmp_path: Path) -> None:
    trained(tmp_path, *make_loggers(["tensorboard"]))
    events = EventAccumulator(str(tmp_path / "events")).Reload()
    assert [it.step for it in events.Scalars("loss")] == [1, 2]
    assert [it.step for it in events.Scalars("step/sent")] == [1, 2, 3, 4]
    assert "trust_ratio/1.weight" in events.Tags()["scalars"]


def test_names_and_packages_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert make_loggers([]) == []
    assert len(make_loggers(["tensorboard", "tensorboard"])) == 1
    with pytest.raises(ValueError, match=r"train\.log = wandbe: must be one of tensorboard"):
        make_loggers(["wandbe"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for name in ("wandb", "mlflow"):
        message = rf"train\.log = {name}: needs {name}: pip install 'dat\[{name}\]'"
        with pytest.raises(ValueError, match=message):
            make_loggers([name])


def test_a_folder_called_wandb_is_no_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "some_tool").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(LOGGERS["wandb"], "package", "some_tool")
    with pytest.raises(ValueError, match="needs some_tool"):
        make_loggers(["wandb"])


def test_ids_are_kept_beside_each_other(tmp_path: Path) -> None:
    run = Run(folder=tmp_path, config=CONFIG)
    assert run.kept("wandb") is None
    run.keep("wandb", "a1")
    run.keep("mlflow", "b2")
    assert (run.kept("wandb"), run.kept("mlflow"), run.kept("other")) == ("a1", "b2", None)
    (tmp_path / "loggers.json").write_text("[half")
    assert run.kept("wandb") is None
    assert run.settings() == {"seed": 3, "attack.name": "pgd", "attack.steps": 5}


def test_the_setting_takes_several_or_none() -> None:
    assert dat.RunConfig.read({"train": {"log": "tensorboard,mlflow"}}).train.log == (
        "tensorboard",
        "mlflow",
    )
    assert dat.RunConfig.read({"train": {"log": "none"}}).train.log == ()
    with pytest.raises(ValueError, match=r"train\.log = wand: must be one of tensorboard, wandb"):
        dat.RunConfig.read({"train": {"log": "wand"}})


@installed("wandb")
def test_wandb_keeps_the_figures_and_the_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    folder = tmp_path / "mine"
    folder.mkdir()
    logged = trained(folder, *make_loggers(["wandb"]), result_follows=True)
    theirs = logged.loggers[0]._run  # type: ignore[attr-defined]
    assert (theirs.project, theirs.name) == ("dat", "mine")
    assert dict(theirs.config) == CONFIG
    summary = dict(theirs.summary)
    assert (summary["epoch"], summary["step"]) == (2, 4)
    assert {"loss", "step/sent", "trust_ratio/1.weight"} <= summary.keys()
    logged.close(RESULT)
    (file,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    kept = json.loads((folder / "loggers.json").read_text())["wandb"]
    assert file.name == f"run-{kept}.wandb"
    trained(folder, *make_loggers(["wandb"]))
    assert {path.name for path in folder.glob("wandb/offline-run-*/*.wandb")} == {file.name}


@installed("mlflow")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # it warns of its own database
def test_mlflow_keeps_the_figures_and_goes_on_with_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    folder = tmp_path / "mine"
    folder.mkdir()
    logged = trained(folder, *make_loggers(["mlflow"]))
    client = MlflowClient()
    id = json.loads((folder / "loggers.json").read_text())["mlflow"]
    theirs = client.get_run(id)
    assert theirs.info.run_name == "mine"
    assert theirs.info.status == "KILLED"
    assert theirs.data.params == {"seed": "3", "attack.name": "pgd", "attack.steps": "5"}
    assert [it.step for it in client.get_metric_history(id, "loss")] == [1, 2]
    assert [it.step for it in client.get_metric_history(id, "step/sent")] == [1, 2, 3, 4]

    logged = trained(folder, *make_loggers(["mlflow"]), result_follows=True)
    assert client.get_run(id).info.status == "RUNNING"
    logged.close(RESULT)
    theirs = client.get_run(id)
    assert theirs.info.status == "FINISHED"
    assert (theirs.data.metrics["result/ta"], theirs.data.metrics["result/ra"]) == (90.0, 50.0)


def test_a_run_without_loggers_has_its_metrics(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    with pytest.raises(SystemExit) as ended:
        main(
            [
                "train",
                "digits",
                *TINY,
                "evaluate.report=0",
                "train.log=none",
                "--quiet",
                "--out",
                str(out),
            ]
        )
    assert ended.value.code == 0
    assert (out / "metrics.jsonl").is_file() and not (out / "events").exists()
    assert capsys.readouterr().out.endswith("run: best weights, metrics\n")
