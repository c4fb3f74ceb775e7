"""Runs in one process leave nothing behind; benchmarks/faults.py looks for ten minutes."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

from dat.comm import Buckets, Chunked, World
from tests.faults.test_resume import make


@pytest.mark.parametrize("options", [{}, {"quantizer": Buckets(bits=4), "protocol": Chunked()}])
def test_runs_in_a_row_leave_no_thread_and_no_file(
    tmp_path: Path, options: dict[str, object]
) -> None:
    """DDP holds its hook where the garbage collector cannot follow; a hook that holds DDP would
    keep the process group's threads and sockets."""
    seen = []
    for number in range(3):
        with World.join(threads=1) as world:
            make(world, tmp_path / str(number), **options).fit()
        gc.collect()
        seen.append((len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))))
    assert seen[0] == seen[1] == seen[2]
