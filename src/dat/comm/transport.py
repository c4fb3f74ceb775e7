"""Two ways for bytes to travel between all workers of a group at once; a worker's number is that in
the group.

gloo's own all-to-all posts its receives late and takes half as long again on a slow link as single
sends with every receive posted first. These also leave time: a message is written while the one
before it is on its way, and read while the next is coming. On CUDA the collectives are used as they
are.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor


def swap(out: Tensor, into: Tensor, group: dist.ProcessGroup, write: Callable[[int], None]) -> None:
    """Row i of `out` goes to worker i, which finds it in row `rank` of its `into`.

    `write(i)` fills row i, and is called as late as possible.
    """
    rank, workers = dist.get_rank(group), len(into)
    if out.device.type != "cpu":
        for i in range(workers):
            write(i)
        dist.all_to_all_single(into.flatten(), out.flatten(), group=group)
        return
    receives = _receives(into, group)
    sends = []
    for k in range(1, workers):  # each begins with its neighbour, so that not all send to one
        to = (rank + k) % workers
        write(to)
        sends.append(dist.isend(out[to], group=group, group_dst=to))
    write(rank)
    into[rank].copy_(out[rank])
    for _, work in receives:
        work.wait()
    _wait(sends)


def publish(
    own: Tensor, into: Tensor, group: dist.ProcessGroup, read: Callable[[int], None]
) -> None:
    """Everybody's `own`, one row a worker. `read(i)` is called as soon as row i is there."""
    rank, workers = dist.get_rank(group), len(into)
    if own.device.type != "cpu":
        dist.all_gather_single(into.flatten(), own, group=group)
        for i in range(workers):
            read(i)
        return
    receives = _receives(into, group)
    sends = [
        dist.isend(own, group=group, group_dst=(rank + k) % workers) for k in range(1, workers)
    ]
    into[rank].copy_(own)
    read(rank)
    for peer, work in receives:
        work.wait()
        read(peer)
    _wait(sends)


def _receives(into: Tensor, group: dist.ProcessGroup) -> list[tuple[int, dist.Work]]:
    """All of them at once, the first to come first."""
    rank, workers = dist.get_rank(group), len(into)
    begun = []
    for k in range(1, workers):
        peer = (rank - k) % workers
        work = dist.irecv(into[peer], group=group, group_src=peer)
        assert work is not None
        begun.append((peer, work))
    return begun


def _wait(begun: list[dist.Work | None]) -> None:
    for work in begun:
        assert work is not None
        work.wait()
