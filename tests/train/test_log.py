"""A worker's log contains the error that ended it, and logging is restored afterwards."""

from __future__ import annotations

import faulthandler
import io
import os
import signal
import sys
from pathlib import Path

import pytest
import torch

from dat.distributed import World
from dat.train.log import log, worker_log

WORLD = World(1, 3, torch.device("cpu"), "gloo", owner=False)


def test_an_error_is_logged_and_logging_is_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if standard error is not a file, as in a notebook, and faulthandler is in use."""
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    before = list(log.handlers), log.level, faulthandler.is_enabled()
    assert before[2]  # pytest's own
    with pytest.raises(KeyError, match="lost"), worker_log(tmp_path, WORLD):
        raise KeyError("lost")
    assert (list(log.handlers), log.level, faulthandler.is_enabled()) == before
    text = (tmp_path / "logs" / "worker-1.log").read_text()
    assert "worker 1 of 3: process " in text
    assert "ended by KeyError\nTraceback" in text and "KeyError: 'lost'" in text


def test_a_segmentation_fault_leaves_the_stack(tmp_path: Path) -> None:
    child = os.fork()
    if not child:
        faulthandler.disable()  # pytest's own
        with worker_log(tmp_path, WORLD):
            os.kill(os.getpid(), signal.SIGSEGV)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGSEGV
    text = (tmp_path / "logs" / "worker-1.log").read_text()
    assert "Fatal Python error: Segmentation fault" in text and "test_log.py" in text
