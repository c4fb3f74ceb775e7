"""Restarted workers do not join the workers of an earlier start."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch._C._distributed_c10d import HashStore, Store

from dat.distributed.rendezvous import rendezvous_after_restart


def start(store: Store, size: int, late: int) -> list[Store | None]:
    """Start `size` workers, of which one joins later than the others."""

    def worker(rank: int) -> Store | None:
        time.sleep(0.2 * (rank == late))
        prefix = rendezvous_after_restart(store, rank, size, timeout=20)
        if prefix is not None:
            assert not prefix.check([f"address/{rank}"])
            prefix.set(f"address/{rank}", str(threading.get_ident()))
        return prefix

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(worker, range(size)))


@pytest.mark.parametrize("late", [0, 1, 2])
def test_every_start_has_its_own_prefix_of_the_store(late: int) -> None:
    """With another number of workers, after an earlier start that was abandoned."""
    store = HashStore()
    for size in (3, 3, 2, 4):
        assert (
            rendezvous_after_restart(store, 1, size, timeout=0.1) is None
        )  # one worker alone, which gives up
        prefixes = start(store, size, late)
        addresses = [f"address/{rank}" for rank in range(size)]
        assert all(prefix is not None and prefix.check(addresses) for prefix in prefixes)
        stale = [prefix.check([f"address/{size}"]) for prefix in prefixes if prefix is not None]
        assert stale == [False] * size


def test_a_single_worker_joins_immediately() -> None:
    assert rendezvous_after_restart(HashStore(), 0, 1, timeout=1) is not None
