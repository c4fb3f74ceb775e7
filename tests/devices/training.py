"""Training and evaluation on the CPU and on the simulated device, by one worker or several."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from dat import evaluation
from dat.attacks import ATTACKS, FGSM, PGD
from dat.core.threat import ThreatModel
from dat.data import ImageData
from dat.distributed import CONCRETE_PROTOCOLS, QUANTIZERS, Buckets, Gather, Hybrid, World
from dat.distributed.protocols import Protocol
from dat.evaluation.certification import certify, predict
from dat.objectives import OBJECTIVES, Smooth
from dat.optim import OPTIMIZERS, SGD
from dat.train.engine import Compute
from tests.attacks.cases import cheap
from tests.train.test_every_option import VALUES
from tests.trainers import make_trainer

Run = Callable[[World], Any]
CLASSES = 4
THREAT = ThreatModel(eps=0.1)


def images(count: int = 24) -> ImageData:
    random = torch.Generator().manual_seed(5)
    pictures = torch.rand(count, 3, 8, 8, generator=random)
    return ImageData.of(pictures, torch.arange(count) % CLASSES, classes=CLASSES)


def network() -> nn.Module:
    """With batch normalization. A bias before it would have no gradient but the rounding error."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        first, second = (nn.Conv2d(n, 4, 3, stride=n - 2, bias=False) for n in (3, 4))
        norms = (nn.BatchNorm2d(4), nn.ReLU()), (nn.BatchNorm2d(4), nn.ReLU())
        return nn.Sequential(first, *norms[0], second, *norms[1], nn.Flatten(), nn.Linear(16, 4))


def train(settings: dict[str, Any], world: World) -> Any:
    """Two steps; the weights, and what else was trained."""
    given: dict[str, Any] = {
        "model": network(),
        "data": images(),
        "attack": PGD(steps=2),
        "optimizer": SGD(lr=0.1),
        "epochs": 1,
        "batch": 12,
        "threat": THREAT,
        "compute": Compute(kernels=False),
        "world": world,
    }
    if "shard" in settings:  # `Parameter.data = ...` does not take a tensor of another class
        given["model"] = given["model"].to(world.device)
    trainer = make_trainer(**given | settings)
    records = trainer.fit()
    trainer.gather_weights()
    models = [trainer.best_model(), *trainer.unsharded_models().values()]
    weights = [tensor for model in models for tensor in model.state_dict().values()]
    return weights, [[record.loss, record.train_ra] for record in records]


def train_or_refuse(settings: dict[str, Any], world: World) -> Any:
    try:
        return train(settings, world)
    except ValueError as error:
        return str(error)


def assess(settings: dict[str, Any], world: World) -> Any:
    model = network().to(world.device)
    given: dict[str, Any] = {"threat": THREAT, "batch": 10, "world": world}
    result = evaluation.evaluate(model, images(), **given | settings)
    return [result.ta, result.ra] if isinstance(result, evaluation.Accuracy) else list(ras(result))


def ras(result: evaluation.Assessment) -> Iterator[float]:
    yield result.ta
    yield from (result.ra(name) for name in result.suites)


def attack_at_once(world: World) -> Any:
    model = network().to(world.device)
    x, y = images(6).batch(torch.arange(6), world.device)
    attacked = evaluation.autoattack(model, x, y, eps=0.1, version="rand", world=world)
    return attacked.examples, list(attacked.counts.values())


def certified(world: World) -> Any:
    model = network().to(world.device)
    given: dict[str, Any] = {"sigma": 0.1, "n": 64, "batch": 64}
    x, y = images(4).batch(torch.arange(4), world.device)
    result = certify(model, x, y, world=world, **given)
    return predict(model, x, **given), result.radius.tolist()


PLAIN: dict[str, dict[str, Any]] = {"adamw": {"fused": False}}
"""The simulated device has no fused kernels."""


def runs(workers: int) -> Iterator[tuple[str, Run]]:
    """What one worker trains, or several train together."""
    return runs_of_one() if workers == 1 else runs_of_several(workers)


def runs_of_one() -> Iterator[tuple[str, Run]]:
    for name, kind in ATTACKS.items():
        yield f"train attack {name}", partial(train, {"attack": cheap(kind())})
    for made in (PGD(steps=2, carry=True), PGD(steps=2, patience=1)):
        yield f"train attack {made!r}", partial(train, {"attack": made})
    for name, objective in OBJECTIVES.items():
        yield f"train objective {name}", partial(train, {"objective": objective()})
    for name, optimizer in OPTIMIZERS.items():
        chosen = optimizer(lr=0.1, **PLAIN.get(name, {}))
        yield f"train optimizer {name}", partial(train, {"optimizer": chosen})
    held_out = {"holdout": images(8), "epochs": 2, "attack": FGSM()}
    for key, value in VALUES:
        yield f"train {key}={value}", partial(train_or_refuse, held_out | {key: value})
    choices: list[dict[str, Any]] = [{"precision": "bfloat16"}, {"pieces": 2}, {"fold": False}]
    for choice in choices:
        compute = Compute(kernels=False, **choice)
        yield f"train compute {choice}", partial(train, {"compute": compute})
    evaluations: list[dict[str, Any]] = [
        {"attack": PGD(steps=2), "restarts": 2},
        {"attacks": ["pgd-2", "square-5"]},
    ]
    for evaluated in evaluations:
        yield f"evaluate {list(evaluated)}", partial(assess, evaluated)
    yield "autoattack", attack_at_once
    yield "certify", certified


def runs_of_several(workers: int) -> Iterator[tuple[str, Run]]:
    for quantizer in QUANTIZERS.values():
        for protocol in CONCRETE_PROTOCOLS.values():
            for bits in (8, 32):
                if protocol is not Gather and quantizer is not Buckets:
                    continue  # groups.py has the others
                made, settled = quantizer(bits=bits), with_nodes(protocol(), workers)
                try:
                    settled.check(made, workers)
                except ValueError:
                    continue
                settings = {"quantizer": made, "protocol": settled}
                yield f"train {protocol.__name__} {made!r}", partial(train, settings)
    feedback = {"quantizer": Buckets(bits=4, error_feedback=True)}
    yield "train error feedback", partial(train, feedback)
    options: list[dict[str, Any]] = [
        *(
            {"team": workers, "objective": Smooth(copies=6)},
            {"bn": "sync"},
            {"bn": "ghost", "ghost": 2},
        ),
        *({"shard": workers, "gather": gather} for gather in ("attack", "block")),
        {"shard": workers, "quantizer": Buckets(bits=8)},
    ]
    for option in options:
        yield f"train {option}", partial(train, option)


def with_nodes(protocol: Protocol, workers: int) -> Protocol:
    return replace(protocol, inside=workers) if isinstance(protocol, Hybrid) else protocol
