"""Images, networks and losses shared by the attack tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dat.attacks import ATTACKS, Attack, AttackTarget, Loss, Targeted
from dat.core.losses import cross_entropy

Network = Callable[[Tensor], Tensor]

CLASSES = 5
CHEAP = {"steps": 3, "queries": 5, "targets": 2}
"""Enough for tests of invariants."""
CLOSURE, TARGET, UNTIL_BROKEN = "closure", "target", "until-broken"

both_norms = pytest.mark.parametrize("norm", ["linf", "l2"])


def images(shape: tuple[int, ...], *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Images with many pixels of exactly 0 or 1."""
    random = torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    return (2 * random - 0.5).clamp(0, 1)


def wavy(
    pixels: int,
    *,
    classes: int = CLASSES,
    slope: float = 1.0,
    dtype: torch.dtype = torch.float32,
    seed: int = 1,
) -> Network:
    """Logits that are neither concave nor monotone in any pixel, behind a layer that YOPO can find;
    nothing here draws from the global generator."""
    w = torch.randn(pixels, classes, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    layer = nn.utils.skip_init(nn.Linear, pixels, classes, bias=False, dtype=dtype)
    layer.weight = nn.Parameter(w.T.contiguous(), requires_grad=False)
    return lambda x: slope * torch.sin(layer(x.flatten(1)))


@torch.no_grad()
def answers(network: Network, x: Tensor) -> Tensor:
    """The network's predictions; as labels, they make every image correct."""
    return network(x).argmax(1)


def wrong(network: Network, x: Tensor, y: Tensor) -> Tensor:
    return answers(network, x) != y


def goal(kind: str, network: Network, y: Tensor) -> Loss:
    """The cross-entropy as a plain closure, or as an attack target."""
    if kind == CLOSURE:
        return lambda x: cross_entropy(network(x), y)
    return AttackTarget(network, y, until_broken=kind == UNTIL_BROKEN)


def cheap(attack: Attack, **settings: Any) -> Attack:
    """The attack with the given settings, where it has them; by default, with few steps."""
    names = {field.name for field in dataclasses.fields(attack)}
    values = settings or CHEAP
    return dataclasses.replace(attack, **{k: v for k, v in values.items() if k in names})


def takes_a_closure(attack: Attack) -> bool:
    """Whether it works without labels: it is not targeted and has no loss of its own."""
    return not isinstance(attack, Targeted) and getattr(attack, "loss", "given") == "given"


def variants() -> list[Attack]:
    """Each attack with its defaults, but cheap; and with each flag flipped, each count one higher
    and each other choice."""
    attacks = []
    for kind in ATTACKS.values():
        attack = cheap(kind())
        attacks.append(attack)
        for field in dataclasses.fields(kind):
            value = getattr(attack, field.name)
            others: list[object] = []
            if isinstance(value, bool):
                others = [not value]
            elif isinstance(value, int):
                others = [value + 1]
            elif choices := field.metadata["limits"].choices:
                others = [choice for choice in choices if choice != value]
            attacks += [dataclasses.replace(attack, **{field.name: other}) for other in others]
    return attacks


def goals_of(attack: Attack) -> list[str]:
    """The kinds of loss an attack is tested with; UNTIL_BROKEN only for the default variant."""
    kinds = [CLOSURE] * takes_a_closure(attack) + [TARGET]
    return kinds + [UNTIL_BROKEN] * (attack == cheap(type(attack)()))
