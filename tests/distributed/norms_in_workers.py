"""Batch norms whose batch lies with several workers: alone, and in steps of training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from dat.attacks import PGD, Free
from dat.comm import Exchange, Ledger, Norms, Team, World
from dat.compute import Compute, Engine
from dat.data import ImageData, Source, Split, Supply
from dat.models import build_model
from dat.objectives import TRADES, Adversarial, GradAlign
from dat.optim import SGD
from dat.threat import ThreatModel
from dat.train import Worker
from dat.train.growth import Growth
from dat.train.perturbation import WeightAttack
from dat.train.step import dat_step

SHARES = {1: (12,), 2: (5, 7), 3: (5, 0, 7)}
"""Rows of each worker; one may have none."""
TOTAL = sum(SHARES[1])

BOTH = Adversarial(clean_weight=1.0)
CASES: dict[str, dict[str, Any]] = {
    "clean and attacked": {"objective": BOTH},
    "attacked in train mode": {"objective": TRADES(), "attack_bn": "train"},
    "weights attacked": {"objective": BOTH, "weights": WeightAttack(0.01)},
    "second derivatives": {"objective": GradAlign()},
    "free": {"attack": Free(replays=2)},
    "computed again": {"objective": BOTH, "compute": Compute(recompute=True)},
    "grown": {"growth": Growth((1,), 2), "epoch": 1},
    "grown, in pieces, computed again": {
        "growth": Growth((1,), 2),
        "epoch": 1,
        "compute": Compute(recompute=True, pieces=2),
        "pieces": True,
    },
    "in pieces": {"compute": Compute(pieces=3), "batch": 7, "parts": 1, "pieces": True},
}
"""What the step is; in pieces, other images are in one with other workers."""


def norm(momentum: float | None) -> nn.BatchNorm2d:
    made = nn.BatchNorm2d(3, momentum=momentum).double()
    with torch.no_grad():
        made.weight.copy_(torch.tensor([0.5, -1.0, 2.0]))
        made.bias.copy_(torch.tensor([0.1, 0.2, 0.3]))
    return made


def numbers() -> tuple[Tensor, Tensor]:
    """Images, and what their outputs count."""
    random = torch.Generator().manual_seed(3)
    x, weight = (
        torch.rand(TOTAL, 3, 4, 5, generator=random, dtype=torch.float64) for _ in range(2)
    )
    return x * torch.arange(1, TOTAL + 1).reshape(-1, 1, 1, 1) + 10, weight


def derived(layer: nn.Module, x: Tensor, weight: Tensor) -> dict[str, Tensor]:
    """Outputs, gradients, and those of the gradients' squares; twice, so that it remembers."""
    layer(x + 1)
    x = x.clone().requires_grad_(True)
    y = layer(x)
    (first,) = torch.autograd.grad((y.square() * weight).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x, retain_graph=True)
    (y.square() * weight).sum().backward()
    return {"y": y.detach(), "first": first.detach(), "second": second}


def main(folder: Path) -> None:
    world = World.join(device="cpu")
    for name, momentum in (("usual", 0.1), ("cumulative", None)):
        save_file(_alone(world, momentum), folder / f"{name}-{world.rank}.safetensors")
    for name, case in CASES.items():
        found = _stepped(world, "sync", 12, dict(case))
        save_file(found, folder / f"{name}-{world.rank}.safetensors")
    for kind in ("local", "ghost"):
        found = _stepped(world, kind, 4, {"objective": TRADES(), "attack_bn": "train"})
        if world.first:
            save_file(found, folder / f"{kind}.safetensors")
    world.meet()
    world.close()


def _alone(world: World, momentum: float | None) -> dict[str, Tensor]:
    ledger, layer = Ledger(world.device), norm(momentum)
    norms = Norms.of("sync", Team(world), world=world, ledger=ledger, group=2)
    assert norms.fewest(5 - world.rank) == 6 - world.size
    ledger.close()
    x, weight = (it.split(SHARES[world.size])[world.rank].contiguous() for it in numbers())
    with norms.over(layer, len(x)):
        found = derived(layer, x, weight)
    assert "forward" not in vars(layer)
    found |= {name: it.grad for name, it in layer.named_parameters() if it.grad is not None}
    found |= {name: it.clone() for name, it in layer.named_buffers()}
    return {**found, "sent": torch.tensor(ledger.close().sent)}


def _stepped(world: World, kind: str, group: int, case: dict[str, Any]) -> dict[str, Tensor]:
    """The gradient and the statistics after a step."""
    random, epoch = torch.Generator().manual_seed(5), case.pop("epoch", 0)
    pictures = torch.rand(24, 3, 8, 8, generator=random, dtype=torch.float64)
    data = ImageData(pictures, torch.arange(24) % 4, classes=4)
    plan = Split(24, case.pop("batch", 12), parts=case.pop("parts", 6), workers=world.size, seed=0)
    model = build_model("preact-resnet18", 4, width=2).double()
    exchange = Exchange(model, world, norms_meet=kind == "sync")
    team, compute = Team(world), case.pop("compute", Compute())
    engine = Engine.of(model, compute, pictures[:2], 0) if compute.recompute else None
    case.pop("pieces", None)
    worker = Worker(
        supply=Supply([Source.of(data, plan, world.rank)], plan.steps),
        threat=ThreatModel(eps=0.05),
        exchange=exchange,
        engine=engine or Engine(model, compute),
        team=team,
        norms=Norms.of(kind, team, world=world, ledger=exchange.ledger, group=group),
        optimizer=SGD()(model),
        **{"objective": Adversarial(), "attack": PGD(steps=2), **case},
    )
    for step in range(worker.replays):
        dat_step(worker, epoch, step)
    exchange.close()
    found = {k: p.grad.clone() for k, p in model.named_parameters() if p.grad is not None}
    return found | {k: v.clone() for k, v in model.named_buffers()}
