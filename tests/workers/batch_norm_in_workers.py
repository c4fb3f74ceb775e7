"""Batch normalization over several workers: a single layer, and in training steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from dat.attacks import PGD, Free
from dat.core.threat import ThreatModel
from dat.data import Batches, BatchSource, ImageData, RandomPartitionSampler
from dat.distributed import Exchange, Ledger, ScopedBatchNorm, WorkerSubgroup, World
from dat.models import build_model
from dat.objectives import TRADES, Adversarial, GradAlign
from dat.optim import SGD
from dat.train.awp import AWP
from dat.train.batch_schedule import BatchSchedule
from dat.train.engine import Compute, Engine
from dat.train.step import dat_step
from tests.trainers import make_worker

SHARES = {1: (12,), 2: (5, 7), 3: (5, 0, 7)}
"""The number of rows of each worker, which may be zero."""
TOTAL = sum(SHARES[1])

BOTH = Adversarial(clean_weight=1.0)
GROWN = BatchSchedule(epochs=(1,), factor=2)
CASES: dict[str, dict[str, Any]] = {
    "clean and attacked": {"objective": BOTH},
    "attacked in train mode": {"objective": TRADES(), "attack_bn": "train"},
    "weights attacked": {"objective": BOTH, "parts": [AWP(gamma=0.01)]},
    "second derivatives": {"objective": GradAlign()},
    "free": {"attack": Free(replays=2)},
    "recomputed": {"objective": BOTH, "compute": Compute(recompute=True)},
    "grown": {"schedule": GROWN, "epoch": 1},
    "grown, in pieces, recomputed": {
        "schedule": GROWN,
        "epoch": 1,
        "compute": Compute(recompute=True, pieces=2),
        "pieces": True,
    },
    "in pieces": {"compute": Compute(pieces=3), "batch": 7, "divided": 1, "pieces": True},
}
"""Training steps; in pieces, the workers combine other images."""


def norm(momentum: float | None) -> nn.BatchNorm2d:
    layer = nn.BatchNorm2d(3, momentum=momentum).double()
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([0.5, -1.0, 2.0]))
        layer.bias.copy_(torch.tensor([0.1, 0.2, 0.3]))
    return layer


def inputs_and_weights() -> tuple[Tensor, Tensor]:
    """Inputs, and the weights of the squared outputs in the loss."""
    generator = torch.Generator().manual_seed(3)
    x, weight = (
        torch.rand(TOTAL, 3, 4, 5, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    return x * torch.arange(1, TOTAL + 1).reshape(-1, 1, 1, 1) + 10, weight


def derivatives(layer: nn.Module, x: Tensor, weight: Tensor) -> dict[str, Tensor]:
    """Outputs, first and second derivatives, in the second of two passes."""
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
        save_file(_run_layer(world, momentum), folder / f"{name}-{world.rank}.safetensors")
    for name, case in CASES.items():
        tensors = _run_step(world, "sync", 12, dict(case))
        save_file(tensors, folder / f"{name}-{world.rank}.safetensors")
    for scope in ("local", "ghost"):
        tensors = _run_step(world, scope, 4, {"objective": TRADES(), "attack_bn": "train"})
        if world.first:
            save_file(tensors, folder / f"{scope}.safetensors")
    world.barrier()
    world.close()


def _run_layer(world: World, momentum: float | None) -> dict[str, Tensor]:
    """Outputs, derivatives, parameter gradients and buffers of one layer, and the bytes sent."""
    ledger, layer = Ledger(world.device), norm(momentum)
    norms = ScopedBatchNorm.of("sync", WorkerSubgroup(world), world=world, ledger=ledger, group=2)
    assert norms.min_over_subgroup(5 - world.rank) == 6 - world.size
    ledger.read_and_reset()
    x, weight = (
        tensor.split(SHARES[world.size])[world.rank].contiguous() for tensor in inputs_and_weights()
    )
    with norms.patch(layer, len(x)):
        tensors = derivatives(layer, x, weight)
    assert "forward" not in vars(layer)
    tensors |= {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    tensors |= {name: buffer.clone() for name, buffer in layer.named_buffers()}
    return {**tensors, "sent": torch.tensor(ledger.read_and_reset().sent)}


def _run_step(world: World, scope: str, group: int, case: dict[str, Any]) -> dict[str, Tensor]:
    """The gradient and the buffers after a step."""
    generator, epoch = torch.Generator().manual_seed(5), case.pop("epoch", 0)
    pictures = torch.rand(24, 3, 8, 8, generator=generator, dtype=torch.float64)
    data = ImageData(pictures, torch.arange(24) % 4, classes=4)
    sampler = RandomPartitionSampler(
        24, case.pop("batch", 12), parts=case.pop("divided", 6), workers=world.size, seed=0
    )
    model = build_model("preact-resnet18", 4, width=2).double()
    exchange = Exchange(model, world, synchronized_batch_norm=scope == "sync")
    subgroup, compute = WorkerSubgroup(world), case.pop("compute", Compute())
    engine = Engine.of(model, compute, pictures[:2], 0) if compute.recompute else None
    case.pop("pieces", None)
    worker = make_worker(
        batches=Batches([BatchSource.of(data, sampler, world.rank)], sampler.steps),
        threat=ThreatModel(eps=0.05),
        exchange=exchange,
        engine=engine or Engine(model, compute),
        subgroup=subgroup,
        norms=ScopedBatchNorm.of(scope, subgroup, world=world, ledger=exchange.ledger, group=group),
        optimizer=SGD()(model),
        **{"objective": Adversarial(), "attack": PGD(steps=2), **case},
    )
    for step in range(worker.sampler.replays):
        dat_step(worker, epoch, step)
    exchange.close()
    tensors = {k: p.grad.clone() for k, p in model.named_parameters() if p.grad is not None}
    return tensors | {k: v.clone() for k, v in model.named_buffers()}
