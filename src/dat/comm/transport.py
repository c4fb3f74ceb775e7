"""Two ways for bytes to travel between all workers of a group at once, or among some of them; a
worker's number is that in the group.

gloo's own all-to-all posts its receives late and takes half as long again on a slow link as single
sends with every receive posted first. These also leave time: a message is written while the one
before it is on its way, and read while the next is coming. On CUDA the collectives are used as they
are, and for a part of the workers one batch of sends and receives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import Tensor

Rows = Tensor | Sequence[Tensor]
"""A row for every worker of a circle; those of a sequence may differ in length, or be empty."""


def nothing(row: int) -> None:
    """Nothing is to be done about a row."""


def swap(
    out: Rows,
    into: Rows,
    group: dist.ProcessGroup,
    write: Callable[[int], None] = nothing,
    circle: Sequence[int] | None = None,
) -> None:
    """Row i of `out` goes to worker i, which finds it in its `into`, in the row of the sender.

    `write(i)` fills row i, and is called as late as possible. With a `circle` of ranks, this
    worker's among them, row i is that of its i-th; all circles have their turn at once.
    """
    ranks, me = _places(into, group, circle)
    if out[me].device.type != "cpu":
        for i in range(len(ranks)):
            write(i)
        if circle is None and isinstance(out, Tensor) and isinstance(into, Tensor):
            dist.all_to_all_single(into.flatten(), out.flatten(), group=group)
        else:
            _batch(out, into, group, ranks, me)
        return
    receives = _receives(into, group, ranks, me)
    sends = []
    for k in range(1, len(ranks)):  # each begins with its neighbour, so that not all send to one
        to = (me + k) % len(ranks)
        write(to)
        if out[to].numel():
            sends.append(dist.isend(out[to], group=group, group_dst=ranks[to]))
    write(me)
    into[me].copy_(out[me])
    for _, work in receives:
        work.wait()
    _wait(sends)


def publish(
    own: Tensor,
    into: Rows,
    group: dist.ProcessGroup,
    read: Callable[[int], None] = nothing,
    circle: Sequence[int] | None = None,
) -> None:
    """Everybody's `own`, one row a worker. `read(i)` is called as soon as row i is there."""
    ranks, me = _places(into, group, circle)
    if own.device.type != "cpu":
        if circle is None and isinstance(into, Tensor):
            dist.all_gather_single(into.flatten(), own, group=group)
        else:
            _batch([own] * len(ranks), into, group, ranks, me)
        for i in range(len(ranks)):
            read(i)
        return
    receives = _receives(into, group, ranks, me)
    others = [ranks[(me + k) % len(ranks)] for k in range(1, len(ranks)) if own.numel()]
    sends = [dist.isend(own, group=group, group_dst=other) for other in others]
    _keep(own, into[me])
    read(me)
    for peer, work in receives:
        work.wait()
        read(peer)
    _wait(sends)


def _places(
    into: Rows, group: dist.ProcessGroup, circle: Sequence[int] | None
) -> tuple[Sequence[int], int]:
    """The ranks, in the group, of those who take part, and this worker's place among them."""
    ranks = range(len(into)) if circle is None else circle
    return ranks, ranks.index(dist.get_rank(group))


def _receives(
    into: Rows, group: dist.ProcessGroup, ranks: Sequence[int], me: int
) -> list[tuple[int, dist.Work]]:
    """All of them at once, the first to come first."""
    begun = []
    for k in range(1, len(ranks)):
        peer = (me - k) % len(ranks)
        if into[peer].numel():
            work = dist.irecv(into[peer], group=group, group_src=ranks[peer])
            assert work is not None
            begun.append((peer, work))
    return begun


def _batch(out: Rows, into: Rows, group: dist.ProcessGroup, ranks: Sequence[int], me: int) -> None:
    """All sends and receives as one: what a collective among some of the workers would do."""
    posted = []
    for k in range(1, len(ranks)):
        to, peer = (me + k) % len(ranks), (me - k) % len(ranks)
        if out[to].numel():
            posted.append(dist.P2POp(dist.isend, out[to], group=group, group_peer=ranks[to]))
        if into[peer].numel():
            posted.append(dist.P2POp(dist.irecv, into[peer], group=group, group_peer=ranks[peer]))
    _keep(out[me], into[me])
    if posted:
        _wait(dist.batch_isend_irecv(posted))


def _keep(own: Tensor, place: Tensor) -> None:
    """A worker's own row, unless it stands there already."""
    if own.data_ptr() != place.data_ptr():
        place.copy_(own)


def _wait(begun: Sequence[dist.Work | None]) -> None:
    for work in begun:
        assert work is not None
        work.wait()
