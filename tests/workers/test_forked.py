"""The fork server of the tests: each owner gets the exit code of its own process."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from tests.workers.forked import ROOT, Forked


def test_processes_are_not_children_of_multiprocessing(tmp_path: Path) -> None:
    """`multiprocessing` polls all its children whenever one is started, from any thread, and of two
    threads that read the same status one gets 255."""
    process = Forked(signal.pause, tmp_path)
    assert not multiprocessing.active_children()
    process.kill()
    process.communicate(60)


def test_threads_get_the_exit_codes_of_their_own_processes(tmp_path: Path) -> None:
    def outcome(code: int) -> int | None:
        process = Forked(partial(sys.exit, code), tmp_path)
        process.communicate(60)
        return process.returncode

    codes = [number % 3 for number in range(12)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(outcome, codes)) == codes


def test_output_signals_and_timeouts(tmp_path: Path) -> None:
    process = Forked(partial(print, "here"), tmp_path)
    assert process.communicate(60) == ("here\n", "") and process.returncode == 0
    process = Forked(partial(int, "x"), tmp_path)
    assert "ValueError: invalid literal" in process.communicate(60)[1] and process.returncode == 1
    process = Forked(signal.pause, tmp_path)
    with pytest.raises(subprocess.TimeoutExpired):
        process.communicate(0.01)
    assert process.poll() is None
    process.kill()
    assert process.wait(60) == -signal.SIGKILL and process.poll() == -signal.SIGKILL


def test_a_process_has_its_own_session_folder_and_environment(tmp_path: Path) -> None:
    script = "import os; print(os.getsid(0) == os.getpid(), os.getcwd(), os.environ['X'])"
    process = Forked(partial(exec, script), tmp_path, {"X": "1"})
    assert process.communicate(60)[0] == f"True {tmp_path} 1\n"
    assert "X" not in os.environ


LEAVES_A_PROCESS = """
import signal, tempfile
from pathlib import Path
from tests.workers.forked import ROOT, Forked
process = Forked(signal.pause, Path.cwd())
print(process.pid, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("killed", [False, True], ids=["at its end", "killed"])
def test_nothing_outlives_the_tests(tmp_path: Path, killed: bool) -> None:
    """Processes that a failed test left behind must not keep pytest from exiting."""
    script = LEAVES_A_PROCESS + ("signal.pause()" if killed else "")
    own = os.environ | {"TMPDIR": str(tmp_path), "PYTHONWARNINGS": "ignore"}
    user = subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, env=own, stdout=subprocess.PIPE, text=True
    )
    assert user.stdout is not None
    pid = int(user.stdout.readline())
    if killed:
        user.kill()
    user.communicate(timeout=60)
    deadline = time.monotonic() + 60
    while Path(f"/proc/{pid}").exists() or list(tmp_path.glob("forks-*")):
        assert time.monotonic() < deadline, "the forked process still exists"
        time.sleep(0.05)
