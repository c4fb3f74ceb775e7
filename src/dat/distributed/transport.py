"""All-to-all and all-gather between the workers of a process group, or among some of its members.
Workers are identified by their rank in the group.

gloo's own all-to-all posts its receives late: on a slow link it takes half as long again as single
sends for which every receive was posted first. Single sends also overlap with the work on the
messages: one is written while the previous one is on its way, and read while the next one arrives.
On GPUs torch's collectives are used as they are, and among some of the members one batch of sends
and receives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from dat.core import devices
from dat.core.lazy import torch
from dat.distributed.lazy import dist

if TYPE_CHECKING:
    from torch import Tensor

    Rows = Tensor | Sequence[Tensor]
    """A row for every member; those of a sequence may differ in length, or be empty."""


def ignore(row: int) -> None:
    """A callback that does nothing."""


def all_to_all(
    outgoing: Rows,
    incoming: Rows,
    group: dist.ProcessGroup,
    write: Callable[[int], None] = ignore,
    members: Sequence[int] | None = None,
) -> None:
    """Row i of `outgoing` goes to worker i, which gets it in the sender's row of its `incoming`.

    `write(i)` fills row i, and is called as late as possible. `members` are the ranks that take
    part, this worker's among them: row i is then that of the i-th member. Several disjoint sets of
    members may exchange at the same time.
    """
    ranks, own_row = _ranks_and_own_row(incoming, group, members)
    if devices.is_accelerator(outgoing[own_row].device):
        for row in range(len(ranks)):
            write(row)
        if members is not None or not (
            isinstance(outgoing, torch.Tensor) and isinstance(incoming, torch.Tensor)
        ):
            _batch(outgoing, incoming, group, ranks, own_row)
        else:
            dist.all_to_all_single(incoming.flatten(), outgoing.flatten(), group=group)
        return
    receives = _post_receives(incoming, group, ranks, own_row)
    sends = []
    for offset in range(1, len(ranks)):  # from the next rank on, so that not all send to the same
        row = (own_row + offset) % len(ranks)
        write(row)
        if outgoing[row].numel():
            sends.append(dist.isend(outgoing[row], group=group, group_dst=ranks[row]))
    write(own_row)
    incoming[own_row].copy_(outgoing[own_row])
    for _, work in receives:
        work.wait()
    _wait(sends)


def all_gather(
    own: Tensor,
    incoming: Rows,
    group: dist.ProcessGroup,
    read: Callable[[int], None] = ignore,
    members: Sequence[int] | None = None,
) -> None:
    """Every worker gets everybody's `own`, one row for each worker. `read(i)` is called as soon as
    row i has arrived. `members` are as in `all_to_all`."""
    ranks, own_row = _ranks_and_own_row(incoming, group, members)
    if devices.is_accelerator(own.device):
        if members is None and isinstance(incoming, torch.Tensor):
            dist.all_gather_single(incoming.flatten(), own, group=group)
        else:
            _batch([own] * len(ranks), incoming, group, ranks, own_row)
        for row in range(len(ranks)):
            read(row)
        return
    receives = _post_receives(incoming, group, ranks, own_row)
    offsets = range(1, len(ranks)) if own.numel() else ()
    others = [ranks[(own_row + offset) % len(ranks)] for offset in offsets]
    sends = [dist.isend(own, group=group, group_dst=other) for other in others]
    _copy_own(own, incoming[own_row])
    read(own_row)
    for row, work in receives:
        work.wait()
        read(row)
    _wait(sends)


def _ranks_and_own_row(
    incoming: Rows, group: dist.ProcessGroup, members: Sequence[int] | None
) -> tuple[Sequence[int], int]:
    """The ranks, in the group, of those who take part, and this worker's place among them."""
    ranks = range(len(incoming)) if members is None else members
    return ranks, ranks.index(dist.get_rank(group))


def _post_receives(
    incoming: Rows, group: dist.ProcessGroup, ranks: Sequence[int], own_row: int
) -> list[tuple[int, dist.Work]]:
    """All receives at once, in the order in which they are expected."""
    receives = []
    for offset in range(1, len(ranks)):
        row = (own_row - offset) % len(ranks)
        if incoming[row].numel():
            work = dist.irecv(incoming[row], group=group, group_src=ranks[row])
            assert work is not None
            receives.append((row, work))
    return receives


def _batch(
    outgoing: Rows, incoming: Rows, group: dist.ProcessGroup, ranks: Sequence[int], own_row: int
) -> None:
    """All sends and receives as one batch: a collective among some members of the group."""
    operations = []
    for offset in range(1, len(ranks)):
        to, origin = (own_row + offset) % len(ranks), (own_row - offset) % len(ranks)
        if outgoing[to].numel():
            operations.append(
                dist.P2POp(dist.isend, outgoing[to], group=group, group_peer=ranks[to])
            )
        if incoming[origin].numel():
            operations.append(
                dist.P2POp(dist.irecv, incoming[origin], group=group, group_peer=ranks[origin])
            )
    _copy_own(outgoing[own_row], incoming[own_row])
    if operations:
        _wait(dist.batch_isend_irecv(operations))


def _copy_own(own: Tensor, place: Tensor) -> None:
    """Copy a worker's own row, unless source and destination are the same memory."""
    if own.data_ptr() != place.data_ptr():
        place.copy_(own)


def _wait(works: Sequence[dist.Work | None]) -> None:
    for work in works:
        assert work is not None
        work.wait()
