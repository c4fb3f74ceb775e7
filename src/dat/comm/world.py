"""The workers: who there is, how they were started, and the few things they say to each other."""

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

from dat.comm.meeting import meet_anew
from dat.comm.surroundings import keep_pages, stay_on_cores

T = TypeVar("T")
LOOPBACK = ("127.0.0.1", "localhost", "::1")
MESSAGE_BYTES = 2048
ROLL_CALL = 3.0
"""Seconds that a worker has to answer after the exchange broke off."""
ANSWER = 0.5
"""Seconds between looks whether the roll is called."""
CALL = "call"
BROKE_OFF = (
    r"Timed out waiting \d+ms",
    "timeout caused pair closure",
    "Connection (?:closed|reset) by peer",
)
"""What gloo says when a worker is gone."""


class WorkerError(ValueError):
    """A worker met bad input; every worker raises the same message."""

    everywhere = True


class LostWorker(RuntimeError):
    """The exchange broke off: some worker died, or was silent for too long."""

    def __init__(self, message: str, speaker: int) -> None:
        super().__init__(message)
        self.speaker = speaker
        """The first of those that are left, who tells."""


def backends() -> list[str]:
    """What torch can communicate by here."""
    return [name for name in ("gloo", "nccl", "mpi") if dist.is_backend_available(name)]


