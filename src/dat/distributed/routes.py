"""The base class of all protocols' routes. A route takes one bucket of the gradient through an
exchange: it encodes, calls the collectives, adds up and decodes.

An exchange has two stages: what the workers have is collected, and the sum is spread. On CPUs each
stage has a thread and a process group of its own, so that one bucket is spread while the next is
still being collected. All workers decode the same bytes in the same order, their own included, so
that their sums agree to the last bit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from dat.core.lazy import LazyModule, torch
from dat.distributed.wire_format import Slot, chunk_layouts, message_layout, spans

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import Tensor

    from dat.distributed.quantizers import Quantizer
    from dat.distributed.traffic import SentBytes
    from dat.distributed.world import World
    from dat.kernels.quantize import codec as codecs
    from dat.kernels.quantize.layout import MessageLayout, Run
else:
    codecs = LazyModule("dat.kernels.quantize.codec")


class RoundingKeys(NamedTuple):
    """The keys of one step's random rounding."""

    own: int
    """Differs from worker to worker."""
    common: int
    """For a sum that is quantized again, whichever worker does it."""


class ErrorFeedbackMemory:
    """Error feedback: the residual of the rounding, by position in the whole gradient."""

    def __init__(self, length: int, device: torch.device) -> None:
        self.residual = torch.zeros(length, device=device)

    def add_to(self, x: Tensor, layout: MessageLayout) -> None:
        """Add the residual of the previous step to the values of a message."""
        for run in layout.runs:
            x[run.start : run.start + run.length] += self._residual_of(run)

    def keep(self, x: Tensor, layout: MessageLayout, message: Tensor, codec: codecs.Codec) -> None:
        """Remember the difference between x and its encoding in the message."""
        for run in layout.runs:
            self._residual_of(run).copy_(x[run.start : run.start + run.length])
        codec.decode(message, layout.in_whole, self.residual, "subtract")

    def _residual_of(self, run: Run) -> Tensor:
        return self.residual[run.position : run.position + run.length]


@dataclass(frozen=True)
class GradientBucket:
    """A part of the gradient that is exchanged at once."""

    slots: Sequence[Slot]
    """The tensors in it, in order."""
    quantizer: Quantizer
    world: World
    memories: tuple[ErrorFeedbackMemory, ErrorFeedbackMemory] | None = None
    """With error feedback: of the first and of the second quantization."""

    def whole(self) -> MessageLayout:
        """The layout of one message with the whole bucket."""
        return message_layout(spans(self.slots, self.quantizer), self.quantizer.bits)

    def shares(self) -> list[MessageLayout]:
        """The layouts of the messages with each worker's share of the bucket."""
        return chunk_layouts(spans(self.slots, self.quantizer), self.quantizer, self.world.size)

    def buffer(self, *shape: int) -> Tensor:
        """Zeroed bytes for messages."""
        return torch.zeros(shape, dtype=torch.uint8, device=self.world.device)


class GradientRoute(ABC):
    """The exchange of one bucket: its layouts and its buffers, kept from step to step.

    In each stage all workers call the same collectives in the same order.
    """

    def __init__(self, bucket: GradientBucket, *, levels: int | None = None) -> None:
        """`levels` of the codes, if not the quantizer's own."""
        self.world = bucket.world
        self.codec = codecs.Codec(bucket.quantizer, levels=levels)
        self.memories = bucket.memories

    @abstractmethod
    def collect(self, x: Tensor, keys: RoundingKeys, group: dist.ProcessGroup) -> SentBytes:
        """Send what this worker has. Returns the bytes that it sent, as `spread` does."""

    @abstractmethod
    def spread(self, x: Tensor, group: dist.ProcessGroup) -> SentBytes:
        """Turn x into the sum over the workers."""

    def encode(
        self, x: Tensor, layout: MessageLayout, message: Tensor, key: int, hop: int = 0
    ) -> None:
        """Quantize x into a message, with error feedback if there is any; `hop` is 1 for a sum that
        is quantized again."""
        memory = self.memories[hop] if self.memories else None
        if memory:
            memory.add_to(x, layout)
        self.codec.encode(x, layout, message, key)
        if memory:
            memory.keep(x, layout, message, self.codec)
