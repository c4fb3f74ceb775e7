"""A worker's log: what ended it is in there, and logging is as before when it is over."""

from __future__ import annotations

import faulthandler
import io
import os
import signal
import sys
from pathlib import Path

import pytest
import torch

from dat.comm import World
from dat.train.log import log, worker_log

WORLD = World(1, 3, torch.device("cpu"), "gloo", owner=False)


def test_an_error_is_written_down_and_logging_is_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where standard error is no file, as in a notebook, and others want the stack."""
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    before = list(log.handlers), log.level, faulthandler.is_enabled()
    assert before[2]  # pytest's own
    with pytest.raises(KeyError, match="lost"), worker_log(tmp_path, WORLD):
        raise KeyError("lost")
    assert (list(log.handlers), log.level, faulthandler.is_enabled()) == before
    text = (tmp_path / "logs" / "worker-1.log").read_text()
    assert "worker 1 of 3: process " in text
    assert "ended by KeyError\nTraceback" in text and "KeyError: 'lost'" in text


def test_a_crash_of_the_machine_leaves_the_stack(tmp_path: Path) -> None:
    child = os.fork()
    if not child:
        faulthandler.disable()  # nobody else asks for it
        with worker_log(tmp_path, WORLD):
            os.kill(os.getpid(), signal.SIGSEGV)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGSEGV
    text = (tmp_path / "logs" / "worker-1.log").read_text()
    assert "Fatal Python error: Segmentation fault" in text and "test_log.py" in text
