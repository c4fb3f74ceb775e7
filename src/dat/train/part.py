"""Parts of training: what an option does, and when.

An `Option` holds the settings of one feature of the training loop. It validates itself, and `build`
makes the `Part` whose hooks the loop calls. An option without state is its own part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from dat.core.settings import Settings

if TYPE_CHECKING:
    from torch import Tensor, nn

    from dat.evaluation import Accuracy
    from dat.objectives import Batch
    from dat.train.step import StepReport
    from dat.train.trainer import Trainer
    from dat.train.worker import Worker

P = TypeVar("P", bound="Part")


@dataclass
class EpochEnd:
    """The end of an epoch: its steps are done, and the parts evaluate the weights."""

    epoch: int
    """Counted from 0."""
    accuracies: dict[str, Accuracy | None] = field(default_factory=dict)
    """Held-out accuracy by weights' name; empty if this epoch is not evaluated."""
    metrics: dict[str, Any] = field(default_factory=dict)
    """Metrics to add to the epoch's record."""
    rolled_back: bool = False
    """The epoch was rolled back: training is at an earlier epoch again."""
    stop: bool = False
    """Training ends here."""


class Part:
    """Takes part in training. Every hook is optional."""

    def on_fit_start(self, trainer: Trainer) -> None:
        """The workers have joined, and all hold rank 0's weights."""

    def around_step(
        self, epoch: int, step: int, take: Callable[[], StepReport | None]
    ) -> StepReport | None:
        """Call `take` to take the step, or return None to skip it."""
        return take()

    def on_batch(self, worker: Worker, batch: Batch, epoch: int, step: int) -> Batch:
        """Change the batch that the attack and the update use."""
        return batch

    def around_update(
        self, worker: Worker, epoch: int, step: int, descend: Callable[[], None]
    ) -> AbstractContextManager[None]:
        """A context for computing the update's gradient; `descend` computes one beforehand."""
        return nullcontext()

    def on_gradient(self, worker: Worker) -> None:
        """The gradients are exchanged; the optimizer step comes next."""

    def on_step_end(self, trainer: Trainer) -> None:
        """The weights have changed."""

    def evaluate(self, trainer: Trainer, end: EpochEnd) -> None:
        """Evaluate the weights at the end of an epoch; may undo the epoch."""

    def on_epoch_end(self, trainer: Trainer, end: EpochEnd) -> None:
        """The epoch is over and was not undone."""

    def models(self) -> dict[str, nn.Module]:
        """Additional weights to save, by file-name prefix."""
        return {}

    def warnings(self, trainer: Trainer) -> list[str]:
        """Warnings for the result of a finished run."""
        return []

    def state_dict(self, trainer: Trainer) -> dict[str, Any]:
        """State for a checkpoint, identical on every worker. Keys are unique among parts."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any], trainer: Trainer) -> None:
        """Restore from a checkpoint's complete state; older ones may lack a key."""

    def worker_state(self) -> dict[str, Tensor]:
        """State that differs between workers."""
        return {}

    def load_worker_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore from this worker's own file."""

    def load_worker_states(self, states: Iterable[Mapping[str, Tensor]]) -> None:
        """Restore from the files of a run with another number of workers; drop what cannot be
        redistributed."""


@dataclass(frozen=True, kw_only=True)
class Option(Settings, Part):
    """The settings of a part."""

    def check(self, trainer: Trainer) -> None:
        """Refuse incompatible settings before any work begins."""

    def sharding_conflict(self) -> str:
        """Why it does not support a sharded model, and what to set; empty if it does."""
        return ""

    def build(self, trainer: Trainer) -> Part:
        """Create the part, with its state."""
        return self


class Parts(Sequence[Part]):
    """The parts of a run, in the order in which their hooks are called."""

    def __init__(self, parts: Iterable[Part]) -> None:
        self._parts = list(parts)
        self._hooks: dict[str, list[Any]] = {}

    def __getitem__(self, index: Any) -> Any:
        return self._parts[index]

    def __len__(self) -> int:
        return len(self._parts)

    def one(self, kind: type[P]) -> P:
        """The only part of this class."""
        return next(part for part in self._parts if isinstance(part, kind))

    def add(self, *parts: Part) -> None:
        self._parts += parts
        self._hooks.clear()

    def replace(self, old: Part, new: Part) -> None:
        """Replace a part, at the same position."""
        self._parts[self._parts.index(old)] = new
        self._hooks.clear()

    def hooks(self, name: str) -> list[Any]:
        """The methods of this name, of those parts that override it."""
        if name not in self._hooks:
            default = vars(Part)[name]
            own = [part for part in self._parts if getattr(type(part), name) is not default]
            self._hooks[name] = [getattr(part, name) for part in own]
        return self._hooks[name]

    def call(self, name: str, *arguments: object) -> None:
        """Call all hooks of this name."""
        for hook in self.hooks(name):
            hook(*arguments)

    def take_step(
        self, epoch: int, step: int, take: Callable[[], StepReport | None]
    ) -> StepReport | None:
        """Take a step inside all `around_step` hooks, the first part outermost."""
        for hook in reversed(self.hooks("around_step")):
            take = partial(hook, epoch, step, take)
        return take()

    @contextmanager
    def updating(
        self, worker: Worker, epoch: int, step: int, descend: Callable[[], None]
    ) -> Iterator[None]:
        """Enter all `around_update` hooks."""
        with ExitStack() as stack:
            for hook in self.hooks("around_update"):
                stack.enter_context(hook(worker, epoch, step, descend))
            yield

    def models(self) -> dict[str, nn.Module]:
        return {name: model for part in self._parts for name, model in part.models().items()}

    def state_dict(self, trainer: Trainer) -> dict[str, Any]:
        state: dict[str, Any] = {}
        for hook in self.hooks("state_dict"):
            own = hook(trainer)
            assert not state.keys() & own.keys(), f"duplicate keys: {state.keys() & own.keys()}"
            state |= own
        return state

    def worker_state(self) -> dict[str, Tensor]:
        states = [hook() for hook in self.hooks("worker_state")]
        return {name: value for state in states for name, value in state.items()}
