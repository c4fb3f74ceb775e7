"""What to do about a loss or a gradient that is not finite."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dat.core.settings import setting
from dat.train.errors import NotFinite
from dat.train.part import Option, Part

if TYPE_CHECKING:
    from dat.train.step import StepReport
    from dat.train.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class Guard(Option):
    """Stop, skip the step, or roll back to a checkpoint and then skip the step."""

    action: str = setting(
        "stop",
        "when a loss or gradient is not finite: stop; skip the step; or rollback to the last "
        "checkpoint, then skip the step. At most ten steps are skipped, each with a warning",
        choices=("stop", "skip", "rollback"),
        key="guard",
    )
    most: int = 10
    """Maximum number of skipped steps."""

    def build(self, trainer: Trainer) -> SkippedSteps:
        return SkippedSteps(self, trainer)


class SkippedSteps(Part):
    """Skips steps with a loss or a gradient that is not finite."""

    def __init__(self, option: Guard, trainer: Trainer) -> None:
        self.option, self.trainer = option, trainer
        self.steps: list[list[int]] = []
        """[epoch, step] of each skipped step."""

    def around_step(
        self, epoch: int, step: int, take: Callable[[], StepReport | None]
    ) -> StepReport | None:
        trainer, action = self.trainer, self.option.action
        if [epoch, step] in self.steps:
            trainer.tally.step += 1
            return None
        buffers = trainer.model.buffers() if action != "stop" else ()
        before = [(buffer, buffer.clone()) for buffer in buffers]
        try:
            return take()
        except NotFinite as error:
            if action == "stop" or len(self.steps) >= self.option.most:
                raise
            self.steps.append([epoch, step])
            trainer.notify("on_step_skipped", str(error), len(self.steps))
        trainer.worker.exchange.ledger.read_and_reset()
        trainer.worker.exchange.reset_error_feedback()
        if action == "rollback" and trainer.checkpointer:
            trainer.checkpointer.roll_back(trainer)
        else:
            for buffer, value in before:
                buffer.copy_(value)
            trainer.tally.step += 1
        return None

    def warnings(self, trainer: Trainer) -> list[str]:
        steps = [f"epoch {epoch + 1}, step {step + 1}" for epoch, step in self.steps]
        return [f"skipped, because not finite: {'; '.join(steps)}"] if steps else []

    def state_dict(self, trainer: Trainer) -> dict[str, Any]:
        return {"left_out": self.steps}

    def load_state_dict(self, state: Mapping[str, Any], trainer: Trainer) -> None:
        before = [step for step in state["left_out"] if step not in self.steps]
        self.steps[:] = before + self.steps  # keep what a rollback has just added