@dataclass(frozen=True)
class World:
    """M workers, of which this process is number `rank`. One worker is a world of its own."""

    rank: int
    size: int
    device: torch.device
    backend: str
    owner: bool
    """This object made the process group, so it ends it."""
    timeout: float = 300.0
    """Seconds to wait for a silent worker."""
    store: Store | None = None
    """Where workers leave word for each other outside of the exchange."""
    over: threading.Event = field(default_factory=threading.Event)
    """Set when this worker leaves."""
    callers: list[int] = field(default_factory=list)
    """Whose roll call this worker has answered."""
    surroundings: dict[str, Any] = field(default_factory=dict)
    """What was done about its process."""
    local_rank: int = 0
    """Its number among the workers of its node, as the launcher has it."""
    local_size: int = 1
    """How many workers its node has; without a launcher's word, every worker has its own node."""

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
        """Join the workers that torchrun started, or be alone when nobody did.

        A process group that exists already is used as it is.
        """
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        place = _device(device, local_rank, local_size)
        tuned = allocator == "tuned"
        around: dict[str, Any] = {"allocator": keep_pages() if tuned else "as the system has it"}
        if pin:
            around["cores"] = stay_on_cores(local_rank, local_size)
        if place.type == "cuda":
            torch.cuda.set_device(place)
            torch.backends.cudnn.deterministic = deterministic
        if threads is not None or local_size > 1:
            # torchrun would leave each worker one thread; what the machine has is shared out
            torch.set_num_threads(threads or max(1, cores() // local_size))
        if dist.is_initialized():
            rank, size, backend = dist.get_rank(), dist.get_world_size(), dist.get_backend()
            world = cls(rank, size, place, backend, False, timeout, surroundings=around)
            return replace(world, local_rank=local_rank, local_size=local_size)
        if backend == "auto":
            backend = "nccl" if place.type == "cuda" else "gloo"
        if backend == "nccl" and place.type != "cuda":
            raise ValueError(f"comm.backend = nccl: needs cuda, not {place.type}; use gloo or auto")
        limit = timedelta(seconds=timeout)
        if path := os.environ.get("DAT_STORE"):  # our own launcher's: nothing listens
            _stay_on_loopback()
            rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            store: Store = FileStore(path, size)
        elif "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            if os.environ.get("MASTER_ADDR") in LOOPBACK:
                _stay_on_loopback()
            store, rank, size = next(rendezvous("env://", timeout=limit))
            if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
                store = _anew(store, rank, size, timeout)
        else:
            _stay_on_loopback()
            store, rank, size = HashStore(), 0, 1
        dist.init_process_group(backend, timeout=limit, store=store, rank=rank, world_size=size)
        own = PrefixStore("dat", store)
        world = cls(rank, size, place, backend, True, timeout, own, surroundings=around)
        world = replace(world, local_rank=local_rank, local_size=local_size)
        atexit.register(world.close)  # a script that does not close it must still end cleanly
        if size > 1:
            threading.Thread(target=world._answer, args=(world.over,), daemon=True).start()
        return world

    def alone(self) -> Lone:
        """This worker by itself, for work that is its own."""
        return Lone(0, 1, self.device, self.backend, False)

    def leaves_node(self, size: int) -> bool:
        """Whether `size` neighbours, as the workers are divided, are on more than one node."""
        return size > self.local_size or self.local_size % size > 0

    @property
    def first(self) -> bool:
        """This worker speaks for all: it prints and writes the files."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """The sum over the workers, on the CPU; exact for integers."""
        total = values.to(self.device, copy=True)
        dist.all_reduce(total)
        return total.cpu()

    def gather(self, values: Tensor) -> Tensor:
        """Everybody's values, one row a worker, on the CPU."""
        mine = values.to(self.device).contiguous()
        rows = torch.empty((self.size, *mine.shape), dtype=mine.dtype, device=self.device)
        dist.all_gather(list(rows.unbind()), mine)
        return rows.cpu()

    def workers_a_node(self) -> int:
        """How many workers each node has, if all have as many and count them in order; all ask."""
        mine = torch.tensor([self.local_rank, self.local_size])
        found = [(int(rank), int(size)) for rank, size in self.gather(mine).tolist()]
        size = found[0][1]
        if found != [(rank % size, size) for rank in range(self.size)]:
            sizes = ", ".join(str(size) for rank, size in found if rank == 0)
            raise WorkerError(
                f"protocol.inside = none: nodes have as many workers as each other, not {sizes}; "
                f"start as many on each, or set protocol.inside to a divisor of {self.size}"
            )
        return size

    def meet(self) -> None:
        """Wait until all workers are here."""
        dist.barrier()

    def together(self, work: Callable[[], T]) -> T:
        """Do something that bad input may stop. If it fails anywhere, all workers stop alike.

        The work must be local: a collective inside it would wait for a worker that has failed.
        """
        result, message = None, ""
        try:
            result = work()
        except (ValueError, OSError) as error:
            message = str(error) or type(error).__name__
        said = [_text(row) for row in self.gather(_bytes(message))]
        for rank, text in enumerate(said):
            if text:
                everywhere = all(other == text for other in said)
                raise WorkerError(text if everywhere else f"worker {rank}: {text}")
        return result  # type: ignore[return-value]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:  # all arrive here; after an error some never would
            self.meet()
        elif self.store is not None and isinstance(error, RuntimeError) and _broke_off(str(error)):
            raise self._name_the_lost(error) from error  # the group is dead: nothing to leave
        self.close()

    def close(self) -> None:
        """Leave the process group, if this object made it."""
        self.over.set()
        atexit.unregister(self.close)
        if self.owner and dist.is_initialized():
            dist.destroy_process_group()

    def _name_the_lost(self, error: RuntimeError) -> LostWorker:
        """A roll call outside of the exchange: who does not answer is lost."""
        reason, found = _reason(str(error)), []
        caller = threading.Thread(target=lambda: found.append(self._call_the_roll()), daemon=True)
        caller.start()
        caller.join(ROLL_CALL + 2)  # the store has no timeout if its keeper is silent
        if not found or found[0] is None:  # whoever called the roll before has told already
            speaker = min([*self.callers, self.rank])
            return LostWorker(f"lost contact with the other workers ({reason})", speaker)
        silent = sorted(found[0])
        if not silent:
            names = "the connection between the workers broke, though all of them answer"
        else:
            plural = "s" if len(silent) > 1 else ""
            names = f"lost worker{plural} {', '.join(map(str, silent))}: no answer"
        return LostWorker(f"{names} ({reason})", min(set(range(self.size)) - set(silent)))

    def _call_the_roll(self) -> set[int] | None:
        """Who does not answer; none, if the store went with the machine that kept it."""
        assert self.store is not None
        silent = set(range(self.size)) - {self.rank}
        patience = time.monotonic() + ROLL_CALL
        try:
            called = [int(self.store.get(CALL))] if self.store.check([CALL]) else []
            self.store.set(CALL, str(min([*called, self.rank])))
            while silent and time.monotonic() < patience:
                time.sleep(0.05)
                # a worker before this one may call as well, and leave with the store: it tells
                self.callers.append(int(self.store.get(CALL)))
                silent = {rank for rank in silent if not self.store.check([f"here/{rank}"])}
        except RuntimeError:
            return None
        return silent

    def _answer(self, over: threading.Event) -> None:
        """A thread that answers the roll call, so that a worker that is busy is not taken for
        lost."""
        assert self.store is not None
        with suppress(RuntimeError):
            while not over.wait(ANSWER):
                if self.store.check([CALL]):
                    self.callers.append(int(self.store.get(CALL)))
                    self.store.set(f"here/{self.rank}", "")
                    return


def _anew(store: Store, rank: int, size: int, timeout: float) -> Store:
    found = meet_anew(store, rank, size, timeout)
    if found is None:
        raise LostWorker(f"not all {size} workers came within {timeout:g} s", rank)
    return found


def _reason(message: str) -> str:
    """What gloo says in the end, without the path of its source."""
    found = re.search("|".join(BROKE_OFF), message)
    return found[0] if found else " ".join(message.splitlines()[0].split())


def _broke_off(message: str) -> bool:
    """gloo and nccl have no exception of their own for it."""
    return any(re.search(word, message) for word in (*BROKE_OFF, "NCCL", "gloo"))


class Lone(World):
    """One worker, while there may be others that it does not ask."""

    def sum(self, values: Tensor) -> Tensor:
        return values.cpu().clone()

    def gather(self, values: Tensor) -> Tensor:
        return values.cpu().unsqueeze(0)

    def meet(self) -> None:
        pass

    def together(self, work: Callable[[], T]) -> T:
        return work()


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _device(name: str, local_rank: int, local_size: int) -> torch.device:
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        name = "cuda" if devices >= local_size else "cpu"
    if name == "cuda" and devices < local_size:
        raise ValueError(
            f"comm.device = cuda: this machine has {devices or 'no'} CUDA device"
            f"{'s' * (devices != 1)} for {local_size} worker"
            f"{'s' * (local_size != 1)}; use fewer workers, cpu or auto"
        )
    return torch.device("cuda", local_rank) if name == "cuda" else torch.device(name)


def _stay_on_loopback() -> None:
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def _bytes(text: str) -> Tensor:
    data = text.encode()[:MESSAGE_BYTES].ljust(MESSAGE_BYTES, b"\0")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _text(data: Tensor) -> str:
    return bytes(data.tolist()).rstrip(b"\0").decode(errors="replace")
