"""Inner maximization, step 5 of Algorithm A1: the attack on a worker's share of a batch.

Which class runs an attack depends on how it starts: `INNER` maps each `Attack.starts_from`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, ClassVar

from dat.attacks import Attack, attack_mode
from dat.core.lazy import torch
from dat.core.rng import Streams, seeded
from dat.core.settings import SettingError, setting
from dat.train.part import Option, Part

if TYPE_CHECKING:
    from torch import Tensor, nn

    from dat.core.precision import GradientScaling
    from dat.core.threat import ThreatModel
    from dat.data import Augmentation, BatchSource
    from dat.objectives import Batch
    from dat.objectives.base import Network
    from dat.train.trainer import Trainer
    from dat.train.worker import Worker


PROBED = 8
"""Number of images used to test whether the network treats each one independently."""


@dataclass(frozen=True, kw_only=True)
class AttackMode(Option):
    """The mode of the network during attacks in training."""

    batch_norm: str = setting(
        "eval",
        "mode of batch normalization during the attack",
        choices=("eval", "train"),
        key="attack_bn",
    )

    def check(self, trainer: Trainer) -> None:
        attack = trainer.attack
        inner_class(attack).check(attack, trainer.images.augmentation)
        if stops := attack.early_stopping:
            trainer.objective.check_patience()
            if trainer.compute.compile == "on":
                raise SettingError(
                    f"{stops}: every change of the batch size would recompile the network; use "
                    "compute.compile off"
                )
            if self.batch_norm == "train":
                raise SettingError(
                    f"{stops}: batch norm statistics would change whenever images leave the "
                    "batch; use train.attack_bn eval"
                )


class InnerMaximization(Part):
    """Runs an attack that starts from scratch on every batch."""

    dropped: ClassVar[str] = ""
    """What happens to its state if a run resumes with another number of workers."""

    def __init__(
        self, attack: Attack, threat: ThreatModel, *, mode: str = "eval", seed: int = 0
    ) -> None:
        self.attack, self.threat, self.mode, self.seed = attack, threat, mode, seed
        self._independent: bool | None = None
        """Whether images are independent of each other during the attack; None: not tested yet."""

    @classmethod
    def check(cls, attack: Attack, augmentation: Augmentation) -> None:
        """Refuse augmentations that the attack does not support."""

    def allocate(self, sources: Sequence[BatchSource], device: torch.device) -> None:
        """Allocate state for this worker's images."""
        self.device = device

    def perturb(self, worker: Worker, batch: Batch, epoch: int, step: int) -> Tensor:
        """Adversarial examples, computed on the bare module: only workers of the same subgroup
        communicate."""
        engine = worker.engine
        model = engine.target(eval_mode=self.mode == "eval")
        pieces = []
        with attack_mode(model, self.mode), worker.exchange.keep_gathered():
            scaling = self._gradient_scaling(worker, model, batch)
            network = engine.cast(model, scaling)
            for _, piece in worker.pieces(batch):
                with worker.norms.patch(model, len(piece.y)):
                    pieces.append(self._attack(worker, network, piece, epoch, step))
        x_adv = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        return scaling.mark(x_adv) if scaling else x_adv

    def _gradient_scaling(
        self, worker: Worker, model: nn.Module, batch: Batch
    ) -> GradientScaling | None:
        """How an attack in float16 scales gradients: image by image or, if images depend on each
        other, as the update scales the mean loss."""
        from dat.core.precision import GradientScaling, independent

        engine = worker.engine
        if engine.compute.precision != "float16":
            return None
        if self._independent is None:
            with seeded(batch.x.device, self.seed, "independent"):
                self._independent = self.mode == "eval" and independent(
                    lambda x: engine.adapter(model, x), batch.x[:PROBED]
                )
        return GradientScaling(
            common=None if self._independent else worker.exchange.loss_scale / batch.total
        )

    def _attack(
        self, worker: Worker, network: Network, batch: Batch, epoch: int, step: int
    ) -> Tensor:
        phi = worker.objective.phi(network, batch)
        draws = self._draws(batch, epoch, step)
        attack = self.attack_in(batch.threat)
        # the images were checked when they were loaded; checking them again would synchronize GPUs
        return attack.perturb(phi, batch.x, batch.threat, draws)

    def attack_in(self, threat: ThreatModel) -> Attack:
        """The attack, with its step size in proportion to the current eps."""
        if threat.eps == self.threat.eps:
            return self.attack
        return self.attack.scaled(threat.eps / self.threat.eps)

    def _draws(self, batch: Batch, epoch: int, step: int) -> Streams:
        """The rng streams of the attack's random start."""
        return Streams.of(self.seed, "attack", epoch, step, index=batch.draws.index)

    def remember(self, worker: Worker, batch: Batch, x_adv: Tensor, epoch: int, step: int) -> None:
        """Store what the next attack on these images starts from."""


INNER = {
    "fresh": "inner:InnerMaximization",
    "carried": "atta:ATTA",
    "replay": "free:FreeReplay",
}
"""For each `Attack.starts_from`, the module and the class that run the attack."""


def inner_class(attack: Attack) -> type[InnerMaximization]:
    """The class that runs an attack in training."""
    module, _, name = INNER[attack.starts_from].partition(":")
    runner: type[InnerMaximization] = getattr(import_module(f"dat.train.{module}"), name)
    return runner
