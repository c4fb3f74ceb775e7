"""An attack bound to a model, which is called with images and labels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from dat.attacks.base import Attack
from dat.attacks.inputs import check_classes, check_images, check_labels
from dat.attacks.mode import attack_mode
from dat.attacks.suites import SUITES, attack_named
from dat.attacks.target import AttackTarget, Loss
from dat.core.lazy import torch
from dat.core.losses import cross_entropy
from dat.core.rng import Streams
from dat.core.settings import did_you_mean
from dat.core.threat import ThreatModel

if TYPE_CHECKING:
    from torch import Tensor, nn


class BoundAttack:
    """An attack on one model: `atk(x, y)` returns adversarial examples.

    The model is attacked in eval mode, and is left as it was. Random numbers are those of the seed
    and of the number of images attacked before, so results do not depend on the batch size.
    """

    def __init__(
        self,
        model: nn.Module,
        attack: Attack,
        threat: ThreatModel,
        *,
        name: str = "",
        seed: int = 0,
        targeted: bool = False,
    ) -> None:
        self.model, self.attack, self.threat = model, attack, threat
        self.name, self.seed, self.targeted = name, seed, targeted
        self._attacked = 0
        self._networks: dict[object, tuple[nn.Module, int]] = {}

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """Adversarial examples of `x`, on the model's device; `y` are the labels or, if `targeted`,
        the classes to predict instead."""
        check_images(type(self.attack).__name__, x, self.threat)
        check_labels(y, len(x))
        with attack_mode(self.model):
            parameter = next(self.model.parameters(), x)
            x, y = x.detach().to(parameter.device), y.to(parameter.device, torch.int64, copy=True)
            if len(x) == 0:
                return x
            network, classes = self._network(x[:2])
            check_classes(y, classes)
            index = torch.arange(self._attacked, self._attacked + len(x), device=x.device)
            draws = Streams.of(self.seed, "attack", index=index)
            x_adv = self.attack(self._loss(network, y), x, self.threat, draws)
        self._attacked += len(x)
        return x_adv.detach()

    def _network(self, x: Tensor) -> tuple[nn.Module, int]:
        """The model as attacks can call it for images like `x`, and its number of classes."""
        from dat.core.adapter import adapted, checked_logits  # needs torch

        kind = (x.shape[1:], x.dtype, x.device)
        if kind not in self._networks:
            x = x.clone(memory_format=torch.contiguous_format)  # what every model takes
            network = adapted(self.model, x)
            classes = checked_logits(network, x).shape[1]
            if self.name:
                attack_named(self.name, classes)  # raises if these are too few
            self._networks[kind] = network, classes
        return self._networks[kind]

    def _loss(self, network: Callable[[Tensor], Tensor], y: Tensor) -> Loss:
        if self.targeted:
            return lambda images: -cross_entropy(network(images), y)
        return AttackTarget(network, y, until_broken=True)

    def __repr__(self) -> str:
        model = type(self.model).__name__
        return f"{self.attack!r} on {model}, {self.threat!r}, seed={self.seed}"


def on(
    model: nn.Module,
    attack: str | Attack,
    *,
    eps: float = 8 / 255,
    norm: str = "linf",
    seed: int = 0,
    targeted: bool = False,
    **options: Any,
) -> BoundAttack:
    """An attack on a model, by name: `atk = on(model, "pgd-20", eps=8/255)`, `x_adv = atk(x, y)`.

    The model maps images in [0, 1] to logits. The names are those of `dat evaluate --attacks`
    (`fgsm`, `pgd-20`, `apgd-ce`, `square`, ...), and `options` are the attack's own, such as
    `step_size`, `restarts` and `random_start` of PGD. For AutoAttack, use `dat.autoattack`.
    """
    name = attack if isinstance(attack, str) else ""
    chosen = _with_options(_attack(attack), options)
    if targeted and chosen.reads_labels:
        raise ValueError(
            f"targeted: {name or type(chosen).__name__} chooses its own loss; use fgsm, pgd-20 or "
            "apgd-ce"
        )
    threat = ThreatModel(norm=norm, eps=eps)
    return BoundAttack(model, chosen, threat, name=name, seed=seed, targeted=targeted)


def _attack(attack: str | Attack) -> Attack:
    if isinstance(attack, Attack):
        return attack
    if not isinstance(attack, str):
        raise ValueError(f"attack = {attack!r}: must be a name such as 'pgd-20', or a dat.Attack")
    if attack in SUITES:
        raise ValueError(f"attack {attack!r}: is not a single attack; use dat.autoattack")
    return attack_named(attack)


def _with_options(attack: Attack, options: dict[str, Any]) -> Attack:
    known = [field.name for field in fields(attack)]
    for option in options:
        if option not in known:
            near = did_you_mean(option, ("eps", "norm", "seed", "targeted", *known))
            raise ValueError(f"{type(attack).__name__} has no option {option!r}{near}")
    return replace(attack, **options)
