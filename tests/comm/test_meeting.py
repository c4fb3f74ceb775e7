"""Workers that were started again do not take those before them for their own."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch._C._distributed_c10d import HashStore, Store

from dat.comm.meeting import meet_anew


def start(store: Store, size: int, late: int) -> list[Store | None]:
    """So many workers, of which one comes later than the others."""

    def worker(rank: int) -> Store | None:
        time.sleep(0.2 * (rank == late))
        found = meet_anew(store, rank, size, timeout=20)
        if found is not None:
            assert not found.check([f"address/{rank}"])
            found.set(f"address/{rank}", str(threading.get_ident()))
        return found

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(worker, range(size)))


@pytest.mark.parametrize("late", [0, 1, 2])
def test_every_start_has_a_part_of_the_store(late: int) -> None:
    """In other numbers, after others that may have gone at any moment."""
    store = HashStore()
    for size in (3, 3, 2, 4):
        assert meet_anew(store, 1, size, timeout=0.1) is None  # one came, and left again
        found = start(store, size, late)
        addresses = [f"address/{rank}" for rank in range(size)]
        assert all(part is not None and part.check(addresses) for part in found)
        others = [part.check([f"address/{size}"]) for part in found if part is not None]
        assert others == [False] * size


def test_a_worker_by_itself_meets_itself() -> None:
    assert meet_anew(HashStore(), 0, 1, timeout=1) is not None
