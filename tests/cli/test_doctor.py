"""`dat doctor`: what the machine has, and what is wrong with it."""

from __future__ import annotations

import json
import shutil

import pytest

from dat.jobs.doctor import BAD, NOTE, OK, check_machine
from tests.cli.test_cli import call


def test_the_doctor_finds_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "doctor", "--json")
    assert code == 0
    found = {(it["area"], it["what"]): it for it in json.loads(out)}
    assert found["devices", "backends"]["found"].startswith("gloo")
    assert {it["state"] for it in found.values()} <= {OK, NOTE}
    assert ("network", "lo") in found
    kernels = {it["found"] for (area, what), it in found.items() if what in ("LALR", "quantizers")}
    assert kernels == {"works"} or kernels == {"not built"}


def test_the_doctor_says_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nope0")
    monkeypatch.setenv("DAT_NO_KERNEL", "1")
    code, out, err = call(capsys, "doctor")
    assert code == 1
    assert "error: chosen interface: nope0; there is no such interface" in err
    assert "DAT_NO_KERNEL is set" in out


def test_a_machine_without_a_compiler_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    compiler = next(it for it in check_machine() if it.what == "C compiler")
    assert compiler.state == NOTE and compiler.found == "none" and compiler.advice
    assert all(it.state != BAD for it in check_machine())
