"""The workers: rank and world size, rendezvous, small collectives, and lost workers."""

from __future__ import annotations

import atexit
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from dat.core import devices
from dat.core.deprecation import RenamedAttribute
from dat.core.short_repr import short_repr
from dat.distributed.affinity import cores, keep_freed_pages, pin_to_cores
from dat.distributed.collectives import all_gather, all_reduce
from dat.distributed.rendezvous import rendezvous_after_restart
from dat.kernels.deterministic import register as register_deterministic_kernels

T = TypeVar("T")
LOOPBACK = ("127.0.0.1", "localhost", "::1")
MESSAGE_BYTES = 2048
LIVENESS_TIMEOUT = 3.0
"""Seconds that a worker has to respond to a liveness check."""
LIVENESS_POLL_INTERVAL = 0.5
"""Seconds between two queries of the store for a liveness check."""
LIVENESS_KEY = "liveness/requested_by"
CONNECTION_ERRORS = (
    r"Timed out waiting \d+ms",
    "timeout caused pair closure",
    "Connection (?:closed|reset) by peer",
)
"""gloo's messages when a worker is gone."""


class WorkerError(ValueError):
    """At least one worker got bad input; every worker raises the same message."""

    everywhere = True


class LostWorker(RuntimeError):
    """A collective failed because a worker died or did not respond in time."""

    def __init__(self, message: str, reporting_rank: int) -> None:
        super().__init__(message)
        self.reporting_rank = reporting_rank
        """The lowest rank that is left: it prints the error."""


def backends() -> list[str]:
    """The torch.distributed backends available here."""
    names = ("gloo", "nccl", "xccl", "mpi")
    return [name for name in names if dist.is_backend_available(name)]


def default_backend(device: torch.device) -> str:
    """The backend that torch recommends for a kind of device."""
    return str(dist.get_default_backend_for_device(device))


def _check_backend(backend: str, device: torch.device) -> None:
    able = dist.Backend.backend_capability.get(backend, [device.type])
    if device.type not in able:
        raise ValueError(
            f"comm.backend = {backend}: needs {' or '.join(able)}, not {device.type}; use "
            f"{default_backend(device)} or auto"
        )


