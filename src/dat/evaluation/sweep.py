"""RA over eps and over the steps of the attack (Figure 3 of the paper)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import nn

from dat.core.progress import Progress, reporting
from dat.core.threat import ThreatModel
from dat.data import Data, image_data
from dat.distributed import World
from dat.evaluation.assess import assess
from dat.evaluation.workers import world_of


class Curve(NamedTuple):
    """RA over `eps` or over `steps`, in percent."""

    over: str
    values: tuple[float, ...]
    ra: tuple[float, ...]


def sweep(
    model: nn.Module,
    data: Data,
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
    progress: Progress | bool = False,
) -> list[Curve]:
    """A curve over `eps`, with `at_steps` steps, and one over `steps`, at the threat model's eps.

    `attack` is any attack with a number of steps, such as pgd, cw or apgd-ce.
    """
    data, world = image_data(data), world_of(model) if world is None else world
    points = {
        "eps": [(float(value), replace(threat, eps=value), at_steps) for value in eps],
        "steps": [(float(value), threat, value) for value in steps],
    }
    total, curves = sum(map(len, points.values())), []
    done = 0
    with reporting(progress, "sweeping", show=world.first) as report:
        for over, settings in points.items():
            ra = []
            for _, point_threat, count in settings:
                name = f"{attack}-{count}"
                evaluation = assess(
                    model,
                    data,
                    [name],
                    threat=point_threat,
                    world=world,
                    batch=batch,
                    seed=seed,
                    precision=precision,
                    check=False,
                )
                ra.append(evaluation.ra(name))
                done += 1
                report(done, total)
            if settings:
                curves.append(Curve(over, tuple(value for value, *_ in settings), tuple(ra)))
    return curves
