"""Free adversarial training (Shafahi et al. 2019): the update's backward pass also attacks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dat.train.errors import NotFinite
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
        start = self.attack.start(batch.x, batch.threat, draws)
        self.replayed = [start]  # if the step is skipped, the next replay starts here as well
        return start.requires_grad_(True)

    def remember(self, worker: Worker, batch: Batch, x_adv: Tensor, epoch: int, step: int) -> None:
        """The update's backward pass has computed the attack's gradient, too."""
        assert x_adv.grad is not None
        if worker.engine.compute.precision == "float16":
            _check_range(worker, x_adv.grad, epoch, step)
        worker.exchange.unscale(x_adv.grad)
        subgroup = worker.subgroup
        gradient = subgroup.sum(x_adv.grad) if subgroup.size > 1 else x_adv.grad
        self.replayed = [self.attack.ascend(x_adv.detach(), gradient, batch.x, batch.threat)]

    def worker_state(self) -> dict[str, Tensor]:
        return {f"{PREFIX}{number}": images for number, images in enumerate(self.replayed)}

    def load_worker_state(self, state: Mapping[str, Tensor]) -> None:
        keys = [key for key in sorted(state) if key.startswith(PREFIX)]
        self.replayed = [state[key].to(self.device) for key in keys]


def _check_range(worker: Worker, gradient: Tensor, epoch: int, step: int) -> None:
    """Raise on all workers if an image's gradient is not finite on any: that of the weights, which
    all of them see, may be finite nevertheless."""
    finite = worker.exchange.world.gather(gradient.isfinite().all().unsqueeze(0))
    if not finite.all():
        raise NotFinite(f"epoch {epoch + 1}, step {step + 1}: an image's gradient is not finite")
