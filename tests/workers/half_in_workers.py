"""Training in float16 with an overflow on one worker."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dat.attacks import FGSM, Free
from dat.core.threat import ThreatModel
from dat.data import ImageData
from dat.distributed import (
    Buckets,
    Gather,
    Ledger,
    Protocol,
    Quantizer,
    Reducer,
    World,
    local_tensor,
)
from dat.optim import SGD
from dat.train import Trainer
from dat.train.engine import Compute
from dat.train.loss_scaling import LossScale
from tests.trainers import make_trainer
from tests.workers.exchanges_in_workers import LENGTH, cases, slots

WORKERS, FAULTY, AT, STEPS = 3, 1, 2, 4
"""On one of the workers, the gradient overflows in one of the steps."""
VALUES = (1.0, float("inf"), float("-inf"), float("nan"))


EXCHANGES = cases(WORKERS) | {"gather 16": (Buckets(bits=16), Gather())}


def runs() -> dict[str, dict[str, Any]]:
    """Settings of a trainer, and where the gradient overflows."""
    names = ("dense", "chunked feedback", "ring feedback", "gather vector")
    some: dict[str, dict[str, Any]] = {
        name: {
            "quantizer": EXCHANGES[name][0],
            "protocol": EXCHANGES[name][1],
            "place": "weight",
        }
        for name in names
    }
    four = Buckets(bits=4)
    return some | {
        "sharded": {"shard": WORKERS, "place": "output"},
        "sharded, quantized": {"shard": WORKERS, "quantizer": four, "place": "output"},
        "synchronized batch norm": {"bn": "sync", "place": "output"},
        "awp": {"awp": 0.01, "place": "weight"},
        "in pieces": {"compute": Compute(precision="float16", pieces=2), "place": "output"},
        "free": {"attack": Free(replays=2), "place": "image"},
        "nowhere": {"place": None},
    }


class Net(nn.Module):
    """The gradient of an image or of the logits overflows where `plant` says."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng([]):
            torch.manual_seed(0)
            hidden = nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten()
            self.layers = nn.Sequential(*hidden, nn.Linear(96, 3))
        self.place: str | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.place == "image":
            x = _with_inf_in_gradient(x)
        logits: Tensor = self.layers(x)
        if self.training and self.place == "output":
            logits = _with_inf_in_gradient(logits)
        return logits

    def plant(self, place: str | None) -> None:
        self.place = place


def _with_inf_in_gradient(x: Tensor) -> Tensor:
    x = x.clone()
    if x.requires_grad:
        x.register_hook(_with_inf)
    return x


def _with_inf(gradient: Tensor) -> Tensor:
    gradient = gradient.clone()
    gradient.flatten()[-1] = float("inf")
    return gradient


def images() -> ImageData:
    random = torch.Generator().manual_seed(1)
    labels = torch.arange(12 * STEPS) % 3
    x = torch.rand((len(labels), 1, 6, 6), generator=random)
    return ImageData.of(x * 0.5 + labels.reshape(-1, 1, 1, 1) / 6, labels, classes=3)


def trainer(world: World, settings: Mapping[str, Any]) -> Trainer:
    defaults = {
        "threat": ThreatModel(eps=0.1),
        "attack": FGSM(),
        "optimizer": SGD(lr=0.05),
        "batch": 12,
        "epochs": 1,
        "compute": Compute(precision="float16"),
    }
    return make_trainer(model=Net(), data=images(), world=world, **defaults | dict(settings))


def step_by_step(world: World, *, place: str | None, **settings: Any) -> dict[str, Any]:
    """What happened to each step, and digests of what replicas have in common."""
    made = trainer(world, settings)
    made._join()
    made.model.train()
    part, skipped, scales, weights = made.parts.one(LossScale), [], [], [_weights(made)]
    assert isinstance(made.model, Net)
    for step in range(STEPS):
        handles = []
        if step == AT and world.rank == FAULTY:
            if place == "weight":
                weight = made.model.get_parameter("layers.0.weight")
                handles.append(weight.register_hook(_with_inf))
            else:
                made.model.plant(place)
        report = made.parts.take_step(0, step, partial(made._step, 0, step))
        made.model.plant(None)
        for handle in handles:
            handle.remove()
        skipped.append(report is None)
        scales.append(part.scale)
        weights.append(_weights(made))
    made.worker.exchange.close()
    return {"skipped": skipped, "scales": scales, "weights": weights, "sharded": made.sharded}


def _weights(made: Trainer) -> str:
    values = [local_tensor(value).contiguous() for value in made.model.state_dict().values()]
    digest = hashlib.blake2b()
    for value in values:
        digest.update(value.detach().numpy().tobytes())
    return digest.hexdigest()


def finite_sums(world: World, quantizer: Quantizer, protocol: Protocol) -> dict[str, bool]:
    """Whether the sum of gradients is finite if one value of one worker is each of VALUES. Errors
    would stay in the memories of error feedback, so these are reset."""
    reducer = Reducer(quantizer, protocol, world, length=LENGTH, ledger=Ledger(world.device))
    finite = {}
    for value in VALUES:
        gradient = torch.ones(LENGTH)
        if world.rank == FAULTY:
            gradient[LENGTH // 2] = value
        finite[str(value)] = bool(reducer.sum(0, gradient, slots()).wait().isfinite().all())
        for memory in reducer.memories or ():
            memory.residual.zero_()
    reducer.close()
    return finite


def main(folder: Path) -> None:
    with World.join(device="cpu", threads=1) as world:
        results: dict[str, Any] = {
            name: step_by_step(world, **settings) for name, settings in runs().items()
        }
        results["finite"] = {name: finite_sums(world, *EXCHANGES[name]) for name in EXCHANGES}
        (folder / f"{world.rank}.json").write_text(json.dumps(results))
