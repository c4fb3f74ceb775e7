"""Workers of one start find each other in a store that holds words of an earlier one as well."""

from __future__ import annotations

import hashlib
import time
import uuid

from torch._C._distributed_c10d import PrefixStore, Store


def meet_anew(store: Store, rank: int, size: int, timeout: float) -> Store | None:
    """A part of the store for these workers alone; none if not all of them come in time.

    torchrun's agent keeps one store over its restarts, with the addresses of workers that are gone,
    and tells nobody which start it is. So each worker has a word of its own, the first one lists
    the words that it finds, and again, until all have found theirs in the list.
    """
    mine, patience = uuid.uuid4().hex, time.monotonic() + timeout
    store.set(f"word/{rank}", mine)
    while time.monotonic() < patience:
        words = _list(store, size) if rank == 0 else _listed(store)
        if len(words) == size and words[rank] == mine:
            name = hashlib.sha256(" ".join(words).encode()).hexdigest()
            store.set(f"{name}/seen/{rank}", "")
            if rank == 0 and store.check([f"{name}/seen/{other}" for other in range(size)]):
                store.set(f"{name}/all", "")
            if store.check([f"{name}/all"]):
                return PrefixStore(name, store)
        time.sleep(0.02)
    return None


def _list(store: Store, size: int) -> list[str]:
    names = [f"word/{rank}" for rank in range(size)]
    if not store.check(names):
        return []
    words = [store.get(name).decode() for name in names]
    store.set("words", " ".join(words))
    return words


def _listed(store: Store) -> list[str]:
    return store.get("words").decode().split() if store.check(["words"]) else []
