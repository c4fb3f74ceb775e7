"""The workers: who there is, how they were started, and the few things they say to each other."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore

T = TypeVar("T")
LOOPBACK = ("127.0.0.1", "localhost", "::1")
MESSAGE_BYTES = 2048


class WorkerError(ValueError):
    """A worker met bad input; every worker raises the same message."""

    everywhere = True


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

    @classmethod
    def join(
        cls,
        *,
        device: str = "auto",
        backend: str = "auto",
        threads: int | None = None,
        timeout: float = 300.0,
        deterministic: bool = True,
    ) -> World:
        """Join the workers that torchrun started, or be alone when nobody did.

        A process group that exists already is used as it is.
        """
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        place = _device(device, local_rank, local_size)
        if place.type == "cuda":
            torch.cuda.set_device(place)
            torch.backends.cudnn.deterministic = deterministic
        if threads is not None or local_size > 1:
            # torchrun would leave each worker one thread; what the machine has is shared out
            torch.set_num_threads(threads or max(1, cores() // local_size))
        if dist.is_initialized():
            return cls(
                dist.get_rank(), dist.get_world_size(), place, dist.get_backend(), False, timeout
            )
        if backend == "auto":
            backend = "nccl" if place.type == "cuda" else "gloo"
        if backend == "nccl" and place.type != "cuda":
            raise ValueError(f"comm.backend = nccl: needs cuda, not {place.type}; use gloo or auto")
        limit = timedelta(seconds=timeout)
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            if os.environ.get("MASTER_ADDR") in LOOPBACK:
                _stay_on_loopback()
            dist.init_process_group(backend, timeout=limit)
        else:
            _stay_on_loopback()
            dist.init_process_group(backend, timeout=limit, store=HashStore(), rank=0, world_size=1)
        world = cls(dist.get_rank(), dist.get_world_size(), place, backend, True, timeout)
        atexit.register(world.close)  # a script that does not close it must still end cleanly
        return world

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

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:  # all arrive here; after an error some never would
            self.meet()
        self.close()

    def close(self) -> None:
        """Leave the process group, if this object made it."""
        if self.owner and dist.is_initialized():
            dist.destroy_process_group()


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
            f"{'s' * (devices != 1)} for {local_size} workers; use fewer workers, cpu or auto"
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
