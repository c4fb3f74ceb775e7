"""Images, networks and goals that the tests of the attacks share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dat.attacks import ATTACKS, Attack, Loss, Targeted, Victim
from dat.losses import cross_entropy

Network = Callable[[Tensor], Tensor]

CLASSES = 5
CHEAP = {"steps": 3, "queries": 5, "targets": 2}
"""What an invariant needs no more of."""
CLOSURE, VICTIM, UNTIL_BROKEN = "closure", "victim", "until-broken"

both_norms = pytest.mark.parametrize("norm", ["linf", "l2"])


def images(shape: tuple[int, ...], *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Images of which many pixels are exactly 0 or 1."""
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
    """The network's own, so that every image is right to begin with."""
    return network(x).argmax(1)


def wrong(network: Network, x: Tensor, y: Tensor) -> Tensor:
    return answers(network, x) != y


def goal(kind: str, network: Network, y: Tensor) -> Loss:
    """The cross-entropy as a bare closure, or as a victim's."""
    if kind == CLOSURE:
        return lambda x: cross_entropy(network(x), y)
    return Victim(network, y, until_broken=kind == UNTIL_BROKEN)


def cheap(attack: Attack, **settings: Any) -> Attack:
    """The attack with those of the settings that it has, else with few steps."""
    names = {field.name for field in dataclasses.fields(attack)}
    wanted = settings or CHEAP
    return dataclasses.replace(attack, **{k: v for k, v in wanted.items() if k in names})


def takes_a_closure(attack: Attack) -> bool:
    """Whether it can do without the labels: it neither aims nor brings a loss of its own."""
    return not isinstance(attack, Targeted) and getattr(attack, "loss", "given") == "given"


def variants() -> list[Attack]:
    """Each attack as it comes, but cheap; with each switch thrown, each count one higher, and each
    other choice made."""
    found = []
    for kind in ATTACKS.values():
        attack = cheap(kind())
        found.append(attack)
        for field in dataclasses.fields(kind):
            value = getattr(attack, field.name)
            others: list[object] = []
            if isinstance(value, bool):
                others = [not value]
            elif isinstance(value, int):
                others = [value + 1]
            elif choices := field.metadata["limits"].choices:
                others = [choice for choice in choices if choice != value]
            found += [dataclasses.replace(attack, **{field.name: other}) for other in others]
    return found


def goals_of(attack: Attack) -> list[str]:
    """Those it can be set; of its variants, one is enough for what happens to the batch."""
    found = [CLOSURE] * takes_a_closure(attack) + [VICTIM]
    return found + [UNTIL_BROKEN] * (attack == cheap(type(attack)()))
