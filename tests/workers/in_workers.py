"""Checks that run inside the workers: each worker writes its results to a file."""

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
from dat.core.threat import ThreatModel
from dat.data import Batches, BatchSource, ImageData, RandomPartitionSampler
from dat.distributed import Exchange, ScopedBatchNorm, WorkerError, WorkerSubgroup, World
from dat.models import build_model
from dat.objectives import Adversarial
from dat.optim import LAMB, Muon, muon
from dat.train.engine import Engine
from dat.train.step import dat_step
from tests.trainers import make_trainer, make_worker


def bn_replicas(world: World) -> Any:
    """Train a network with batch norm for a few steps: digest, bytes and times."""
    trainer = make_trainer(
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
        module.running_mean.numel() + module.running_var.numel()
        for module in trainer.model.modules()
        if isinstance(module, nn.BatchNorm2d)
        and module.running_mean is not None
        and module.running_var is not None
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


def running_statistics(world: World) -> Any:
    """The error of the running statistics, which are to be those of the global batch."""
    bn = nn.BatchNorm2d(3, momentum=0.1)
    exchange = Exchange(nn.Sequential(bn, nn.Flatten(), nn.Linear(3 * 64, 2)), world)
    batch = images(6 * world.size).tensor()
    batch = batch + torch.arange(len(batch)).reshape(-1, 1, 1, 1)  # shares differ
    own = batch.chunk(world.size)[world.rank]
    receive = exchange.all_gather_stats((loss := exchange(own).sum()).reshape(1))
    loss.backward()
    receive()
    assert bn.running_mean is not None and bn.running_var is not None
    # torch's running variance is unbiased within each worker's share
    share = own[:, 0].numel()
    within = batch.unflatten(0, (world.size, -1)).transpose(1, 2).flatten(2).var(2).mean(0)
    means = batch.unflatten(0, (world.size, -1)).mean((1, 3, 4))
    expected = 0.9 + 0.1 * (within + means.var(0, correction=0))  # running_var starts at 1
    return {
        "mean": (bn.running_mean - 0.1 * batch.mean((0, 2, 3))).abs().max().item(),
        "var": (bn.running_var - expected).abs().max().item(),
        "share": share,
    }


def uneven_statistics(world: World) -> Any:
    """The same if the workers' shares differ in size: worker r has r + 1 of the batch's images."""
    bn = nn.BatchNorm2d(3, momentum=0.1)
    exchange = Exchange(nn.Sequential(bn, nn.Flatten(), nn.Linear(3 * 64, 2)), world)
    sizes = [rank + 1 for rank in range(world.size)]
    batch = images(sum(sizes)).tensor()
    batch = batch + torch.arange(len(batch)).reshape(-1, 1, 1, 1)
    shares = batch.split(sizes)
    own = shares[world.rank]
    stats = torch.stack(((loss := exchange(own).sum()), torch.tensor(float(len(own)))))
    receive = exchange.all_gather_stats(stats, weight=1)
    loss.backward()
    receive()
    assert bn.running_mean is not None and bn.running_var is not None
    weights = torch.tensor(sizes).unsqueeze(1) / sum(sizes)
    within = torch.stack([share.transpose(0, 1).flatten(1).var(1) for share in shares])
    offsets = torch.stack([share.mean((0, 2, 3)) for share in shares]) - batch.mean((0, 2, 3))
    expected = 0.9 + 0.1 * (weights * (within + offsets.square())).sum(0)
    return {
        "mean": (bn.running_mean - 0.1 * batch.mean((0, 2, 3))).abs().max().item(),
        "var": (bn.running_var - expected).abs().max().item(),
    }


def attack_traffic(world: World) -> Any:
    """Bytes sent in training with 1 and with 5 attack steps, and the images that were drawn."""
    sent, drawn = [], set()
    for steps in (1, 5):
        data = images(24)
        sampler = RandomPartitionSampler(24, 12, parts=world.size, workers=world.size, seed=0)
        worker = make_worker(
            batches=Batches([BatchSource.of(data, sampler, world.rank)], sampler.steps),
            threat=ThreatModel(eps=0.1),
            attack=PGD(steps=steps),
            objective=Adversarial(),
            exchange=(exchange := Exchange(build_model("cnn", 4, width=4), world)),
            engine=Engine(exchange.module),
            subgroup=WorkerSubgroup(world),
            norms=ScopedBatchNorm(WorkerSubgroup(world)),
            optimizer=LAMB()(exchange.module),
        )
        exchange.ledger.read_and_reset()
        steps_sent = 0
        for step in range(sampler.steps):
            steps_sent += dat_step(worker, 0, step).traffic.sent
            drawn |= set(worker.draw(0, step).draws.index.tolist())
        sent.append(steps_sent)
    return {"sent": sent, "drawn": sorted(drawn)}


def overlap(world: World) -> Any:
    """How long before the end of the backward pass the first bucket of a larger network is sent."""
    net = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(12)])  # 48 MiB: several buckets
    exchange = Exchange(net, world)
    last_gradient = []
    next(net.parameters()).register_hook(lambda _: last_gradient.append(time.perf_counter()))
    for _ in range(2):  # DDP rebuilds its buckets after the first backward pass
        exchange.ledger.read_and_reset()
        loss = exchange(torch.ones(4, 1024)).sum()
        receive = exchange.all_gather_stats(loss.reshape(1))
        loss.backward()
        receive()
        transfers = sorted(exchange.ledger._transfers)
    buckets = transfers[1:]  # the first one is that of `share`
    return {
        "buckets": len(buckets),
        "head_start": last_gradient[-1] - buckets[0][0],  # type: ignore[operator]
        "sent": exchange.ledger.read_and_reset().sent,
        "parameters": sum(p.numel() for p in net.parameters()),
    }


