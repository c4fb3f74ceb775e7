"""How the workers sum their gradients: quantizer, protocol and sharding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from dat.distributed import (
    BaseExchange,
    Buckets,
    Default,
    Exchange,
    Protocol,
    Quantizer,
    ShardedExchange,
    choose,
)
from dat.train.activation_checkpointing import blocks_of
from dat.train.part import Part
from dat.train.sharding import Sharding

if TYPE_CHECKING:
    from dat.train.trainer import Trainer

PREFIX = "left/"


@dataclass(frozen=True, kw_only=True)
class GradientExchange:
    """The configuration of steps 7 to 10 of Algorithm A1."""

    quantizer: Quantizer = field(default_factory=Buckets)
    """The wire format of gradients; 32 bits by default."""
    protocol: Protocol = field(default_factory=Default)
    """Which worker sends what to whom."""
    sharding: Sharding = field(default_factory=Sharding)

    def check(self, trainer: Trainer) -> None:
        self.protocol.check(self.quantizer, trainer.world.size)

    def resolved(self, trainer: Trainer) -> GradientExchange:
        """With the defaults and `protocol auto` resolved; a collective call."""
        length = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
        quantizer, protocol = choose(self.quantizer, self.protocol, trainer.world, length)
        return replace(self, quantizer=quantizer, protocol=protocol)

    def connect(self, trainer: Trainer) -> BaseExchange:
        """Join the other workers; all of them then hold rank 0's weights."""
        synchronized = trainer.options.batch_norm.synchronized
        options: dict[str, Any] = {
            "quantizer": self.quantizer,
            "seed": trainer.seed,
            "synchronized_batch_norm": synchronized,
        }
        model, world = trainer.model, trainer.world
        if not self.sharding.active:
            return Exchange(model, world, protocol=self.protocol, **options)
        assert self.sharding.size is not None
        return ShardedExchange(
            model,
            world,
            size=self.sharding.size,
            blocks=blocks_of(model),
            gather=self.sharding.gather,
            **options,
        )


class ErrorFeedback(Part):
    """Each worker's quantization residuals, for checkpoints."""

    dropped = "; the quantization residuals of error feedback are dropped"

    def __init__(self, exchange: BaseExchange) -> None:
        self.exchange = exchange

    def worker_state(self) -> dict[str, Tensor]:
        memories = enumerate(self.exchange.memories)
        return {f"{PREFIX}{number}": memory.residual for number, memory in memories}

    def load_worker_state(self, state: Mapping[str, Tensor]) -> None:
        for number, memory in enumerate(self.exchange.memories):
            memory.residual.copy_(state[f"{PREFIX}{number}"])
