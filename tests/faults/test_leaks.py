"""Runs in one process leak no threads or files; benchmarks/faults.py tests it for ten minutes."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

from dat.distributed import Buckets, Chunked, World
from tests.faults.test_resume import make


@pytest.mark.parametrize("options", [{}, {"quantizer": Buckets(bits=4), "protocol": Chunked()}])
def test_consecutive_runs_leak_no_thread_and_no_file(
    tmp_path: Path, options: dict[str, object]
) -> None:
    """DDP holds its hook where the garbage collector cannot see it; a hook that holds DDP would
    leak the process group's threads and sockets."""
    counts = []
    for number in range(3):
        with World.join(threads=1) as world:
            make(world, tmp_path / str(number), **options).fit()
        gc.collect()
        counts.append((len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))))
    assert counts[0] == counts[1] == counts[2]
