"""Signs of false robustness: a network may withstand an attack because the attack is blind.

The usual suspects (Athalye et al. 2018, Carlini et al. 2019): gradients that vanish or mislead,
answers that are random, a softmax inside the network.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from dat.attacks import FGSM, PGD, Victim
from dat.attacks.victim import look
from dat.evaluation.survey import Verdicts
from dat.rng import seeded
from dat.threat import ThreatModel

IMAGES = 64
"""So many images are probed."""
SOME = 0.05
"""Below this share of the images nothing is said."""
SQUARE_SHARE = 0.002
"""More than this share fallen to Square alone, and more than one image, is suspicious (Croce & Hein
2020)."""
VANISHED = 1e-10
RISE = 1.0
"""Points of RA that may be chance."""


def check_answers(model: nn.Module, x: Tensor, classes: int) -> list[str]:
    """Errors for answers that cannot be judged, warnings for those that mislead."""
    with torch.no_grad(), seeded(x.device, 0, "check"):
        try:
            logits = model(x)
        except Exception as error:
            raise ValueError(
                f"the model cannot take images of shape {tuple(x.shape[1:])} "
                f"({' '.join(str(error).split())})"
            ) from error
    if not isinstance(logits, Tensor) or logits.dim() != 2 or logits.shape[0] != len(x):
        given = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise ValueError(
            f"the model gives {given} for {len(x)} images: must be ({len(x)}, classes)"
        )
    if logits.shape[1] < max(classes, 2):
        raise ValueError(
            f"the model gives {logits.shape[1]} logits an image, but labels go up to {classes - 1}"
        )
    broken = ~logits.isfinite().all(1)
    if broken.any():
        raise ValueError(
            f"the model's logits are not finite for {int(broken.sum())} of {len(x)} clean images"
        )
    return [*_probabilities(logits), *_randomness(model, x, logits)]


def _probabilities(logits: Tensor) -> list[str]:
    inside = logits.min() >= -1e-5 and logits.max() <= 1 + 1e-5
    if inside and ((logits.sum(1) - 1).abs() < 1e-4).all():
        return [
            "the model's outputs are probabilities, not logits: a softmax inside the network hides "
            "gradients; leave it out"
        ]
    return []


def _randomness(model: nn.Module, x: Tensor, logits: Tensor) -> list[str]:
    with torch.no_grad(), seeded(x.device, 0, "check", 1):
        again = model(x)
    change = (again - logits).norm(dim=1) / logits.norm(dim=1).clamp_min(1e-12)
    if change.max() > 1e-4:
        return [
            "the model answers at random: the same image twice gives other logits "
            f"(they change by {float(change.max()):.1%}); use autoattack-rand"
        ]
    return []


def check_gradients(network: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> list[str]:
    """Whether the cross-entropy shows a way at all."""
    seen = look(Victim(network, y), x)
    right, found = ~seen.broken, list[str]()
    if not right.any():
        return []
    vanished = seen.gradient[right].flatten(1).abs().amax(1) < VANISHED
    certain = seen.loss[right] < VANISHED
    if vanished.float().mean() > SOME:
        found.append(
            f"gradients vanish at {int(vanished.sum())} of {len(vanished)} images: attacks on the "
            "cross-entropy are blind there"
        )
    if certain.float().mean() > SOME:
        found.append(
            f"the logits saturate: the cross-entropy is 0 at {int(certain.sum())} of "
            f"{len(certain)} images; trust attacks on margins (cw, apgd-t) more"
        )
    return found


def check_attacks(
    network: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, threat: ThreatModel
) -> list[str]:
    """A stronger attack must break more: many steps more than one, a larger ball more than a
    smaller one, and the whole box nearly everything."""
    with torch.no_grad():
        right = ~Victim(network, y).wrong(network(x))
    x, y = x[right], y[right]
    if len(x) == 0 or threat.eps == 0:
        return []
    pixels = x.shape[1:].numel()
    everything = 1.0 if threat.norm == "linf" else pixels**0.5
    larger = min(4 * threat.eps, everything)
    victim, found = Victim(network, y), list[str]()

    def broken(attack: FGSM | PGD, eps: float) -> Tensor:
        x_adv = attack(victim, x, ThreatModel(norm=threat.norm, eps=eps))
        with torch.no_grad():
            return victim.wrong(network(x_adv))

    single = broken(FGSM(step_ratio=1.0, random_start=False), threat.eps)
    many = broken(PGD(steps=20), threat.eps)
    missed = single & ~many
    if missed.float().mean() > SOME:
        found.append(
            f"FGSM breaks {int(missed.sum())} of {len(x)} images that PGD-20 does not: following "
            "the gradient further does not help, so it misleads"
        )
    further = broken(PGD(steps=20), larger)
    standing = float((~many).float().mean())
    if standing > 0.2 and float((~further).float().mean()) >= standing:
        found.append(
            f"RA does not fall when eps grows from {threat.eps:.3g} to {larger:.3g} "
            f"(PGD-20, {len(x)} images)"
        )
    anywhere = float((~broken(PGD(steps=20, step_size=everything / 8), everything)).float().mean())
    if anywhere > 0.2:
        found.append(
            f"where any image is allowed (eps = {everything:.3g}), {anywhere:.0%} of {len(x)} "
            "images still withstand PGD-20: it does not find its way"
        )
    return found


def check_square(verdicts: Verdicts) -> list[str]:
    """Black-box search should not break what gradients could not."""
    if "square" not in verdicts.attacks or len(verdicts.attacks) == 1:
        return []
    fell = verdicts.counts()["square"]
    if fell > max(SQUARE_SHARE * len(verdicts.fell), 1):
        images = f"{fell} image{'s' * (fell != 1)}"
        return [
            f"Square, which uses no gradients, broke {images} that the gradient attacks could "
            "not: the gradients mislead, and RA may be lower still"
        ]
    return []


def check_curve(over: str, values: Sequence[float], ra: Sequence[float]) -> list[str]:
    """RA must fall as eps grows, and not rise with the number of steps."""
    found = []
    for (low, before), (high, after) in pairwise(sorted(zip(values, ra, strict=True))):
        if after > before + RISE:
            found.append(
                f"RA rises from {before:.1f} to {after:.1f} % as {over} grows from {low:.3g} to "
                f"{high:.3g}: the stronger attack finds less, so it is misled"
            )
    least, most = min((value for value in values if value > 0), default=0.0), max(values)
    if over != "eps" or not most >= 2 * least > 0:
        return found
    first, last = ra[values.index(least)], ra[values.index(most)]
    if first > 20 and last > first - RISE:
        found.append(
            f"RA does not fall as eps grows from {least:.3g} to {most:.3g} ({first:.1f} to "
            f"{last:.1f} %)"
        )
    return found