def bytes_on_the_wire(world: World) -> Any:
    """Bytes by the ledger, and by the kernel's counter of the loopback interface."""
    net = nn.Linear(2048, 2048)
    exchange = Exchange(net, world)
    x = torch.ones(1, 2048)
    for _ in range(2):
        exchange(x).sum().backward()
    exchange.ledger.read_and_reset()
    world.sum(torch.zeros(1))
    before = loopback_bytes()
    for _ in range(5):
        exchange(x).sum().backward()
    world.sum(torch.zeros(1))
    return {"counted": exchange.ledger.read_and_reset().sent, "loopback": loopback_bytes() - before}


def failures(world: World) -> Any:
    """The messages of an error on one worker, which names it, and of an error on all of them."""

    def fail_on_the_last() -> int:
        if world.rank == world.size - 1:
            raise ValueError("no such thing")
        return 1

    def fail_everywhere() -> int:
        raise ValueError("wrong for all")

    messages = []
    for work in (fail_on_the_last, fail_everywhere):
        try:
            world.run_or_fail_together(work)
        except WorkerError as error:
            messages.append(str(error))
    return {"messages": messages, "result": world.run_or_fail_together(lambda: world.rank)}


def averaged_weights(world: World) -> Any:
    """Train from different initial weights on each worker; digests of weights and averages."""
    trainer = make_trainer(
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
    """The last worker leaves; a collective with it must fail, not return uninitialized memory."""
    exchange = Exchange(nn.Linear(2, 2), world)
    if world.rank == world.size - 1:
        return "left"
    time.sleep(1)
    try:
        exchange.all_gather_stats(torch.ones(3))()
    except RuntimeError as error:
        return str(error)
    return "nothing was raised"


def shared_muon(world: World) -> Any:
    """Train with Muon, where each worker orthogonalizes its share of the matrices, or all of them:
    digests, and megabytes per step."""
    results = []
    for least in (0.0, float("inf")):
        muon.WORTH_SHARING = least
        trainer = make_trainer(
            model=build_model("cnn", 4, width=4),
            data=images(24),
            attack=PGD(steps=1),
            optimizer=Muon(lr=0.01, head="muon"),
            epochs=1,
            batch=12,
            world=world,
        )
        record = trainer.fit()[0]
        results.append((digest(trainer.model), record.mb_per_step))
    matrices = [p.numel() for p in trainer.model.parameters() if p.dim() > 1]
    return {"runs": results, "largest": max(matrices), "all": sum(matrices)}


CHECKS = (
    bn_replicas,
    shared_muon,
    running_statistics,
    uneven_statistics,
    attack_traffic,
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
    world = World.join(device="cpu")
    results = {check.__name__: check(world) for check in CHECKS}
    results["lost_peer"] = lost_peer(world)
    (folder / f"{world.rank}.json").write_text(json.dumps(results))
    os._exit(0)  # the process group is broken by now
