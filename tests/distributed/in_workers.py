"""What is checked inside the workers: each writes what it saw to a file."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dat.attacks import PGD
from dat.comm import Exchange, Norms, Team, WorkerError, World
from dat.compute import Engine
from dat.data import ImageData, Source, Split, Supply
from dat.models import build_model
from dat.objectives import Adversarial
from dat.optim import LAMB
from dat.threat import ThreatModel
from dat.train import Trainer, Worker
from dat.train.step import dat_step


def bn_replicas(world: World) -> Any:
    """A BN network trained for a few steps: is it the same everywhere, and what was sent?"""
    trainer = Trainer(
        model=build_model("preact-resnet18", 4, width=4),
        data=images(48),
        attack=PGD(steps=2),
        objective=Adversarial(clean_weight=0.5),
        optimizer=LAMB(lr=0.01),
        epochs=1,
        batch=12,
        world=world,
    )
    record = trainer.fit()[0]
    parameters = sum(p.numel() for p in trainer.model.parameters())
    statistics = sum(
        m.running_mean.numel() + m.running_var.numel()
        for m in trainer.model.modules()
        if isinstance(m, nn.BatchNorm2d)
        and m.running_mean is not None
        and m.running_var is not None
    )
    return {
        "digest": digest(trainer.model),
        "mb_per_step": record.mb_per_step,
        "parameters": parameters,
        "statistics": statistics,
        "comm_seconds": record.comm_seconds,
        "exposed_seconds": record.exposed_seconds,
        "seconds": record.seconds,
    }


def statistics_of_the_union(world: World) -> Any:
    """After one forward, the running statistics moved towards those of all workers' images."""
    bn = nn.BatchNorm2d(3, momentum=0.1)
    exchange = Exchange(nn.Sequential(bn, nn.Flatten(), nn.Linear(3 * 64, 2)), world)
    everything = images(6 * world.size).tensor()
    everything = everything + torch.arange(len(everything)).reshape(-1, 1, 1, 1)  # shares differ
    mine = everything.chunk(world.size)[world.rank]
    settle = exchange.share((loss := exchange(mine).sum()).reshape(1))
    loss.backward()
    settle()
    assert bn.running_mean is not None and bn.running_var is not None
    # torch's running variance is the unbiased one of each worker's share
    share = mine[:, 0].numel()
    within = everything.unflatten(0, (world.size, -1)).transpose(1, 2).flatten(2).var(2).mean(0)
    means = everything.unflatten(0, (world.size, -1)).mean((1, 3, 4))
    expected = 0.9 + 0.1 * (within + means.var(0, correction=0))  # running_var starts at 1
    return {
        "mean": (bn.running_mean - 0.1 * everything.mean((0, 2, 3))).abs().max().item(),
        "var": (bn.running_var - expected).abs().max().item(),
        "share": share,
    }


def attack_is_silent(world: World) -> Any:
    """Bytes sent by a step with 1 and with 5 attack steps; and only the worker's own images."""
    sent, drawn = [], set()
    for steps in (1, 5):
        data = images(24)
        plan = Split(24, 12, parts=world.size, workers=world.size, seed=0)
        worker = Worker(
            supply=Supply([Source.of(data, plan, world.rank)], plan.steps),
            threat=ThreatModel(eps=0.1),
            attack=PGD(steps=steps),
            objective=Adversarial(),
            exchange=(exchange := Exchange(build_model("cnn", 4, width=4), world)),
            engine=Engine(exchange.module),
            team=Team(world),
            norms=Norms(Team(world)),
            optimizer=LAMB()(exchange.module),
        )
        exchange.ledger.close()
        steps_sent = 0
        for step in range(plan.steps):
            steps_sent += dat_step(worker, 0, step).traffic.sent
            drawn |= set(worker.draw(0, step).draws.index.tolist())
        sent.append(steps_sent)
    return {"sent": sent, "drawn": sorted(drawn)}


