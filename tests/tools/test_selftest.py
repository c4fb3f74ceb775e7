"""`dat selftest` as users run it: it passes here, and its report says what it should."""

from __future__ import annotations

import json
import os
import re
import socket
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dat.cli import main
from dat.jobs.doctor import check_machine
from dat.tools.selftest.machine import scrub, variables
from dat.tools.selftest.registry import CHECKS, select
from dat.tools.selftest.report import WIDTH, Report
from dat.tools.selftest.result import FAIL, INFO, PASS, SKIP, Result
from dat.tools.selftest.runner import CheckOutcome
from tests.cli.test_cli import call
from tests.tools import selftest_in_workers
from tests.workers.conftest import DAT, run, start, torchrun
from tests.workers.forked import Forked, run_workers

NAMES = [check.name for check in CHECKS]


def passing(folder: Path, *words: str) -> tuple[dict[str, Any], str]:
    """The report of a self-test that passes, and what it prints."""
    result = run([*DAT, "selftest", *words, "--json", "report.json"], folder)
    assert result.returncode == 0, result.stdout + result.stderr
    return json.loads((folder / "report.json").read_text()), result.stdout


@pytest.mark.parametrize("workers", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_it_passes_here(workers: int, tmp_path: Path) -> None:
    report, shown = passing(tmp_path, "--workers", str(workers), "--device", "cpu")
    assert report["passed"] and report["next"] is None
    verdicts = {check["name"]: check["verdict"] for check in report["checks"]}
    assert list(verdicts) == NAMES
    links = {"link", "overlap"}
    assert {verdicts[name] for name in links} == {INFO if workers > 1 else SKIP}
    assert {verdicts[name] for name in NAMES if name not in links} <= {PASS, SKIP}
    assert report["machine"]["workers"] == workers
    assert all(len(line) <= WIDTH for line in shown.splitlines())
    assert [line.split()[0] for line in shown.splitlines()[1:] if re.match(r"\w+ +[A-Z]{4} ", line)]
    assert not leaks(json.dumps(report), tmp_path)


def leaks(text: str, folder: Path) -> list[str]:
    """What a report must not say of a user's machine."""
    private = (socket.gethostname(), str(Path.home()), str(folder), str(Path(__file__).parents[2]))
    return [word for word in private if word in text]


@pytest.mark.slow
def test_it_passes_under_torchrun(tmp_path: Path) -> None:
    words = ("selftest", "--only", "environment,protocols,determinism", "--json", "report.json")
    result = start([*torchrun(2), *words], tmp_path)
    assert result.returncode == 0, result.stderr
    assert json.loads((tmp_path / "report.json").read_text())["machine"]["workers"] == 2


def test_some_checks_by_name(tmp_path: Path) -> None:
    report, _ = passing(tmp_path, "--only", "rng,float32")
    assert [check["name"] for check in report["checks"]] == ["float32", "rng"]  # in their order


def test_an_unknown_check_is_refused() -> None:
    with pytest.raises(ValueError, match="--only protocol: unknown: did you mean protocols"):
        select(["protocol"])


def test_the_list_has_every_check(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "selftest", "--list", "--json")
    assert code == 0 and [row["name"] for row in json.loads(out)] == NAMES


def test_every_check_is_a_function_of_its_module() -> None:
    for check in CHECKS:
        assert check.load().__name__ == check.name


def test_a_report_that_cannot_be_written_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = call(capsys, "selftest", "--json", "nothere/report.json")
    assert code == 2 and "folder nothere does not exist" in err


def test_a_device_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = call(capsys, "selftest", "--device", "xpu")
    assert code == 2 and "this machine has" in err


def faulty_command(words: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        selftest_in_workers.unscaled_float16(patch)
        main(words)


def test_a_failure_is_the_exit_code_and_says_what_to_do(tmp_path: Path) -> None:
    words = ["selftest", "--only", "float16,rng", "--json", "report.json"]
    process = Forked(partial(faulty_command, words), tmp_path)
    out, err = process.communicate(120)
    assert process.returncode == 1, err
    assert "float16" in out and "FAIL" in out and "1 PASS, 1 FAIL" in out
    assert "attach this report to an issue" in " ".join(out.split())
    report = json.loads((tmp_path / "report.json").read_text())
    assert not report["passed"] and report["checks"][1]["verdict"] == FAIL


def outcomes_of(folder: Path, work: Any, workers: int) -> list[list[dict[str, Any]]]:
    run_workers(workers, work, folder)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(workers)]


def test_an_error_of_one_worker_fails_the_check_on_all_and_the_next_ones_run(
    tmp_path: Path,
) -> None:
    for outcomes in outcomes_of(tmp_path, selftest_in_workers.raise_on_one, 2):
        first, *rest = outcomes
        assert first["verdict"] == FAIL
        assert first["detail"] == "worker 1: ValueError: cannot do this"
        assert [outcome["verdict"] for outcome in rest] == [PASS, PASS]


def test_a_check_that_hangs_is_named_and_ends_the_test(tmp_path: Path) -> None:
    work = partial(_workers_that_hang, tmp_path)
    process = Forked(work, tmp_path)
    process.communicate(120)
    assert process.returncode == 1
    hanging, after = json.loads((tmp_path / "0.json").read_text())
    assert hanging["name"] == "hangs_on_the_last" and hanging["verdict"] == FAIL
    assert hanging["detail"] == "no answer from worker 1 within 1 s"
    assert after["verdict"] == SKIP and after["detail"] == "hangs_on_the_last did not end"


def _workers_that_hang(folder: Path) -> None:
    from tests.workers.forked import fork_workers

    code, _, _ = fork_workers(2, partial(selftest_in_workers.hang_on_one, folder))
    raise SystemExit(code)


def outcome(name: str, verdict: str, detail: str = "") -> CheckOutcome:
    (check,) = select([name])
    return CheckOutcome(check, Result(verdict=verdict, detail=detail), 0.1)


def test_the_file_names_the_check_that_a_dead_process_was_in(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    report = Report({}, ["rng", "order"], 0, str(file))
    report.write()
    assert json.loads(file.read_text())["next"] == "rng"
    report.add(outcome("rng", PASS))
    written = json.loads(file.read_text())
    assert written["next"] == "order" and not written["passed"]
    report.add(outcome("order", SKIP))
    written = json.loads(file.read_text())
    assert written["next"] is None and written["passed"]


def test_the_worst_verdict_counts_and_names_its_workers() -> None:
    good, bad = (Result(verdict=verdict, detail=verdict.lower()) for verdict in (PASS, FAIL))
    assert Result.of_workers([good, good]) == good
    common = Result.of_workers([good, bad, good, bad])
    assert common.verdict == FAIL and common.detail == "workers 1, 3: fail"


def test_reports_name_no_hosts_folders_or_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu17")
    text = "gpu17: cannot open /home/ann/runs/x.json, '~/b/c.so' at 10.0.3.7:2950; 1/2 GB/s"
    expected = "HOST: cannot open .../x.json, '.../c.so' at ADDRESS; 1/2 GB/s"
    assert scrub({"detail": [text]}) == {"detail": [expected]}


def test_only_relevant_variables_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        monkeypatch.delenv(name)
    kept = {"NCCL_DEBUG": "INFO", "CUDA_VISIBLE_DEVICES": "0"}
    for name, value in {**kept, "API_KEY": "secret", "NCCL_COMM_ID": "host:1"}.items():
        monkeypatch.setenv(name, value)
    assert variables() == kept


def test_the_doctor_points_to_it() -> None:
    assert any("dat selftest" in finding.advice for finding in check_machine())
