"""A worker's process: what is freed is kept, and cores are shared out."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

FAULTS = """
import json, resource, torch
from dat.comm import World
torch.set_num_threads(1)
with World.join(device="cpu", threads=1, allocator={allocator!r}, pin={pin}) as world:
    def churn():
        for _ in range(20):
            torch.ones(4, 1024, 1024)
    churn()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    churn()
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    print(json.dumps({{"faults": faults, **world.surroundings}}))
"""


def found(allocator: str, *, pin: bool = False, **more: str) -> dict[str, object]:
    code = FAULTS.format(allocator=allocator, pin=pin)
    mine = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_", "LD_PRELOAD")
    clean = {name: value for name, value in os.environ.items() if name not in mine}
    done = subprocess.run(
        [sys.executable, "-c", code], env=clean | more, capture_output=True, text=True, check=True
    )
    answer: dict[str, object] = json.loads(done.stdout)
    return answer


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_freed_memory_is_kept_for_the_next_tensors() -> None:
    """The system counts the pages that it hands out: twenty tensors of 4,096 pages each."""
    left_alone, tuned = found("system"), found("tuned", pin=True)
    assert left_alone["allocator"] == "as the system has it" and "cores" not in left_alone
    assert tuned["allocator"] == "keeps pages" and tuned["cores"] == sorted(os.sched_getaffinity(0))
    assert isinstance(left_alone["faults"], int) and isinstance(tuned["faults"], int)
    if left_alone["faults"] > 10_000:  # with huge pages there is nothing to gain
        assert tuned["faults"] < left_alone["faults"] / 100


def test_what_the_user_has_set_is_left_alone() -> None:
    assert found("tuned", MALLOC_TRIM_THRESHOLD_="100000")["allocator"] == "by the environment"