@dataclass(frozen=True)
class World:
    """The workers of a run, and this process's rank among them. A single process is a world of
    size 1."""

    rank: int
    size: int
    device: torch.device
    backend: str
    owner: bool
    """Whether this object created the process group and has to destroy it."""
    timeout: float = 300.0
    """Seconds to wait for a worker that does not respond."""
    store: Store | None = None
    """Key-value store of the workers, for messages outside of collectives."""
    closed: threading.Event = field(default_factory=threading.Event)
    """Set when this worker leaves; stops its liveness thread."""
    checked_by: list[int] = field(default_factory=list)
    """Ranks whose liveness check this worker has seen."""
    process_settings: dict[str, Any] = field(default_factory=dict)
    """Allocator and core settings of this process, for the record."""
    local_rank: int = 0
    """Rank within the node, as set by the launcher."""
    local_size: int = 1
    """Workers on this node; without a launcher, each worker counts as a node of its own."""

    __repr__ = short_repr

    @classmethod
    def join(
        cls,
        *,
        device: str = "auto",
        backend: str = "auto",
        threads: int | None = None,
        timeout: float = 300.0,
        deterministic: bool = True,
        allocator: str = "system",
        pin: bool = False,
    ) -> World:
        """Join the workers that torchrun started, or form a world of one process.

        An existing process group is used as it is.
        """
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        local_device = devices.choose(device, local_rank, local_size)
        tuned = allocator == "tuned"
        settings: dict[str, Any] = {"allocator": keep_freed_pages() if tuned else "system default"}
        share = max(1, cores() // local_size)  # pinning leaves this process its share
        if pin:
            settings["cores"] = pin_to_cores(local_rank, local_size)
        devices.set_up(local_device, deterministic=deterministic)
        if deterministic and devices.is_accelerator(local_device):
            register_deterministic_kernels(devices.dispatch_key(local_device))
        if threads is not None or local_size > 1 or share < torch.get_num_threads():
            # torchrun sets one thread per worker, torch as many as the machine has cores
            torch.set_num_threads(threads or share)
        if dist.is_initialized():
            rank, size, backend = dist.get_rank(), dist.get_world_size(), dist.get_backend()
            world = cls(
                rank, size, local_device, backend, False, timeout, process_settings=settings
            )
            return replace(world, local_rank=local_rank, local_size=local_size)
        if backend == "auto":
            backend = default_backend(local_device)
        _check_backend(backend, local_device)
        store, rank, size = _open_store(timeout)
        own = PrefixStore("dat", store)
        world = cls(
            rank, size, local_device, backend, True, timeout, own, process_settings=settings
        )
        world = replace(world, local_rank=local_rank, local_size=local_size)
        world._create_group(store)
        atexit.register(world.close)  # a script that never closes its world must exit cleanly
        if size > 1:
            threading.Thread(
                target=world._answer_liveness_check, args=(world.closed,), daemon=True
            ).start()
        return world

    @staticmethod
    def current(device: str = "auto") -> World:
        """The workers of this process's group, or those that a launcher started. A plain script
        gets a worker of its own, without a process group that would outlive the call."""
        if dist.is_initialized() or "RANK" in os.environ:
            return World.join(device=device)
        chosen = devices.choose(device, 0, 1) if device == "auto" else torch.device(device)
        return SingleWorker(0, 1, chosen, "none", False)

    def single(self) -> SingleWorker:
        """This worker as a world of its own, for work without the others."""
        return SingleWorker(0, 1, self.device, self.backend, False)

    def spans_nodes(self, size: int) -> bool:
        """Whether subgroups of `size` consecutive ranks extend over more than one node."""
        return size > self.local_size or self.local_size % size > 0

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which prints and writes files for all workers."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all workers, on the CPU; exact for integers."""
        total = values.to(self.device, copy=True)
        all_reduce(total)
        return total.cpu()

    def gather(self, values: Tensor) -> Tensor:
        """The values of all workers, one row per rank, on the CPU."""
        own = values.to(self.device).contiguous()
        return all_gather(own, self.size).cpu()

    def workers_per_node(self) -> int:
        """Workers per node, which must be equal on all nodes, with consecutive ranks on each. A
        collective: all workers call it."""
        own = torch.tensor([self.local_rank, self.local_size])
        places = [(int(rank), int(size)) for rank, size in self.gather(own).tolist()]
        size = places[0][1]
        if places != [(rank % size, size) for rank in range(self.size)]:
            sizes = ", ".join(str(size) for rank, size in places if rank == 0)
            raise WorkerError(
                f"protocol.inside = none: every node must have the same number of workers, not "
                f"{sizes}; set protocol.inside to a divisor of {self.size}"
            )
        return size

    def barrier(self) -> None:
        """Wait until all workers reach this call."""
        dist.barrier()

    meet = RenamedAttribute("barrier")

    def run_or_fail_together(self, work: Callable[[], T]) -> T:
        """Run local work; if it raises a `ValueError` or `OSError` on any worker, raise a
        `WorkerError` on all of them.

        The work must not call collectives: these would wait for a worker that has failed.
        """
        result, message = None, ""
        try:
            result = work()
        except (ValueError, OSError) as error:
            message = str(error) or type(error).__name__
        messages = [_from_bytes(row) for row in self.gather(_to_bytes(message))]
        for rank, text in enumerate(messages):
            if text:
                everywhere = all(other == text for other in messages)
                raise WorkerError(text if everywhere else f"worker {rank}: {text}")
        return result  # type: ignore[return-value]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error_type is None:  # all workers get here; after an error some may not
            self.barrier()
        elif self.store is not None and isinstance(error, RuntimeError) and _is_lost(str(error)):
            raise self._diagnose_loss(error) from error  # the group is broken: no need to leave it
        self.close()

    def close(self) -> None:
        """Leave the process group, and destroy it if this object created it."""
        self.closed.set()
        atexit.unregister(self.close)
        if self.owner and dist.is_initialized():
            dist.destroy_process_group()

    def replace_group(self, name: str) -> None:
        """Leave the process group and create a new one, after a failed collective; all workers
        call it, with a name that was not used before. Needs the group that `join` created."""
        assert self.owner and self.store is not None
        dist.destroy_process_group()
        self._create_group(PrefixStore(name, self.store))

    def _create_group(self, store: Store) -> None:
        bound = self.device if devices.is_accelerator(self.device) else None
        dist.init_process_group(
            self.backend,
            timeout=timedelta(seconds=self.timeout),
            store=store,
            rank=self.rank,
            world_size=self.size,
            device_id=bound,
        )

    def _diagnose_loss(self, error: RuntimeError) -> LostWorker:
        """Find the lost workers with a liveness check through the store."""
        reason = _reason(str(error))
        results: list[set[int] | None] = []
        check = threading.Thread(target=lambda: results.append(self._check_liveness()), daemon=True)
        check.start()
        check.join(LIVENESS_TIMEOUT + 2)  # the store has no timeout if its host does not respond
        if not results or results[0] is None:
            # a lower rank that started the check reports the result, and may have left already
            reporting_rank = min([*self.checked_by, self.rank])
            return LostWorker(f"lost contact with the other workers ({reason})", reporting_rank)
        lost = sorted(results[0])
        if not lost:
            summary = "the connection between the workers broke, although all of them respond"
        else:
            plural = "s" if len(lost) > 1 else ""
            summary = f"lost worker{plural} {', '.join(map(str, lost))}: no response"
        return LostWorker(f"{summary} ({reason})", min(set(range(self.size)) - set(lost)))

    def _check_liveness(self) -> set[int] | None:
        """The ranks that do not respond; `None` if the store is gone with its host."""
        assert self.store is not None
        missing = set(range(self.size)) - {self.rank}
        deadline = time.monotonic() + LIVENESS_TIMEOUT
        try:
            requested = self.store.check([LIVENESS_KEY])
            earlier = [int(self.store.get(LIVENESS_KEY))] if requested else []
            self.store.set(LIVENESS_KEY, str(min([*earlier, self.rank])))
            while missing and time.monotonic() < deadline:
                time.sleep(0.05)
                # a lower rank may run the check as well and leave with the store: then it reports
                self.checked_by.append(int(self.store.get(LIVENESS_KEY)))
                missing = {rank for rank in missing if not self.store.check([_alive_key(rank)])}
        except RuntimeError:
            return None
        return missing

    def _answer_liveness_check(self, closed: threading.Event) -> None:
        """Runs in a thread of its own, so that a busy worker is not taken for a lost one."""
        assert self.store is not None
        with suppress(RuntimeError):
            while not closed.wait(LIVENESS_POLL_INTERVAL):
                if self.store.check([LIVENESS_KEY]):
                    self.checked_by.append(int(self.store.get(LIVENESS_KEY)))
                    self.store.set(_alive_key(self.rank), "")
                    return


def _alive_key(rank: int) -> str:
    return f"liveness/alive/{rank}"


def _open_store(timeout: float) -> tuple[Store, int, int]:
    """The store of the workers, this worker's rank, and the world size."""
    if path := os.environ.get("DAT_STORE"):  # set by our own launcher; opens no port
        _use_loopback_only()
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        return FileStore(path, size), rank, size
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        _use_loopback_only()
        return HashStore(), 0, 1
    if os.environ.get("MASTER_ADDR") in LOOPBACK:
        _use_loopback_only()
    store, rank, size = next(rendezvous("env://", timeout=timedelta(seconds=timeout)))
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store = rendezvous_after_restart(store, rank, size, timeout)
        if store is None:
            raise LostWorker(f"not all {size} workers joined within {timeout:g} s", rank)
    return store, rank, size


def _reason(message: str) -> str:
    """The essential part of gloo's message, without the path of its source file."""
    match = re.search("|".join(CONNECTION_ERRORS), message)
    return match[0] if match else " ".join(message.splitlines()[0].split())


def _is_lost(message: str) -> bool:
    """Whether a worker is gone: gloo and NCCL have no exception class for that."""
    return any(re.search(pattern, message) for pattern in (*CONNECTION_ERRORS, "NCCL", "gloo"))


class SingleWorker(World):
    """A world of this worker only, even if there are others: its collectives stay local."""

    def sum(self, values: Tensor) -> Tensor:
        return values.cpu().clone()

    def gather(self, values: Tensor) -> Tensor:
        return values.cpu().unsqueeze(0)

    def barrier(self) -> None:
        pass

    def run_or_fail_together(self, work: Callable[[], T]) -> T:
        return work()


def _use_loopback_only() -> None:
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def _to_bytes(text: str) -> Tensor:
    data = text.encode()[:MESSAGE_BYTES].ljust(MESSAGE_BYTES, b"\0")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _from_bytes(data: Tensor) -> str:
    return bytes(data.tolist()).rstrip(b"\0").decode(errors="replace")
