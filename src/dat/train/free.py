"""Free adversarial training (Shafahi et al. 2019): the update's backward pass also attacks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dat.train.inner import InnerMaximization

if TYPE_CHECKING:
    from torch import Tensor

    from dat.attacks import Free
    from dat.objectives import Batch
    from dat.train.worker import Worker

PREFIX = "replayed/"


class FreeReplay(InnerMaximization):
    """Trains on each batch several times in a row; each attack continues from the one before."""

    attack: Free
    dropped = "; the current batch is replayed from its clean images"

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.replayed: list[Tensor] = []
        """The adversarial images of the last replay."""

    def perturb(self, worker: Worker, batch: Batch, epoch: int, step: int) -> Tensor:
        draws = self._draws(batch, epoch, step)
        if step % self.attack.replays and self.replayed:
            return self.replayed[0].requires_grad_(True)
        return self.attack.start(batch.x, batch.threat, draws).requires_grad_(True)

    def remember(self, worker: Worker, batch: Batch, x_adv: Tensor, epoch: int, step: int) -> None:
        """The update's backward pass has computed the attack's gradient, too."""
        assert x_adv.grad is not None
        subgroup = worker.subgroup
        gradient = subgroup.sum(x_adv.grad) if subgroup.size > 1 else x_adv.grad
        self.replayed = [self.attack.ascend(x_adv.detach(), gradient, batch.x, batch.threat)]

    def worker_state(self) -> dict[str, Tensor]:
        return {f"{PREFIX}{number}": images for number, images in enumerate(self.replayed)}

    def load_worker_state(self, state: Mapping[str, Tensor]) -> None:
        keys = [key for key in sorted(state) if key.startswith(PREFIX)]
        self.replayed = [state[key].to(self.device) for key in keys]
