"""An exponential moving average (EMA) of the weights, evaluated and saved alongside them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dat.core.lazy import LazyModule
from dat.core.settings import setting
from dat.train.part import Option, Part

if TYPE_CHECKING:
    from torch import nn

    from dat.optim import EMA
    from dat.train import resharding
    from dat.train.trainer import Trainer
else:
    resharding = LazyModule("dat.train.resharding")

PREFIX = "ema-"


@dataclass(frozen=True, kw_only=True)
class Averaging(Option):
    """Whether to average the weights, and how slowly the average moves."""

    decay: float = setting(
        0.0, "decay of the moving average of the weights; 0: no average", ge=0, lt=1, key="ema"
    )

    warmup: bool = setting(
        True,
        "whether update t of the average has decay min(train.ema, (1 + t) / (10 + t)), so that the "
        "initial weights fade quickly",
        key="ema_warmup",
    )

    def build(self, trainer: Trainer) -> AveragedWeights:
        return AveragedWeights(self.decay, warmup=self.warmup)


class AveragedWeights(Part):
    """The averaged weights, if enabled."""

    def __init__(self, decay: float, *, warmup: bool = True) -> None:
        self.decay, self.warmup = decay, warmup
        self.ema: EMA | None = None

    def on_fit_start(self, trainer: Trainer) -> None:
        from dat.optim import EMA

        if self.decay:
            model = trainer.model
            if trainer.sharded:
                model = trainer.worker.exchange.shard_copy(model)
            self.ema = EMA(model, self.decay, warmup=self.warmup)

    def on_step_end(self, trainer: Trainer) -> None:
        if self.ema:
            self.ema.update(trainer.model)

    def models(self) -> dict[str, nn.Module]:
        return {PREFIX: self.ema.module} if self.ema else {}

    def state_dict(self, trainer: Trainer) -> dict[str, Any]:
        return {"averaged": self.ema.state_dict() if self.ema else None}

    def load_state_dict(self, state: Mapping[str, Any], trainer: Trainer) -> None:
        if self.ema and state["averaged"]:
            self.ema.load_state_dict(self.resharded(state["averaged"]))

    def resharded(self, saved: dict[str, Any]) -> dict[str, Any]:
        """A saved state, sharded like the current weights."""
        assert self.ema is not None
        weights = resharding.reshard_weights(saved["module"], self.ema.module.state_dict())
        return saved | {"module": weights}
