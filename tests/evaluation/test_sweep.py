"""RA over eps and over steps."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dat.core.threat import ThreatModel
from dat.data import ImageData
from dat.distributed import World
from dat.evaluation import Curve, assess, sweep
from dat.evaluation.checks import check_curve
from tests.evaluation.cases import THREAT, THREATS, ProgressRecorder, right


@pytest.mark.parametrize("threat", THREATS, ids=lambda threat: threat.norm)
def test_ra_falls_over_eps_and_over_steps(
    model: nn.Module, data: ImageData, world: World, threat: ThreatModel
) -> None:
    radii = tuple(threat.eps * share for share in (0, 0.25, 0.5, 1, 2, 4))
    over_eps, over_steps = sweep(
        model, data, threat=threat, eps=radii, steps=(1, 2, 20), at_steps=5, world=world
    )
    assert (over_eps.over, over_steps.over) == ("eps", "steps")
    assert over_eps.values == radii
    assert over_steps.values == (1.0, 2.0, 20.0)
    ta = 100 * float(right(model, data).double().mean())
    assert over_eps.ra[0] == pytest.approx(ta)
    assert list(over_eps.ra) == sorted(over_eps.ra, reverse=True)
    assert over_eps.ra[-1] < 5 < over_eps.ra[3] < over_eps.ra[1]
    assert list(over_steps.ra) == sorted(over_steps.ra, reverse=True)
    assert not [text for curve in (over_eps, over_steps) for text in check_curve(*curve)]


@pytest.mark.parametrize("attack", ["pgd", "cw", "apgd-ce", "square"])
def test_a_point_of_a_curve_is_an_evaluation(
    model: nn.Module, small_data: ImageData, world: World, attack: str
) -> None:
    (curve,) = sweep(
        model, small_data, threat=THREAT, steps=(3,), attack=attack, seed=4, batch=7, world=world
    )
    evaluation = assess(model, small_data, [f"{attack}-3"], threat=THREAT, seed=4, world=world)
    assert curve == Curve("steps", (3.0,), (evaluation.ra(f"{attack}-3"),))


def test_the_seed_changes_the_random_starts(
    model: nn.Module, small_data: ImageData, world: World
) -> None:
    curves = {
        sweep(
            model, small_data, threat=THREAT, steps=(3,), attack="square", seed=seed, world=world
        )[0].ra
        for seed in range(4)
    }
    assert len(curves) > 1


def test_only_what_is_asked_for_is_swept(
    model: nn.Module, small_data: ImageData, world: World
) -> None:
    """In the order in which it is asked for, and as often."""
    radii = (0.1, 0.0, 0.1)
    (curve,) = sweep(model, small_data, threat=THREAT, eps=radii, at_steps=1, world=world)
    assert curve.over == "eps"
    assert curve.values == radii
    assert curve.ra[0] == curve.ra[2] < curve.ra[1]
    assert sweep(model, small_data, threat=THREAT, world=world) == []


def test_progress_counts_the_points(model: nn.Module, small_data: ImageData, world: World) -> None:
    progress = ProgressRecorder()
    sweep(
        model,
        small_data,
        threat=THREAT,
        eps=(0, 0.1),
        steps=(1,),
        at_steps=1,
        world=world,
        progress=progress,
    )
    assert progress.shown == [(1, 3), (2, 3), (3, 3)]


def test_without_a_world_it_joins_one(
    model: nn.Module, small_data: ImageData, no_launcher: None
) -> None:
    (alone,) = sweep(model, small_data, threat=THREAT, steps=(1,))
    (joined,) = sweep(model, small_data, threat=THREAT, steps=(1,), world=World.join())
    assert alone == joined


def test_an_attack_without_steps_is_refused(
    model: nn.Module, small_data: ImageData, world: World
) -> None:
    with pytest.raises(ValueError, match="unknown: did you mean autoattack"):
        sweep(model, small_data, threat=THREAT, steps=(5,), attack="autoattack", world=world)


def test_the_threat_keeps_its_norm(model: nn.Module, small_data: ImageData, world: World) -> None:
    """A tenth of a pixel's range breaks many in linf, and few in l2."""
    curves = [
        sweep(model, small_data, threat=ThreatModel(norm=norm), eps=(0.1,), at_steps=5, world=world)
        for norm in ("linf", "l2")
    ]
    (linf,), (l2,) = curves
    assert linf.ra[0] + 20 < l2.ra[0]
    assert torch.tensor(l2.ra).isfinite().all()