def overlap(world: World) -> Any:
    """When do the buckets of a larger network take off and land, within one backward?"""
    net = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(12)])  # 48 MiB: several buckets
    exchange = Exchange(net, world)
    last_gradient = []
    next(net.parameters()).register_hook(lambda _: last_gradient.append(time.perf_counter()))
    for _ in range(2):  # DDP settles its buckets after the first backward
        exchange.ledger.close()
        loss = exchange(torch.ones(4, 1024)).sum()
        settle = exchange.share(loss.reshape(1))
        loss.backward()
        settle()
        flights = sorted(exchange.ledger._flights)
    buckets = flights[1:]  # the first one is what `share` sends
    return {
        "buckets": len(buckets),
        "head_start": last_gradient[-1] - buckets[0][0],  # type: ignore[operator]
        "sent": exchange.ledger.close().sent,
        "parameters": sum(p.numel() for p in net.parameters()),
    }


def bytes_on_the_wire(world: World) -> Any:
    """What the kernel counted on the loopback interface against what the ledger counted."""
    net = nn.Linear(2048, 2048)
    exchange = Exchange(net, world)
    x = torch.ones(1, 2048)
    for _ in range(2):
        exchange(x).sum().backward()
    exchange.ledger.close()
    world.sum(torch.zeros(1))
    before = loopback_bytes()
    for _ in range(5):
        exchange(x).sum().backward()
    world.sum(torch.zeros(1))
    return {"counted": exchange.ledger.close().sent, "seen": loopback_bytes() - before}


def failures(world: World) -> Any:
    """An error at one worker is raised at all, with its name; an error at all, without."""

    def at_the_last() -> int:
        if world.rank == world.size - 1:
            raise ValueError("no such thing")
        return 1

    def everywhere() -> int:
        raise ValueError("wrong for all")

    said = []
    for work in (at_the_last, everywhere):
        try:
            world.together(work)
        except WorkerError as error:
            said.append(str(error))
    return {"said": said, "fine": world.together(lambda: world.rank)}


def averaged_weights(world: World) -> Any:
    """Each worker starts from other weights; after training all have the same averages too."""
    trainer = Trainer(
        model=build_model("cnn", 4, width=2, seed=world.rank),
        data=images(24),
        attack=PGD(steps=1),
        epochs=1,
        batch=24,
        ema=0.9,
        world=world,
    )
    trainer.fit()
    return {name: digest(model) for name, model in trainer.models().items()}


def lost_peer(world: World) -> Any:
    """The last worker leaves; an exchange with it must fail, not give old memory for news."""
    exchange = Exchange(nn.Linear(2, 2), world)
    if world.rank == world.size - 1:
        return "left"
    time.sleep(1)
    try:
        exchange.share(torch.ones(3))()
    except RuntimeError as error:
        return str(error)
    return "nothing was raised"


CHECKS = (
    bn_replicas,
    statistics_of_the_union,
    attack_is_silent,
    overlap,
    bytes_on_the_wire,
    failures,
    averaged_weights,
)


def images(count: int) -> ImageData:
    generator = torch.Generator().manual_seed(5)
    pictures = torch.rand(count, 3, 8, 8, generator=generator)
    return ImageData.of(pictures, torch.arange(count) % 4, classes=4)


def digest(model: nn.Module) -> str:
    state = b"".join(t.contiguous().numpy().tobytes() for t in model.state_dict().values())
    return hashlib.sha256(state).hexdigest()


def loopback_bytes() -> int:
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return int(counters.split()[8])
    raise OSError("no loopback interface")


def main(folder: Path) -> None:
    joined = World.join(device="cpu")
    seen = {check.__name__: check(joined) for check in CHECKS}
    seen["lost_peer"] = lost_peer(joined)
    (folder / f"{joined.rank}.json").write_text(json.dumps(seen))
    os._exit(0)  # the group is broken by then
