"""Checks for gradient masking: a network may survive attacks only because they fail to optimize.

The usual causes (Athalye et al. 2018, Carlini et al. 2019): gradients that vanish or mislead,
randomized outputs, a softmax inside the network.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from dat.attacks import FGSM, PGD, AttackTarget
from dat.attacks.target import NoImageGradient, value_and_grad
from dat.core.adapter import checked_logits
from dat.core.rng import seeded
from dat.core.threat import ThreatModel
from dat.evaluation.runner import SuiteResult

PROBED = 64
"""Number of images that the checks use."""
MIN_SHARE = 0.05
"""Share of the images above which a sign is reported."""
SQUARE_SHARE = 0.002
"""If Square alone breaks more than this share, and more than one image, that is suspicious (Croce &
Hein 2020)."""
VANISHED = 1e-10
RISE = 1.0
"""Increase of RA, in points, that may be due to chance."""


def check_logits(model: nn.Module, x: Tensor, classes: int) -> list[str]:
    """Raise if the outputs are not logits of the right shape; warn if they impede attacks."""
    logits = checked_logits(model, x)
    if logits.shape[1] < max(classes, 2):
        raise ValueError(
            f"the model gives {logits.shape[1]} logits per image, but labels go up to {classes - 1}"
        )
    broken = ~logits.isfinite().all(1)
    if broken.any():
        raise ValueError(
            f"the model's logits are not finite for {int(broken.sum())} of {len(x)} clean images"
        )
    return [*check_probabilities(logits), *_randomness(model, x, logits)]


def check_probabilities(logits: Tensor) -> list[str]:
    """Warn if a model's outputs are probabilities."""
    inside = logits.min() >= -1e-5 and logits.max() <= 1 + 1e-5
    if inside and ((logits.sum(1) - 1).abs() < 1e-4).all():
        return [
            "the model's outputs are probabilities, not logits: a softmax inside the network masks "
            "gradients; remove it"
        ]
    return []


def _randomness(model: nn.Module, x: Tensor, logits: Tensor) -> list[str]:
    with torch.no_grad(), seeded(x.device, 0, "check", 1):
        again = model(x)
    change = (again - logits).norm(dim=1) / logits.norm(dim=1).clamp_min(1e-12)
    if change.max() > 1e-4:
        return [
            "the model is randomized: the same image gives different logits "
            f"(they change by {float(change.max()):.1%}); use autoattack-rand"
        ]
    return []


def check_gradients(network: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> list[str]:
    """Whether the cross-entropy has usable gradients."""
    try:
        looked = value_and_grad(AttackTarget(network, y), x)
    except NoImageGradient as error:
        return [str(error)]
    correct, warnings = ~looked.misclassified, list[str]()
    if not correct.any():
        return []
    vanished = looked.gradient[correct].flatten(1).abs().amax(1) < VANISHED
    saturated = looked.loss[correct] < VANISHED
    if vanished.float().mean() > MIN_SHARE:
        warnings.append(
            f"gradients vanish at {int(vanished.sum())} of {len(vanished)} images: attacks on the "
            "cross-entropy fail there"
        )
    if saturated.float().mean() > MIN_SHARE:
        warnings.append(
            f"the logits saturate: the cross-entropy is 0 at {int(saturated.sum())} of "
            f"{len(saturated)} images; trust attacks on margins (cw, apgd-t) more"
        )
    return warnings


def check_attacks(
    network: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, threat: ThreatModel
) -> list[str]:
    """A stronger attack must break more: many steps more than one, a larger ball more than a
    smaller one, and an unbounded attack nearly everything."""
    with torch.no_grad():
        correct = ~AttackTarget(network, y).misclassified(network(x))
    x, y = x[correct], y[correct]
    if len(x) == 0 or threat.eps == 0:
        return []
    pixels = x.shape[1:].numel()
    unbounded = 1.0 if threat.norm == "linf" else pixels**0.5
    larger = min(4 * threat.eps, unbounded)
    target, warnings = AttackTarget(network, y), list[str]()

    def broken(attack: FGSM | PGD, eps: float) -> Tensor:
        x_adv = attack(target, x, ThreatModel(norm=threat.norm, eps=eps))
        with torch.no_grad():
            return target.misclassified(network(x_adv))

    try:
        single = broken(FGSM(step_ratio=1.0, random_start=False), threat.eps)
    except NoImageGradient:  # reported by check_gradients
        return []
    iterated = broken(PGD(steps=20), threat.eps)
    missed = single & ~iterated
    if missed.float().mean() > MIN_SHARE:
        warnings.append(
            f"FGSM breaks {int(missed.sum())} of {len(x)} images that PGD-20 does not: more "
            "gradient steps do not help, so the gradients mislead"
        )
    enlarged = broken(PGD(steps=20), larger)
    robust = float((~iterated).float().mean())
    if robust > 0.2 and float((~enlarged).float().mean()) >= robust:
        warnings.append(
            f"RA does not fall when eps grows from {threat.eps:.3g} to {larger:.3g} "
            f"(PGD-20, {len(x)} images)"
        )
    survivors = ~broken(PGD(steps=20, step_size=unbounded / 8), unbounded)
    surviving = float(survivors.float().mean())
    if surviving > 0.2:
        warnings.append(
            f"with an unbounded perturbation (eps = {unbounded:.3g}), {surviving:.0%} of {len(x)} "
            "images still survive PGD-20: the attack fails to optimize"
        )
    return warnings


def check_square(result: SuiteResult) -> list[str]:
    """A black-box attack should not break what gradient attacks could not."""
    if "square" not in result.attacks or len(result.attacks) == 1:
        return []
    count = result.counts()["square"]
    if count > max(SQUARE_SHARE * len(result.broken_by), 1):
        images = f"{count} image{'s' * (count != 1)}"
        return [
            f"Square, which uses no gradients, broke {images} that the gradient attacks could "
            "not: the gradients mislead, and the true RA may be lower"
        ]
    return []


def check_curve(over: str, values: Sequence[float], ra: Sequence[float]) -> list[str]:
    """RA must fall as eps grows, and not rise with the number of steps."""
    warnings = []
    for (low, before), (high, after) in pairwise(sorted(zip(values, ra, strict=True))):
        if after > before + RISE:
            warnings.append(
                f"RA rises from {before:.1f} to {after:.1f} % as {over} grows from {low:.3g} to "
                f"{high:.3g}: the stronger attack breaks fewer images, so the gradients mislead"
            )
    smallest, largest = min((value for value in values if value > 0), default=0.0), max(values)
    if over != "eps" or not largest >= 2 * smallest > 0:
        return warnings
    first, last = ra[values.index(smallest)], ra[values.index(largest)]
    if first > 20 and last > first - RISE:
        warnings.append(
            f"RA does not fall as eps grows from {smallest:.3g} to {largest:.3g} ({first:.1f} to "
            f"{last:.1f} %)"
        )
    return warnings
