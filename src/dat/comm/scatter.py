"""The two collectives of a sharded model: weights are gathered, gradients are summed and shared
out.

gloo's own reduce-scatter moves as many bytes as an all-reduce, so on the CPU the gradient travels
by `swap`: each worker sends every other one the rows that are its own, as floats or quantized, and
adds up what it gets in the order of the workers.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dat.comm.kernel import Codec
from dat.comm.ledger import Ledger
from dat.comm.message import Message, Slot, Span, compose
from dat.comm.quantizer import Quantizer
from dat.comm.shards import cut
from dat.comm.transport import swap


class _Counted:
    """Makes entries in the ledger. On the CPU torch waits for each of these, so all of the time is
    exposed."""

    def __init__(self, ledger: Ledger, *, leaves: bool) -> None:
        """What it says `leaves` the node, or not."""
        self.ledger, self.leaves = ledger, leaves

    def allocate(self, size: Sequence[int], *, dtype: Any, device: Any) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    @contextmanager
    def flight(self, sent: int, tensor: Tensor) -> Iterator[None]:
        start, land = time.perf_counter(), self.ledger.open_flight()
        yield
        land(sent, sent if self.leaves else 0)
        if tensor.device.type == "cpu":
            self.ledger.expose(time.perf_counter() - start)


class Gathering(_Counted):
    """All-gather of a block's weights."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        with self.flight((group.size() - 1) * input_tensor.nbytes, input_tensor):
            work: dist.Work | None = dist.all_gather_single(
                output_tensor, input_tensor, group=group, async_op=async_op
            )
        return work


class Scattering(_Counted):
    """Reduce-scatter of a block's gradient: the sum, of which each worker gets its rows.

    Quantized by the sender, once; the sum itself stays in floats, as nobody sends it on.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        quantizer: Quantizer,
        ledger: Ledger,
        *,
        leaves: bool,
        key: Callable[[], int],
        done: Callable[[], None],
    ) -> None:
        super().__init__(ledger, leaves=leaves)
        self._slots, self._quantizer, self._key, self._done = slots, quantizer, key, done
        self._layouts: list[Message] = []

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Torch has put what is for a worker in a row, each tensor with as many rows as the first
        worker has of it."""
        if self._quantizer.dense:
            self._sum(output_tensor, input_tensor.reshape(group.size(), -1), group)
        else:
            self._sum_quantized(output_tensor, input_tensor, group)
        self._done()
        return None

    def _sum(self, out: Tensor, rows: Tensor, group: dist.ProcessGroup) -> None:
        with self.flight(rows.nbytes - rows[0].nbytes, rows):
            if rows.device.type != "cpu":
                dist.reduce_scatter_single(out, rows.flatten(), group=group)
                return
            into = torch.empty_like(rows)
            swap(rows, into, group, lambda number: None)
            torch.sum(into, 0, out=out)

    def _sum_quantized(self, out: Tensor, flat: Tensor, group: dist.ProcessGroup) -> None:
        workers, rank = group.size(), dist.get_rank(group)
        if not self._layouts:
            self._layouts = [self._layout(workers, number) for number in range(workers)]
            self._mine = _shifted(self._layouts[rank], -rank * len(out))
        if sum(cut(it.shape, workers, 0).rows * _row(it) for it in self._slots) != len(out):
            raise ValueError(
                "comm.shard: some parameter has no part in the loss, so the gradient cannot be "
                "quantized; use it, or freeze it with requires_grad_(False)"
            )
        codec, key = Codec(self._quantizer), self._key()
        size = max(layout.size for layout in self._layouts)
        sent, got = (flat.new_zeros((workers, size), dtype=torch.uint8) for _ in range(2))
        values = flat.float()

        def write(number: int) -> None:
            layout = self._layouts[number]
            codec.encode(values, layout, sent[number, : layout.size], key)

        with self.flight((workers - 1) * size, flat):
            swap(sent, got, group, write)
            total = out.float()  # itself, if it is of that type
            codec.add_up(got, self._mine, total)
            if total is not out:
                out.copy_(total)

    def _layout(self, workers: int, number: int) -> Message:
        """What is for one worker, without what only fills up rows."""
        spans, most = [], [cut(slot.shape, workers, 0).rows * _row(slot) for slot in self._slots]
        start = number * sum(most)
        for slot, room in zip(self._slots, most, strict=True):
            part = cut(slot.shape, workers, number)
            length = part.rows * _row(slot)
            group = 0 if self._quantizer.keeps(slot.shape) else self._quantizer.group(length)
            if length:
                spans.append(Span(start, length, group, slot.position + part.start * _row(slot)))
            start += room
        return compose(spans, self._quantizer.bits)


def _row(slot: Slot) -> int:
    """Values in a row."""
    return math.prod(slot.shape[1:])


def _shifted(layout: Message, by: int) -> Message:
    return replace(layout, runs=tuple(run._replace(start=run.start + by) for run in layout.runs))
