"""Commands for beginners: `dat new`, `dat doctor`, `dat completion`."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dat.cli import main
from dat.doctor import BAD, NOTE, OK, examine_machine
from dat.recipes import names, read
from dat.starter import create


def call(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(words)
    out, err = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, out, err


def test_what_is_new_can_be_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    code, out, _ = call(capsys, "new", "mine")
    assert code == 0
    assert "mine/recipe.yaml" in out and "dat train recipe.yaml" in out
    monkeypatch.chdir("mine")
    quick = ("train.epochs=1", "train.batch=640", "attack.steps=1", "evaluate.attacks=pgd-1")
    words = ("train", "recipe.yaml", *quick, "evaluate.report=0", "--quiet", "--json")
    code, out, _ = call(capsys, *words)
    assert code == 0, "its network is found"
    monkeypatch.delitem(sys.modules, "net")
    assert json.loads(out)["recipe"] == "recipe.yaml"


def test_every_line_of_its_recipe_is_true(tmp_path: Path) -> None:
    recipe, _ = create(tmp_path / "mine")
    text = recipe.read_text()
    assert "NAME" not in text and "cd mine" in text
    read(str(recipe))
    offered = re.sub(r"^( *)# (?=[a-z_]+: )", r"\1", text, flags=re.MULTILINE)
    assert offered != text
    recipe.write_text(offered)
    config = read(str(recipe))
    assert config.quantizer.bits == 8
    assert config.train.ema == 0.999
    assert config.data.size == 64


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    create(tmp_path / "mine")
    code, _, err = call(capsys, "new", str(tmp_path / "mine"))
    assert code == 2 and "is there already" in err
    code, _, err = call(capsys, "new", str(tmp_path / "no" / "where"))
    assert code == 2 and "there is no folder" in err


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
    compiler = next(it for it in examine_machine() if it.what == "C compiler")
    assert compiler.state == NOTE and compiler.found == "none" and compiler.advice
    assert all(it.state != BAD for it in examine_machine())


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (("dat", "rep"), {"report", "reproduce"}),
        (("dat", "train", "--res"), {"--restarts", "--resume"}),
        (("dat", "bench", "op"), {"optimizer"}),
        (("dat", "train", "digits-s"), {it for it in names() if it.startswith("digits-s")}),
    ],
)
def test_bash_completes(
    typed: tuple[str, ...],
    offered: set[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    code, script, _ = call(capsys, "completion", "bash")
    assert code == 0
    words = " ".join(typed)
    asking = (
        f'COMP_WORDS=({words}); COMP_CWORD={len(typed) - 1}; _shtab_dat; echo "${{COMPREPLY[@]}}"'
    )
    shell = ["bash", "--norc", "-c", f"{script}\n{asking}"]
    done = subprocess.run(shell, capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == offered


@pytest.mark.parametrize("shell", ["zsh", "tcsh"])
def test_other_shells_have_a_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, script, _ = call(capsys, "completion", shell)
    assert code == 0 and "reproduce" in script
