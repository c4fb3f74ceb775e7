"""Allocator, cores and threads of a worker's process."""

from __future__ import annotations

import ctypes
import math
import os
import sys
from pathlib import Path

M_TRIM_THRESHOLD = -1
M_MMAP_MAX = -4
ALLOCATOR_VARIABLES = (
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_MMAP_MAX_",
    "MALLOC_TRIM_THRESHOLD_",
    "GLIBC_TUNABLES",
)


def keep_freed_pages() -> str:
    """Make glibc reuse the pages of freed tensors, and describe the allocator that is in use.

    By default glibc returns the pages of large tensors to the system as soon as they are freed, and
    every page of the next tensor faults again. An allocator that the user configured is left alone.
    """
    if sys.platform != "linux":
        return "system default"
    if "LD_PRELOAD" in os.environ:
        return "preloaded"
    if any(name in os.environ for name in ALLOCATOR_VARIABLES):
        return "set by the environment"
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or not (mallopt(M_MMAP_MAX, 0) and mallopt(M_TRIM_THRESHOLD, -1)):
        return "system default"  # not glibc
    return "keeps freed pages"


def pin_to_cores(rank: int, size: int) -> list[int]:
    """Bind this process to its share of the cores; with fewer cores than workers, to all of them.

    Returns the cores.
    """
    if sys.platform != "linux":
        return []
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // size
    if size > 1 and share:
        cores = cores[rank * share : (rank + 1) * share]
        os.sched_setaffinity(0, cores)
    return cores


def cores(cgroups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """The number of cores this process may use: those it may run on, up to its CPU limit.

    A container with a limit of two CPUs sees all cores of its machine. As many threads as those
    would be throttled together.
    """
    if sys.platform != "linux":
        return os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0))
    return max(1, math.ceil(min(allowed, _cpu_limit(cgroups, own))))


def _cpu_limit(cgroups: Path, own: Path) -> float:
    """The smallest limit of this process's control groups (version 2), in CPUs, or infinity."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return math.inf
    path = next((line[3:] for line in lines if line.startswith("0::")), "/")
    group = cgroups / path.strip("/")
    limits = [math.inf]
    for folder in (group, *group.parents):
        if folder.is_relative_to(cgroups) and (file := folder / "cpu.max").is_file():
            quota, period = file.read_text().split()
            limits.append(math.inf if quota == "max" else int(quota) / int(period))
    return min(limits)
