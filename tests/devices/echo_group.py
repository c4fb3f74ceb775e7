"""A process group in which every other worker sends what this one sends. It notes each collective.

On an accelerator it enqueues as NCCL does: a collective runs on a stream of the group, after the
work of the caller's stream, and completes its future at once; waiting orders the waiting stream
after the collective. One that is not asynchronous runs on the caller's stream.
"""

# mypy: disable-error-code=override
from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import HashStore, ReduceOp
from torch.futures import Future

P2P = ("send", "recv")


@dataclass(frozen=True)
class Collective:
    """A collective that a worker has issued."""

    group: str
    operation: str
    values: int
    """In the tensors that it was given."""
    members: tuple[int, ...]
    """The ranks of the group; for a send or receive, the sender and the receiver."""
    thread: str

    def __str__(self) -> str:
        return f"{self.operation} of {self.values} in group {self.group} ({self.thread})"


class EchoGroup(dist.ProcessGroup):
    """Named and called as torch calls a process group that is written in Python."""

    log: list[Collective]

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._own_rank, self._size = rank, size
        self._stream: torch.Stream | None = None
        self._stash: list[tuple[torch.Event, Sequence[Tensor]]] = []
        self._name = ""

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._own_rank

    @property
    def group_name(self) -> str:
        names = dist.distributed_c10d._world.pg_names
        self._name = str(names.get(self, self._name))  # the last one, after it was destroyed
        return self._name

    pg_name = group_name

    def getBackendName(self) -> str:
        return "echo"

    def _run(
        self,
        operation: str,
        tensors: Sequence[Tensor],
        work: Callable[[], object],
        opts: Any = None,
        peers: tuple[int, int] | None = None,
    ) -> dist.Work:
        ranks = dist.get_process_group_ranks(self)
        members = tuple(ranks[peer] for peer in peers) if peers else tuple(ranks)
        values, thread = sum(t.numel() for t in tensors), threading.current_thread().name
        EchoGroup.log.append(Collective(self.group_name, operation, values, members, thread))
        device = tensors[0].device if tensors else torch.device("cpu")
        accelerated = device.type != "cpu"
        future: Future[Any] = Future(devices=[device] if accelerated else [])
        asynchronous = opts is None or opts.asyncOp
        with self._own_stream(device) if accelerated and asynchronous else nullcontext():
            with torch.no_grad():
                work()
            future.set_result(list(tensors))
            if accelerated and asynchronous:
                self._keep(tensors)
        work_of_future: Any = c10d.__dict__["_create_work_from_future"]
        started: dist.Work = work_of_future(future)
        return started

    def _keep(self, tensors: Sequence[Tensor]) -> None:
        """As NCCL's watchdog does, hold the tensors until the collective has ended."""
        self._stash = [entry for entry in self._stash if not entry[0].query()]
        event = torch.Event(tensors[0].device)
        event.record()
        self._stash.append((event, tensors))

    @contextmanager
    def _own_stream(self, device: torch.device) -> Iterator[None]:
        if self._stream is None:
            self._stream = torch.Stream(device)
        self._stream.wait_stream(torch.accelerator.current_stream(device))
        with self._stream:
            yield

    def allreduce(self, tensors: Any, opts: Any = None) -> dist.Work:
        def work() -> None:
            if opts is None or opts.reduceOp == ReduceOp.SUM:
                tensors[0].mul_(self._size)
            else:
                tensors[0].mul_(1)  # the maximum, say

        return self._run("all_reduce", tensors, work, opts)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        def work() -> None:
            for output in outputs[0]:
                output.copy_(inputs[0])

        return self._run("all_gather", [*inputs, *outputs[0]], work, opts)

    def all_gather_single(self, output: Tensor, own: Tensor, opts: Any = None) -> dist.Work:
        def work() -> None:
            rows = output.view(self._size, -1)
            if own.dtype != torch.uint8:
                rows.copy_(own.view(1, -1).expand(self._size, -1))
                return
            rows[self._own_rank].copy_(own.view(-1))
            output.mul_(1)  # shares of quantized messages have layouts of their own: no echo

        return self._run("all_gather_single", [own, output], work, opts)

    def all_to_all_single(
        self, output: Tensor, own: Tensor, to: Any, by: Any, opts: Any = None
    ) -> dist.Work:
        assert not to and not by

        def work() -> None:
            row = own.view(self._size, -1)[self._own_rank]
            output.view(self._size, -1).copy_(row.expand(self._size, -1))

        return self._run("all_to_all_single", [own, output], work, opts)

    def reduce_scatter_single(self, output: Tensor, rows: Tensor, opts: Any = None) -> dist.Work:
        def work() -> None:
            own = rows.view(self._size, -1)[self._own_rank]
            output.view(-1).copy_(own * self._size)

        return self._run("reduce_scatter_single", [rows, output], work, opts)

    def broadcast(self, tensors: Any, opts: Any = None) -> dist.Work:
        return self._run("broadcast", tensors, lambda: tensors[0].mul_(1), opts)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        def work() -> None:
            for output in outputs[0] if outputs else [inputs[0].clone()]:
                output.copy_(inputs[0])

        return self._run("gather", inputs, work, opts)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        def work() -> None:
            outputs[0].copy_(inputs[0][self._own_rank]) if inputs else outputs[0].mul_(1)

        return self._run("scatter", outputs, work, opts)

    def send(self, tensors: Any, peer: int, tag: int) -> dist.Work:
        peers = self._own_rank, peer
        return self._run("send", tensors, lambda: tensors[0].clone(), None, peers)

    def recv(self, tensors: Any, peer: int, tag: int) -> dist.Work:
        peers = peer, self._own_rank
        return self._run("recv", tensors, lambda: tensors[0].zero_(), None, peers)

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._run("barrier", [], lambda: None)


def _create(store: object, rank: int, size: int, timeout: object) -> EchoGroup:
    return EchoGroup(rank, size)


@contextmanager
def echo_world(
    rank: int, size: int, devices: Sequence[str] = ("cpu",)
) -> Iterator[list[Collective]]:
    """Be worker `rank` of `size`; the others are echoes. Yields the log of collectives."""
    if "echo" not in dist.Backend.backend_list:
        dist.Backend.register_backend("echo", _create, devices=list(devices))
    EchoGroup.log = []
    dist.init_process_group("echo", store=HashStore(), rank=rank, world_size=size)
    try:
        with patch.object(functional, "all_gather_single", _gather_shards):
            yield EchoGroup.log
    finally:
        dist.destroy_process_group()


def _gather_shards(shard: Tensor, gather_dim: int, group: tuple[Any, int], tag: str = "") -> Tensor:
    """What a sharded tensor calls. torch's own function does not reach groups written in Python."""
    assert gather_dim == 0
    mesh, mesh_dim = group
    members = mesh.get_group(mesh_dim)
    whole = shard.new_empty((members.size() * len(shard), *shard.shape[1:]))
    dist.all_gather_single(whole, shard.contiguous(), group=members)
    return whole
