"""Loggers: TensorBoard always, Weights & Biases and MLflow if their packages are installed."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

import dat
from dat.cli import main
from dat.train import Logged
from dat.train.loggers import LOGGERS, Logger, make_loggers
from dat.train.loggers.base import RunInfo
from tests.cli.test_cli import TINY
from tests.trainers import make_trainer

CONFIG = {"seed": 3, "attack": {"name": "pgd", "steps": 5}}
RESULT = {"method": "AT", "ta": 90.0, "ra": 50, "warnings": ["careful"], "aa": None}


def installed(name: str) -> pytest.MarkDecorator:
    spec = importlib.util.find_spec(LOGGERS[name].package)
    reason = f"needs pip install 'dat-robust[{name}]'"
    return pytest.mark.skipif(spec is None or spec.origin is None, reason=reason)


class Diary(Logger):
    """Records all calls, and fails at the call `fails_at`."""

    package = "torch"

    def __init__(self, fails_at: str = "") -> None:
        self.lines: list[Any] = []
        self.fails_at = fails_at

    def _note(self, what: str, *details: object) -> None:
        if what == self.fails_at:
            raise ConnectionError("the server\nis gone")
        self.lines.append((what, *details))

    def begin(self, run: RunInfo) -> None:
        self._note("begin", run.name, run.config, run.updates)

    def log(self, values: Mapping[str, float], step: int, *, by: str = "epoch") -> None:
        self._note(by, step, sorted(values))

    def end(self, result: Mapping[str, Any] | None) -> None:
        self._note("end", result)


def trained(folder: Path, *loggers: Logger, **options: Any) -> Logged:
    """Two epochs of two steps."""
    logged = Logged(folder, loggers, CONFIG, **options)
    images = torch.rand(16, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    trainer = make_trainer(
        model=torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 2)),
        data=dat.ImageData.of(images, torch.arange(16) % 2),
        attack=dat.FGSM(),
        epochs=2,
        batch=8,
        callbacks=[logged],
    )
    try:
        trainer.fit()
    finally:
        torch.distributed.destroy_process_group()
    return logged


def test_every_step_and_epoch_is_logged(tmp_path: Path) -> None:
    diary = Diary()
    trained(tmp_path / "mine", diary)
    begin, *lines, end = diary.lines
    assert begin == ("begin", "mine", CONFIG, 0)
    assert end == ("end", None)
    assert [line[:2] for line in lines] == [
        *(("step", 1), ("step", 2), ("epoch", 1)),
        *(("step", 3), ("step", 4), ("epoch", 2)),
    ]
    keys = ("loss", "train_ra", "sent", "busy", "exposed", "between")
    assert set(lines[0][2]) == {f"step/{key}" for key in keys}
    assert {"epoch", "loss", "lr", "trust_ratio/1.weight"} <= set(lines[2][2])


def test_loggers_stay_open_for_the_result(tmp_path: Path) -> None:
    diary = Diary()
    logged = trained(tmp_path, diary, result_follows=True)
    assert diary.lines[-1][0] == "epoch"
    logged.close(RESULT)
    logged.close()
    assert diary.lines[-1] == ("end", RESULT)


def test_a_logger_that_cannot_start_stops_the_run(tmp_path: Path) -> None:
    first = Diary()
    with pytest.raises(ValueError, match=r"train\.log: Diary: the server is gone"):
        trained(tmp_path, first, Diary(fails_at="begin"))
    assert [line[0] for line in first.lines] == ["begin", "end"]


@pytest.mark.parametrize("when", ["step", "epoch", "end"])
def test_a_logger_that_fails_later_is_dropped_with_a_warning(
    when: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    diary = Diary()
    trained(tmp_path, Diary(fails_at=when), diary)
    assert capsys.readouterr().err == "logging stopped for Diary: the server is gone\n"
    assert diary.lines[-1] == ("end", None)


def test_tensorboard_has_all_metrics(tmp_path: Path) -> None:
    logged = trained(tmp_path, *make_loggers(["tensorboard"]), result_follows=True)
    logged.close(RESULT)
    events = EventAccumulator(str(tmp_path / "events")).Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2]
    assert [event.step for event in events.Scalars("step/sent")] == [1, 2, 3, 4]
    by_step = [event.value for event in events.Scalars("step/loss")]
    means = [event.value for event in events.Scalars("loss")]
    assert [sum(by_step[:2]) / 2, sum(by_step[2:]) / 2] == pytest.approx(means)
    assert "trust_ratio/1.weight" in events.Tags()["scalars"]
    assert [event.value for event in events.Scalars("result/ta")] == [90.0]


def test_tensorboard_has_settings_and_result(tmp_path: Path) -> None:
    trained(tmp_path, *make_loggers(["tensorboard"]), result_follows=True).close(RESULT)
    events = EventAccumulator(str(tmp_path / "events")).Reload()
    (settings,) = events.Tensors("settings/text_summary")
    assert "| attack.steps | 5 |" in settings.tensor_proto.string_val[0].decode()
    (result,) = events.Tensors("result/text_summary")
    assert "| warnings | ['careful'] |" in result.tensor_proto.string_val[0].decode()
    hparams = events.PluginTagToContent("hparams")
    parsed = {tag: HParamsPluginData.FromString(content) for tag, content in hparams.items()}
    session = parsed["_hparams_/session_start_info"].session_start_info
    assert session.hparams["attack.name"].string_value == "pgd"
    metrics = parsed["_hparams_/experiment"].experiment.metric_infos
    assert [metric.name.tag for metric in metrics] == ["result/ta", "result/ra"]
    assert "_hparams_/session_end_info" in parsed


def test_names_and_packages_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert make_loggers([]) == []
    assert len(make_loggers(["tensorboard", "tensorboard"])) == 1
    with pytest.raises(ValueError, match=r"train\.log = wandbe: must be one of tensorboard"):
        make_loggers(["wandbe"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for name in ("wandb", "mlflow"):
        message = rf"train\.log = {name}: needs {name}; run: pip install 'dat-robust\[{name}\]'"
        with pytest.raises(ValueError, match=message):
            make_loggers([name])


def test_a_folder_named_wandb_is_not_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "some_tool").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(LOGGERS["wandb"], "package", "some_tool")
    with pytest.raises(ValueError, match="needs some_tool"):
        make_loggers(["wandb"])


def test_each_logger_has_its_own_id(tmp_path: Path) -> None:
    run = RunInfo(folder=tmp_path, config=CONFIG)
    assert run.saved_id("wandb") is None
    run.save_id("wandb", "a1")
    run.save_id("mlflow", "b2")
    ids = [run.saved_id(logger) for logger in ("wandb", "mlflow", "other")]
    assert ids == ["a1", "b2", None]
    (tmp_path / "loggers.json").write_text("[half")
    assert run.saved_id("wandb") is None
    assert run.settings() == {"seed": 3, "attack.name": "pgd", "attack.steps": 5}


def test_the_setting_accepts_several_loggers_or_none() -> None:
    assert dat.RunConfig.read({"train": {"log": "tensorboard,mlflow"}}).train.log == (
        "tensorboard",
        "mlflow",
    )
    assert dat.RunConfig.read({"train": {"log": "none"}}).train.log == ()
    with pytest.raises(ValueError, match=r"train\.log = wand: must be one of tensorboard, wandb"):
        dat.RunConfig.read({"train": {"log": "wand"}})


@pytest.mark.slow
@installed("wandb")
def test_wandb_has_all_metrics_and_keeps_the_id(
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
    id = json.loads((folder / "loggers.json").read_text())["wandb"]
    assert file.name == f"run-{id}.wandb"
    trained(folder, *make_loggers(["wandb"]))
    assert {path.name for path in folder.glob("wandb/offline-run-*/*.wandb")} == {file.name}


@pytest.mark.slow
@installed("mlflow")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # mlflow warns about its own database
def test_mlflow_has_all_metrics_and_resumes_the_run(
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
    assert [metric.step for metric in client.get_metric_history(id, "loss")] == [1, 2]
    steps = [metric.step for metric in client.get_metric_history(id, "step/sent")]
    assert steps == [1, 2, 3, 4]

    logged = trained(folder, *make_loggers(["mlflow"]), result_follows=True)
    assert client.get_run(id).info.status == "RUNNING"
    logged.close(RESULT)
    theirs = client.get_run(id)
    assert theirs.info.status == "FINISHED"
    assert (theirs.data.metrics["result/ta"], theirs.data.metrics["result/ra"]) == (90.0, 50.0)


def test_a_run_without_loggers_has_metrics_jsonl(
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
