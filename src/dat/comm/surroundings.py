"""What is around a worker's work: the allocator of its process, and the cores it runs on."""

from __future__ import annotations

import ctypes
import os
import sys

M_TRIM_THRESHOLD = -1
M_MMAP_MAX = -4
MINE = "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"


def keep_pages() -> str:
    """Let glibc keep the pages of large tensors that are freed, for the next ones: it would give
    them back to the system at once and then pay for every page of every tensor anew. What was done,
    in a word."""
    if sys.platform != "linux":
        return "as the system has it"
    if "LD_PRELOAD" in os.environ:
        return "preloaded"
    if any(name in os.environ for name in MINE):
        return "by the environment"
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or not (mallopt(M_MMAP_MAX, 0) and mallopt(M_TRIM_THRESHOLD, -1)):
        return "as the system has it"  # not glibc
    return "keeps pages"


def stay_on_cores(rank: int, size: int) -> list[int]:
    """Bind this process to its share of the machine's cores; all of them if they are too few."""
    if sys.platform != "linux":
        return []
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // size
    if size > 1 and share:
        cores = cores[rank * share : (rank + 1) * share]
        os.sched_setaffinity(0, cores)
    return cores
