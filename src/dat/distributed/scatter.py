"""The collectives of a sharded model: all-gather of the weights, reduce-scatter of the gradients.

gloo's own reduce-scatter moves as many bytes as an all-reduce. So on the CPU the gradient travels
by `all_to_all`: each worker sends every other worker the rows that belong to that one, as floats or
quantized, and adds up what it receives in the order of the workers.
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

from dat.core import devices
from dat.distributed.collectives import start_all_gather_single
from dat.distributed.quantizers import Quantizer
from dat.distributed.shards import rows_of
from dat.distributed.traffic import Ledger
from dat.distributed.transport import all_to_all
from dat.distributed.wire_format import Slot, Span, message_layout
from dat.kernels.quantize.codec import Codec
from dat.kernels.quantize.layout import MessageLayout


class _CountedCollective:
    """A collective that the ledger counts. On the CPU torch waits for each one, so that all of its
    time is exposed."""

    def __init__(self, ledger: Ledger, *, crosses_nodes: bool) -> None:
        """`crosses_nodes` tells whether the group has workers on other nodes."""
        self.ledger, self.crosses_nodes = ledger, crosses_nodes

    def allocate(self, size: Sequence[int], *, dtype: Any, device: Any) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    @contextmanager
    def counted(self, sent: int, tensor: Tensor) -> Iterator[None]:
        start, finish = time.perf_counter(), self.ledger.start_transfer()
        yield
        finish(sent, sent if self.crosses_nodes else 0)
        if not devices.is_accelerator(tensor.device):
            self.ledger.add_exposed(time.perf_counter() - start)


class AllGather(_CountedCollective):
    """All-gather of a block's weights. An asynchronous one counts when it has ended."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        sent = (group.size() - 1) * input_tensor.nbytes
        if not async_op:
            with self.counted(sent, input_tensor):
                dist.all_gather_single(output_tensor, input_tensor, group=group)
            return None
        finish, inter_node = self.ledger.start_transfer(), sent if self.crosses_nodes else 0
        gather = start_all_gather_single(output_tensor, input_tensor, group)

        def count(gathered: torch.futures.Future[Any]) -> None:
            gathered.value()  # raises the error of a failed collective
            finish(sent, inter_node)

        gather.then(count)
        return gather.work


class ReduceScatter(_CountedCollective):
    """Reduce-scatter of a block's gradient: each worker gets its rows of the sum.

    The sender quantizes, once; the sum itself stays in floats, as nobody sends it on.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        quantizer: Quantizer,
        ledger: Ledger,
        *,
        crosses_nodes: bool,
        key: Callable[[], int],
        unscale: Callable[[Tensor], None],
        done: Callable[[], None],
    ) -> None:
        super().__init__(ledger, crosses_nodes=crosses_nodes)
        self._slots, self._quantizer, self._key, self._done = slots, quantizer, key, done
        self._unscale = unscale
        self._layouts: list[MessageLayout] = []

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """In `input_tensor` torch has put the values for each worker one after the other, every
        tensor padded to as many rows as the first worker has of it."""
        self._unscale(input_tensor)
        if self._quantizer.dense:
            self._sum(output_tensor, input_tensor.reshape(group.size(), -1), group)
        else:
            self._sum_quantized(output_tensor, input_tensor, group)
        self._done()
        return None

    def _sum(self, out: Tensor, rows: Tensor, group: dist.ProcessGroup) -> None:
        with self.counted(rows.nbytes - rows[0].nbytes, rows):
            if devices.is_accelerator(rows.device):
                dist.reduce_scatter_single(out, rows.flatten(), group=group)
                return
            received = torch.empty_like(rows)
            all_to_all(rows, received, group)
            torch.sum(received, 0, out=out)

    def _sum_quantized(self, out: Tensor, flat: Tensor, group: dist.ProcessGroup) -> None:
        workers, rank = group.size(), dist.get_rank(group)
        if not self._layouts:
            self._layouts = [self._layout(workers, number) for number in range(workers)]
            self._own_layout = _shifted(self._layouts[rank], -rank * len(out))
        if sum(self._padded_lengths(workers)) != len(out):
            raise ValueError(
                "comm.shard: a parameter does not contribute to the loss, so the gradient cannot "
                "be quantized; use the parameter, or freeze it with requires_grad_(False)"
            )
        codec, key = Codec(self._quantizer), self._key()
        size = max(layout.size for layout in self._layouts)
        sent, received = (flat.new_zeros((workers, size), dtype=torch.uint8) for _ in range(2))
        values = flat.float()

        def write(number: int) -> None:
            layout = self._layouts[number]
            codec.encode(values, layout, sent[number, : layout.size], key)

        with self.counted((workers - 1) * size, flat):
            all_to_all(sent, received, group, write)
            total = out.float()  # `out` itself, if it is of that type
            codec.add_up(received, self._own_layout, total)
            if total is not out:
                out.copy_(total)

    def _layout(self, workers: int, number: int) -> MessageLayout:
        """The message for one worker, without the padding."""
        spans, padded = [], self._padded_lengths(workers)
        start = number * sum(padded)
        for slot, padded_length in zip(self._slots, padded, strict=True):
            part, width = rows_of(slot.shape, workers, number), _row_length(slot)
            length = part.rows * width
            group = 0 if self._quantizer.keeps(slot.shape) else self._quantizer.group(length)
            if length:
                spans.append(Span(start, length, group, slot.position + part.start * width))
            start += padded_length
        return message_layout(spans, self._quantizer.bits)

    def _padded_lengths(self, workers: int) -> list[int]:
        """The values of each tensor that every worker gets: as many as the first worker has."""
        return [rows_of(slot.shape, workers, 0).rows * _row_length(slot) for slot in self._slots]


def _row_length(slot: Slot) -> int:
    """Values in a row."""
    return math.prod(slot.shape[1:])


def _shifted(layout: MessageLayout, by: int) -> MessageLayout:
    return replace(layout, runs=tuple(run._replace(start=run.start + by) for run in layout.runs))
