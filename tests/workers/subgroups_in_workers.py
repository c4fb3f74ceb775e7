"""A step of Smooth-AT whose noisy copies are divided between the workers of a subgroup."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from dat.attacks import PGD, Free
from dat.core.threat import ThreatModel
from dat.data import Batches, BatchSource, ImageData, RandomPartitionSampler
from dat.distributed import Exchange, ScopedBatchNorm, WorkerSubgroup, World
from dat.models import build_model
from dat.objectives import OBJECTIVES, Noisy
from dat.optim import SGD
from dat.train.engine import Compute, Engine
from dat.train.step import dat_step
from tests.trainers import make_worker

CASES: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "smooth": ("cnn", "smooth", {}, "eval"),
    "soft": ("cnn", "smooth", {"update": "soft"}, "eval"),
    "stability": ("cnn", "stability", {}, "eval"),
    "stability, normalized": ("normed", "stability", {}, "eval"),
    "free": ("cnn", "smooth", {}, "free"),
    "normalized": ("normed", "smooth", {}, "eval"),
    "attacked in train mode": ("normed", "smooth", {"update": "soft"}, "train"),
    "recomputed": ("preact-resnet18", "smooth", {}, "recompute"),
}
COPIES = 6


def images(count: int) -> ImageData:
    """In double precision, which `ImageData.of` would not preserve."""
    generator = torch.Generator().manual_seed(5)
    pictures = torch.rand(count, 3, 8, 8, generator=generator, dtype=torch.float64)
    return ImageData(pictures, torch.arange(count) % 4, classes=4)


def make(network: str) -> nn.Module:
    """A small network; `normed` has batch normalization."""
    if network != "normed":
        return build_model(network, 4, width=4)
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        first, second = nn.Conv2d(3, 4, 3, bias=False), nn.Conv2d(4, 8, 3, stride=2, bias=False)
        body = first, nn.BatchNorm2d(4), nn.ReLU(), second
        head = nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(32, 4)
        return nn.Sequential(*body, *head)


def _recomputing_engine(model: nn.Module) -> Engine:
    return Engine.of(model, Compute(recompute=True), torch.rand(2, 3, 8, 8).double(), 0)


def main(folder: Path, size: int) -> None:
    world = World.join(device="cpu")
    for name, (network, objective, settings, mode) in CASES.items():
        plan = RandomPartitionSampler(16, 8, parts=2, workers=world.size // size, seed=0)
        subgroup = WorkerSubgroup(world, size)
        model = make(network).double()
        objective_class = OBJECTIVES[objective]
        assert issubclass(objective_class, Noisy)
        worker = make_worker(
            batches=Batches([BatchSource.of(images(16), plan, subgroup.number)], plan.steps),
            threat=ThreatModel(norm="l2", eps=0.3),
            attack=Free(replays=2) if mode == "free" else PGD(steps=3),
            objective=objective_class(sigma=0.2, copies=COPIES, **settings),
            exchange=Exchange(model, world),
            engine=_recomputing_engine(model) if mode == "recompute" else Engine(model),
            subgroup=subgroup,
            norms=ScopedBatchNorm(subgroup),
            optimizer=SGD()(model),
            attack_bn="train" if mode == "train" else "eval",
        )
        for step in range(worker.sampler.replays):
            report = dat_step(worker, 0, step)
        tensors = {k: p.grad.clone() for k, p in model.named_parameters() if p.grad is not None}
        tensors |= {k: v.clone() for k, v in model.named_buffers()}
        tensors["report"] = torch.tensor([report.loss, report.accuracy], dtype=torch.float64)
        if world.first:
            save_file(tensors, folder / f"{name}.safetensors")
        worker.exchange.close()
    world.barrier()
    world.close()
