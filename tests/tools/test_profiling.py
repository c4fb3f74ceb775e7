"""`dat profile`: the stages add up to the step, and profiling changes nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dat.cli import main
from dat.core.tracing import stage, staged, watched
from dat.tools.profiling import Stopwatch
from dat.tools.profiling.job import STAGES
from tests.workers.conftest import DAT, run

TINY = ("model.width=4", "attack.steps=2", "train.batch=64", "comm.threads=1")


def call(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["profile", *words])
    out, err = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, out, err


def test_stages_add_up_to_the_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = (*TINY, "--steps", "25", "--trace", "trace.json", "--json")  # more than an epoch
    code, out, err = call(capsys, "digits", *words)
    assert code == 0, err
    assert err == ""
    found = json.loads(out)
    assert [it["stage"] for it in found["stages"]] == list(STAGES)
    seconds = {it["stage"]: it["seconds"] for it in found["stages"]}
    assert sum(seconds.values()) == pytest.approx(found["seconds"])
    assert sum(it["share"] for it in found["stages"]) == pytest.approx(1)
    assert all(taken > 0 for taken in seconds.values())
    assert seconds["attack/forward"] > seconds["data"]
    assert found["images_per_second"] == pytest.approx(64 / found["seconds"])
    low, middle, high = found["seconds_quartiles"]
    assert 0 < low <= middle <= high
    assert found["steps"] == 25
    assert found["peak_bytes"] is None or found["peak_bytes"] >= max(
        it["peak_bytes"] for it in found["stages"]
    )
    trace = json.loads((tmp_path / "trace.json").read_text())
    names = {event.get("name") for event in trace["traceEvents"]}
    assert {"data", "attack", "forward", "backward", "update/forward", "optimizer"} <= names
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]


def test_a_table_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "digits-standard", TINY[0], *TINY[2:], "--steps", "1")
    assert code == 0
    assert "attack: forward" in out and "images/s" in out and "a step" in out


def test_two_workers(tmp_path: Path) -> None:
    words = ("profile", "digits", *TINY, "--steps", "2", "--workers", "2", "--json")
    done = run([*DAT, *words], tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["workers"] == 2
    assert found["exchange"]["bytes"] > 0 and found["exchange"]["busy_seconds"] > 0
    seconds = {it["stage"]: it["seconds"] for it in found["stages"]}
    assert sum(seconds.values()) == pytest.approx(found["seconds"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("digit", "unknown recipe 'digit': did you mean digits?"),
        ("digits --trace trace.txt", "--trace trace.txt: must end in .json or .json.gz"),
        ("digits --trace no/trace.json", "folder no does not exist"),
        ("digits train.batch=5000", "train.batch = 5000: there are only 1437 training images"),
    ],
)
def test_bad_input_gets_one_clear_line(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = call(capsys, *words.split())
    assert code == 2 and out == ""
    (line,) = err.splitlines()
    assert line.startswith("error: ") and message in line


def test_a_stage_does_not_count_those_within() -> None:
    now = [0.0]
    watch = Stopwatch(clock=lambda: now[0])

    def work(seconds: float) -> None:
        now[0] += seconds

    @staged("inner")
    def inner() -> None:
        work(4)

    @staged("failing")
    def fail() -> None:
        work(7)
        raise KeyError

    with watched(watch):
        work(1)
        with stage("outer"):
            work(2)
            inner()
            work(3)
        with pytest.raises(KeyError):
            fail()
    watch.step_ended()
    work(100)
    watch.skip()
    with watched(watch), stage("outer"):
        work(5)
    watch.step_ended()
    first, second = watch.laps
    assert first == {"rest": 1, "outer": 5, "outer/inner": 4, "failing": 7}
    assert second == {"rest": 0, "outer": 5}


def test_nobody_watches_most_of_the_time() -> None:
    names: list[str] = []
    assert stage("a") is stage("b")
    with stage("a"), watched(lambda name: names.append(name) or stage("")):  # type: ignore[func-returns-value]
        pass
    assert names == []
