"""Settings that do not go together, refused before the work begins."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dat.attacks import PGD
from dat.comm import NORMS, check_team
from dat.fields import SettingError
from dat.train.sharding import check_sharded

if TYPE_CHECKING:
    from dat.train.trainer import Trainer

GUARDS = ("stop", "skip", "rollback")


def check(trainer: Trainer) -> None:
    """Refuse what cannot be trained."""
    if trainer.epochs < 1 or trainer.select_every < 1:
        raise ValueError("epochs and select_every must be at least 1")
    if trainer.guard not in GUARDS:
        raise ValueError(f"guard = {trainer.guard!r}: must be one of {', '.join(GUARDS)}")
    if trainer.select_by not in ("ra", "ta"):
        raise ValueError(f"select_by = {trainer.select_by!r}: must be 'ra' or 'ta'")
    trainer.protocol.check(trainer.quantizer, trainer.world.size)
    check_team(trainer.world.size, trainer.team)
    trainer.objective.check_team(trainer.team)
    _check_norms(trainer)
    if trainer.sharded:
        check_sharded(trainer)
    _check_labels(trainer)
    if isinstance(trainer.attack, PGD):
        _check_pgd(trainer.attack, trainer)


def _check_norms(trainer: Trainer) -> None:
    if trainer.bn not in NORMS:
        raise ValueError(f"bn = {trainer.bn!r}: must be one of {', '.join(NORMS)}")
    if trainer.ghost < 2:
        raise ValueError(f"ghost = {trainer.ghost}: must be at least 2")
    if trainer.bn == "ghost" and trainer.team > 1:
        raise SettingError(
            f"train.bn = ghost: a team's copies of an image are one batch, and train.team = "
            f"{trainer.team}; use local or sync"
        )


def _check_labels(trainer: Trainer) -> None:
    if trainer.unlabelled is None or trainer.unlabelled.has_labels:
        return
    trainer.objective.check_labels()
    if trainer.attack.reads_labels:
        raise ValueError(
            f"attack {type(trainer.attack).__name__}: must know the right answers, and there are "
            "images without labels; use pgd (its own loss, no patience), fgsm or n-fgsm, or "
            "pseudo-labels"
        )


def _check_pgd(attack: PGD, trainer: Trainer) -> None:
    beyond = trainer.augmentation.beyond_moving()
    if attack.carry and beyond:
        raise SettingError(
            f"attack.carry = true: perturbations can follow crops and flips, not {beyond}; use "
            "data.augmentation none, crop or crop-flip without cutout and randaugment"
        )
    if attack.patience is not None:
        trainer.objective.check_patience()
        if trainer.compute.compile == "on":
            raise SettingError(
                f"attack.patience = {attack.patience}: would compile the network anew for every "
                "number of images that are left; use compute.compile off"
            )
        if trainer.attack_bn == "train":
            raise SettingError(
                f"attack.patience = {attack.patience}: images leave the batch, and those that are "
                "left would be normalised by other statistics; use train.attack_bn eval"
            )
