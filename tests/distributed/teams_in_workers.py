"""A step of Smooth-AT whose copies are split over all workers that there are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from dat.attacks import PGD, Free
from dat.comm import Exchange, Norms, Team, World
from dat.compute import Compute, Engine
from dat.data import ImageData, Source, Split, Supply
from dat.models import build_model
from dat.objectives import OBJECTIVES, Noisy
from dat.optim import SGD
from dat.threat import ThreatModel
from dat.train import Worker
from dat.train.step import dat_step

CASES: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "smooth": ("cnn", "smooth", {}, "eval"),
    "soft": ("cnn", "smooth", {"update": "soft"}, "eval"),
    "stability": ("cnn", "stability", {}, "eval"),
    "stability, normalised": ("normed", "stability", {}, "eval"),
    "free": ("cnn", "smooth", {}, "free"),
    "normalised": ("normed", "smooth", {}, "eval"),
    "attacked in train mode": ("normed", "smooth", {"update": "soft"}, "train"),
    "computed again": ("preact-resnet18", "smooth", {}, "again"),
}
COPIES = 6


def images(count: int) -> ImageData:
    """In double precision, which ImageData.of would not keep."""
    random = torch.Generator().manual_seed(5)
    pictures = torch.rand(count, 3, 8, 8, generator=random, dtype=torch.float64)
    return ImageData(pictures, torch.arange(count) % 4, classes=4)


def make(network: str) -> nn.Module:
    """A small network, with or without batch normalisation."""
    if network != "normed":
        return build_model(network, 4, width=4)
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        first, second = nn.Conv2d(3, 4, 3, bias=False), nn.Conv2d(4, 8, 3, stride=2, bias=False)
        body = first, nn.BatchNorm2d(4), nn.ReLU(), second
        head = nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(32, 4)
        return nn.Sequential(*body, *head)


def _again(model: nn.Module) -> Engine:
    return Engine.of(model, Compute(recompute=True), torch.rand(2, 3, 8, 8).double(), 0)


def main(folder: Path, size: int) -> None:
    world = World.join(device="cpu")
    for name, (network, objective, settings, mode) in CASES.items():
        plan = Split(16, 8, parts=2, workers=world.size // size, seed=0)
        team = Team(world, size)
        model = make(network).double()
        kind = OBJECTIVES[objective]
        assert issubclass(kind, Noisy)
        worker = Worker(
            supply=Supply([Source.of(images(16), plan, team.number)], plan.steps),
            threat=ThreatModel(norm="l2", eps=0.3),
            attack=Free(replays=2) if mode == "free" else PGD(steps=3),
            objective=kind(sigma=0.2, copies=COPIES, **settings),
            exchange=Exchange(model, world),
            engine=_again(model) if mode == "again" else Engine(model),
            team=team,
            norms=Norms(team),
            optimizer=SGD()(model),
            attack_bn="train" if mode == "train" else "eval",
        )
        for step in range(worker.replays):
            report = dat_step(worker, 0, step)
        found = {k: p.grad.clone() for k, p in model.named_parameters() if p.grad is not None}
        found |= {k: v.clone() for k, v in model.named_buffers()}
        found["report"] = torch.tensor([report.loss, report.accuracy], dtype=torch.float64)
        if world.first:
            save_file(found, folder / f"{name}.safetensors")
        worker.exchange.close()
    world.meet()
    world.close()
