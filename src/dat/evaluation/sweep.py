"""RA over the size of the ball and over the steps of the attack (Figure 3 of the paper)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import nn

from dat.comm import World
from dat.data import ImageData
from dat.evaluation.accuracy import world_of
from dat.evaluation.assess import assess
from dat.evaluation.survey import Progress, silent
from dat.threat import ThreatModel


class Curve(NamedTuple):
    """RA over `eps` or over `steps`."""

    over: str
    values: tuple[float, ...]
    ra: tuple[float, ...]


def sweep(
    model: nn.Module,
    data: ImageData,
    *,
    threat: ThreatModel,
    eps: Sequence[float] = (),
    steps: Sequence[int] = (),
    attack: str = "pgd",
    at_steps: int = 20,
    batch: int = 256,
    seed: int = 0,
    precision: str = "float32",
    world: World | None = None,
    progress: Progress = silent,
) -> list[Curve]:
    """A curve over `eps`, at `at_steps` steps, and one over `steps`, at the threat model's eps.

    `attack` is pgd, cw or apgd-ce, ...: whatever takes a number of steps.
    """
    world = world_of(model) if world is None else world
    plans = {
        "eps": [(float(value), replace(threat, eps=value), at_steps) for value in eps],
        "steps": [(float(value), threat, value) for value in steps],
    }
    total, curves = sum(map(len, plans.values())), []
    measured = 0
    for over, plan in plans.items():
        reached = []
        for _, ball, count in plan:
            name = f"{attack}-{count}"
            found = assess(
                model,
                data,
                [name],
                threat=ball,
                world=world,
                batch=batch,
                seed=seed,
                precision=precision,
                check=False,
            )
            reached.append(found.ra(name))
            measured += 1
            progress(measured, total)
        if plan:
            curves.append(Curve(over, tuple(value for value, *_ in plan), tuple(reached)))
    return curves
