"""`dat completion`: bash really completes, the other shells get a script."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from dat.config.recipes import names
from tests.cli.test_cli import call


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
