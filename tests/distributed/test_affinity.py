"""A worker's process: freed memory is kept, and the cores are divided between workers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dat.distributed import World
from dat.distributed.affinity import cores

FAULTS = """
import json, resource, torch
from dat.distributed import World
torch.set_num_threads(1)
with World.join(device="cpu", threads=1, allocator={allocator!r}, pin={pin}) as world:
    def churn():
        for _ in range(20):
            torch.ones(4, 1024, 1024)
    churn()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    churn()
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    print(json.dumps({{"faults": faults, **world.process_settings}}))
"""


def run_worker(allocator: str, *, pin: bool = False, **variables: str) -> dict[str, object]:
    """The page faults of 20 large tensors and the process settings, from a new process."""
    code = FAULTS.format(allocator=allocator, pin=pin)
    ours = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_", "LD_PRELOAD")
    clean = {name: value for name, value in os.environ.items() if name not in ours}
    process = subprocess.run(
        [sys.executable, "-c", code],
        env=clean | variables,
        capture_output=True,
        text=True,
        check=True,
    )
    report: dict[str, object] = json.loads(process.stdout)
    return report


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_freed_memory_is_reused_for_the_next_tensors() -> None:
    """The system counts page faults: up to 4,096 for each of 20 tensors."""
    default, tuned = run_worker("system"), run_worker("tuned", pin=True)
    assert default["allocator"] == "system default" and "cores" not in default
    assert tuned["allocator"] == "keeps freed pages" and tuned["cores"] == sorted(
        os.sched_getaffinity(0)
    )
    assert isinstance(default["faults"], int) and isinstance(tuned["faults"], int)
    if default["faults"] > 10_000:  # with huge pages there is nothing to gain
        assert tuned["faults"] < default["faults"] / 100


def test_pinned_workers_have_as_many_threads_as_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers on eight cores; pinning leaves each four of them."""
    allowed, threads = set(range(8)), list[int]()
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: allowed)
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, own: allowed.intersection_update(own))
    monkeypatch.setattr("torch.set_num_threads", threads.append)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with World.join(device="cpu", pin=True) as world:
        assert world.process_settings["cores"] == [0, 1, 2, 3]
    assert threads == [4]


def test_the_users_allocator_settings_are_kept() -> None:
    report = run_worker("tuned", MALLOC_TRIM_THRESHOLD_="100000")
    assert report["allocator"] == "set by the environment"


@pytest.mark.skipif(sys.platform != "linux", reason="control groups")
@pytest.mark.parametrize(
    ("own", "outer", "expected"),
    [
        ("max 100000", None, 8),
        ("200000 100000", None, 2),
        ("150000 100000", "max 100000", 2),
        ("max 100000", "50000 100000", 1),
        ("1600000 100000", "300000 100000", 3),
    ],
)
def test_a_cpu_limit_bounds_the_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str, outer: str | None, expected: int
) -> None:
    """The tightest limit counts, from the process's own control group up to the root."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    group = tmp_path / "pods/pod-1"
    group.mkdir(parents=True)
    (group / "cpu.max").write_text(f"{own}\n")
    if outer:
        (tmp_path / "pods/cpu.max").write_text(f"{outer}\n")
    (tmp_path / "cgroup").write_text("0::/pods/pod-1\n")
    assert cores(tmp_path, tmp_path / "cgroup") == expected
    assert cores(tmp_path, tmp_path / "nothere") == 8


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "None")],
)
def test_idle_threads_spin_briefly_unless_the_user_chooses(
    chosen: dict[str, str], expected: str
) -> None:
    """OpenMP reads its settings when torch is imported: they are there before."""
    code = (
        "import os, sys; from dat.cli import main\n"
        "try: main(['recipes', '--json'])\n"
        "finally: print('torch' in sys.modules, os.environ.get('GOMP_SPINCOUNT'))"
    )
    ours = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    clean = {name: value for name, value in os.environ.items() if name not in ours}
    done = subprocess.run(
        [sys.executable, "-c", code], env=clean | chosen, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == f"False {expected}"
