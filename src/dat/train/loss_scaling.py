"""Dynamic loss scaling for training in float16, as `torch.amp.GradScaler` does it.

float16 rounds gradients below 6e-8 to 0. So the loss is multiplied by a scale before the backward
pass, and each worker divides its gradient by it, in float32, before anything depends on its size:
quantization, the exchange, AWP, clipping and the optimizer see the gradient as it is.

A scale that is too large makes gradients overflow. Their sum is then not finite on any worker, so
all of them skip the step and halve the scale.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dat.core.settings import SettingError, setting
from dat.train.errors import ADVICE, NotFinite
from dat.train.part import EpochEnd, Option, Part

if TYPE_CHECKING:
    from torch import Tensor

    from dat.train.step import StepReport
    from dat.train.trainer import Trainer

LARGEST = 2.0**127
"""The largest power of two in float32."""
log = logging.getLogger("dat")


@dataclass(frozen=True, kw_only=True)
class LossScaling(Option):
    """Where the scale starts, and how it changes. Only in use with `compute.precision` float16."""

    initial: float = setting(
        2.0**16,
        "initial loss scale with compute.precision float16; a power of two changes no digit of "
        "the gradient",
        ge=1,
        key="loss_scale",
    )
    interval: int = setting(
        2000,
        "steps without overflow after which the loss scale doubles",
        ge=1,
        key="loss_scale_interval",
    )
    growth: float = 2.0
    backoff: float = 0.5
    minimum: float = 1.0
    """If gradients overflow even at this scale, the scale is not the cause."""

    def check(self, trainer: Trainer) -> None:
        if trainer.compute.precision == "float16" and trainer.objective.second_derivatives:
            raise SettingError(
                "compute.precision = float16: the gradients within this objective's loss would "
                "vanish, as only the loss is scaled; use bfloat16 or float32"
            )

    def build(self, trainer: Trainer) -> Part:
        return LossScale(self) if trainer.compute.precision == "float16" else self


class LossScale(Part):
    """The current scale. A step that overflows changes nothing but the scale."""

    def __init__(self, option: LossScaling) -> None:
        self.option, self.scale = option, option.initial
        self.since = 0
        """Steps since the scale last changed."""
        self.skipped, self.skipped_in_epoch = 0, 0

    def on_fit_start(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self._set(self.scale)

    def around_step(
        self, epoch: int, step: int, take: Callable[[], StepReport | None]
    ) -> StepReport | None:
        trainer = self.trainer
        if step == 0:  # also if the epoch is repeated
            self.skipped_in_epoch = 0
        before = [(tensor, tensor.clone()) for tensor in self._changed_by_passes()]
        try:
            report = take()
        except NotFinite as error:
            trainer.worker.exchange.ledger.read_and_reset()
            for tensor, value in before:
                tensor.copy_(value)
            self._back_off(error)
            trainer.tally.step += 1
            return None
        self._grow()
        return report

    def _changed_by_passes(self) -> list[Tensor]:
        """What a step changes before the optimizer does: batch norm statistics, error feedback."""
        memories = self.trainer.worker.exchange.memories
        return [*self.trainer.model.buffers(), *(memory.residual for memory in memories)]

    def _back_off(self, error: NotFinite) -> None:
        option = self.option
        scale = self.scale * option.backoff
        if scale < option.minimum:
            raise NotFinite(
                f"{error}. The loss scale of float16 is at its minimum, {self.scale:g}: use "
                "compute.precision bfloat16 if float32 does not diverge"
            ) from error
        self._set(scale)
        self.skipped += 1
        self.skipped_in_epoch += 1
        log.info("float16: %s; skipped, the loss scale is now %g", _reason(error), self.scale)

    def _grow(self) -> None:
        self.since += 1
        if self.since == self.option.interval:
            self._set(min(self.scale * self.option.growth, LARGEST))

    def _set(self, scale: float) -> None:
        self.scale = self.trainer.worker.exchange.loss_scale = scale
        self.since = 0

    def on_epoch_end(self, trainer: Trainer, end: EpochEnd) -> None:
        end.metrics |= {"loss_scale": self.scale, "skipped_steps": self.skipped_in_epoch}

    def warnings(self, trainer: Trainer) -> list[str]:
        if not self.skipped:
            return []
        steps = trainer.updates + self.skipped
        return [
            f"float16: {self.skipped} of {steps} steps skipped after an overflow; the loss scale "
            f"ended at {self.scale:g}"
        ]

    def state_dict(self, trainer: Trainer) -> dict[str, Any]:
        names = ("scale", "since", "skipped", "skipped_in_epoch")
        return {"loss_scale": {name: getattr(self, name) for name in names}}

    def load_state_dict(self, state: Mapping[str, Any], trainer: Trainer) -> None:
        saved = state["loss_scale"]
        self._set(saved["scale"])
        self.since = saved["since"]
        self.skipped, self.skipped_in_epoch = saved["skipped"], saved["skipped_in_epoch"]


def _reason(error: NotFinite) -> str:
    """What is not finite, without the advice for runs that diverge."""
    return str(error).removesuffix(f"; {ADVICE}")
