"""Rendezvous in a store that still holds the keys of an earlier start."""

from __future__ import annotations

import hashlib
import time
import uuid

from torch._C._distributed_c10d import PrefixStore, Store


def rendezvous_after_restart(store: Store, rank: int, size: int, timeout: float) -> Store | None:
    """A prefix of the store for the workers of this start; `None` if some do not join in time.

    torchrun's agent keeps one store across restarts, with the addresses of workers that are gone,
    and does not tell its workers which start they belong to. So each worker publishes a token of
    its own, and rank 0 keeps publishing the list of tokens it reads until every worker has found
    its own token in the list. The prefix is a hash of that list.
    """
    token, deadline = uuid.uuid4().hex, time.monotonic() + timeout
    store.set(f"token/{rank}", token)
    while time.monotonic() < deadline:
        tokens = _publish_tokens(store, size) if rank == 0 else _read_tokens(store)
        if len(tokens) == size and tokens[rank] == token:
            prefix = hashlib.sha256(" ".join(tokens).encode()).hexdigest()
            store.set(f"{prefix}/joined/{rank}", "")
            if rank == 0 and store.check([f"{prefix}/joined/{other}" for other in range(size)]):
                store.set(f"{prefix}/complete", "")
            if store.check([f"{prefix}/complete"]):
                return PrefixStore(prefix, store)
        time.sleep(0.02)
    return None


def _publish_tokens(store: Store, size: int) -> list[str]:
    keys = [f"token/{rank}" for rank in range(size)]
    if not store.check(keys):
        return []
    tokens = [store.get(key).decode() for key in keys]
    store.set("tokens", " ".join(tokens))
    return tokens


def _read_tokens(store: Store) -> list[str]:
    return store.get("tokens").decode().split() if store.check(["tokens"]) else []
