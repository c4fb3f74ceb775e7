"""Sharded training in real workers, beside the same with a whole model at every worker."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from dat.attacks import PGD, Free
from dat.comm import Buckets, ShardedExchange, World, local_of
from dat.compute import Compute, blocks_of
from dat.data import ImageData
from dat.models.preact_resnet import PreActBlock
from dat.models.vit import ViT
from dat.objectives import TRADES
from dat.optim import LAMB, LARS, SGD
from dat.threat import ThreatModel
from dat.train import Listener, Resumption, Saver, Trainer
from dat.train.step import StepReport

STEPS, TIMES = 20, 30
STOPPED = 7
"""A run is interrupted in the course of this update."""


class Double(nn.Module):
    """In double precision rounding flips no sign. The single row of `scale` is fewer than there are
    workers, and so are the four of the head on five."""

    def __init__(self, *, normalised: bool) -> None:
        super().__init__()
        with torch.random.fork_rng([]):
            torch.manual_seed(0)
            self.net = (normed() if normalised else vit(3, 10)).double()
        self.scale = nn.Parameter(torch.full((1, 4), 2.0, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.net(x.double())  # type: ignore[no-any-return]


def vit(channels: int, width: int) -> nn.Module:
    return ViT(4, channels=channels, patch=4, width=width, depth=2)


def normed() -> nn.Module:
    """Two blocks with batch statistics."""
    first = nn.Sequential(nn.Conv2d(3, 5, 3, bias=False), nn.BatchNorm2d(5), nn.ReLU())
    blocks = (PreActBlock(5, 5), PreActBlock(5, 7, stride=2))
    return nn.Sequential(first, *blocks, nn.Flatten(), nn.Linear(63, 4))


class Watch(Listener):
    """Every step's loss and trust ratios."""

    def __init__(self, until: int | None = None) -> None:
        self.losses: list[float] = []
        self.ratios: list[dict[str, float]] = []
        self.sent: list[int] = []
        self.until = until

    def step_ended(self, trainer: Trainer, epoch: int, report: StepReport) -> None:
        self.losses.append(report.loss)
        self.ratios.append(trainer.trust_ratios())
        self.sent.append(report.traffic.sent)
        if trainer.updates == self.until:
            assert trainer.saver is not None
            trainer.saver.close()
            trainer.world.meet()
            raise InterruptedError


def images(count: int = 60) -> ImageData:
    random = torch.Generator().manual_seed(5)
    labels = torch.arange(count) % 4
    pictures = torch.rand(count, 3, 8, 8, generator=random) * 0.6
    return ImageData.of(pictures + labels.reshape(-1, 1, 1, 1) / 10, labels, classes=4)


def make(world: World, watch: Watch, **options: Any) -> Trainer:
    batch = 6 if world.size < 4 else 8
    usual: dict[str, Any] = {
        "model": Double(normalised=options.pop("normalised", False)),
        "data": images(10 * batch),
        "holdout": images(12),
        "threat": ThreatModel(eps=0.05),
        "attack": PGD(steps=2),
        "selection": PGD(steps=1),
        "optimizer": LAMB(lr=0.02),
        "epochs": 2,
        "batch": batch,
        "parts": batch,  # else they would depend on the number of workers
        "ema": 0.9,
        "compute": Compute(fold=False),
        "world": world,
        "listeners": [watch],
    }
    return Trainer(**usual | options)


SHORT = {"ema": 0.0, "epochs": 1, "holdout": None}
CASES: dict[str, dict[str, Any]] = {
    "lamb": {},
    "block": {"gather": "block", "compute": Compute(fold=False, recompute=True), **SHORT},
    "lars": {"optimizer": LARS(lr=0.02), **SHORT},
    "classic": {"optimizer": LARS(lr=0.02, preset="classic"), **SHORT},
    "sgd": {"optimizer": SGD(lr=0.05), **SHORT},
    "free": {"attack": Free(replays=2), **SHORT},
    "trades": {"objective": TRADES(), **SHORT},
    "batch norm": {"normalised": True, **SHORT},
}


COMMON = ("lamb", "classic", "batch norm")
"""On more than two workers."""


def weights(trainer: Trainer) -> dict[str, Tensor]:
    """All of them, whole: the last, the averages, the best."""
    found = {name: trainer._whole(model) for name, model in trainer.models().items()}
    found["best-"] = trainer.best_model()
    return {
        f"{name}{key}": value.detach().clone().contiguous()
        for name, model in found.items()
        for key, value in model.state_dict().items()
    }


def compare(world: World, size: int, folder: Path) -> Any:
    """Every case with and without shards."""
    seen = {}
    for case, options in CASES.items():
        if world.size > 2 and case not in COMMON:
            continue
        for shard in (None, size):
            watch = Watch()
            trainer = make(world, watch, **options, shard=shard)
            trainer.fit()
            found = weights(trainer)
            if world.first:
                save_file(found, folder / f"{case} {'sharded' if shard else 'whole'}.safetensors")
            state = trainer.minimiser.state
            kept = sum(
                local_of(it).numel()
                for moments in state.values()
                for it in moments.values()
                if isinstance(it, Tensor)
            )
            seen[f"{case} {'sharded' if shard else 'whole'}"] = {
                "losses": watch.losses,
                "ratios": watch.ratios,
                "sent": watch.sent[1],
                "parameters": sum(local_of(p).numel() for p in trainer.model.parameters()),
                "moments": kept,
            }
    return seen


def quantized(world: World, size: int, folder: Path) -> Any:
    """The sum of the workers' gradients, exactly and in 4 bits, many times."""

    def gradient(bits: int, times: int) -> tuple[Tensor, Tensor, int]:
        torch.manual_seed(0)
        net = vit(1, 24)
        exchange = ShardedExchange(
            net, world, size=size, blocks=blocks_of(net), quantizer=Buckets(bits=bits), seed=3
        )
        x = torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(world.rank))
        found = []
        for step in range(times):
            loss = exchange(x).square().sum()
            exchange.begin(0, step)
            exchange.ledger.close()
            loss.backward()
            sent = exchange.ledger.close().sent
            grads = [p.grad.full_tensor() for p in net.parameters() if p.grad is not None]  # type: ignore[attr-defined]
            found.append(torch.cat([it.flatten() for it in grads]))
            net.zero_grad()
        vectors = torch.cat([torch.full((p.numel(),), p.dim() == 1) for p in net.parameters()])
        return torch.stack(found), vectors, sent

    exact, vectors, dense = gradient(32, 1)
    many, _, sent = gradient(4, TIMES)
    noise, mean = many - exact, many.mean(0) - exact[0]
    return {
        "relative": float(noise.square().mean(0).sum() / exact.square().sum()),
        "of the mean": float(mean.square().sum() / noise.square().mean(0).sum()),
        "vectors": float(noise[:, vectors].abs().max()),
        "again": bool(torch.equal(gradient(4, 1)[0][0], many[0])),
        "dense": dense,
        "sent": sent,
    }


def interrupt(world: World, size: int, folder: Path) -> Any:
    """A run that is never interrupted; one that is; the same resumed; and one without shards."""
    saver = {"optimizer": LAMB(lr=0.02), "shard": size}
    trainer = make(world, Watch(), **saver)
    trainer.fit()
    whole = weights(trainer)
    if world.first:
        save_file(whole, folder / "never.safetensors")
    for shard in (size, None):
        root = folder / f"stopped-{'sharded' if shard else 'whole'}"
        stopped = make(
            world, Watch(STOPPED), shard=shard, saver=Saver(root, every=1, tell=lambda text: None)
        )
        try:
            stopped.fit()
        except InterruptedError:
            world.meet()
    resumed = go_on(world, size, folder / "stopped-sharded")
    alike = all(torch.equal(resumed[name], value) for name, value in whole.items())
    return {"alike": alike, "files": sorted(it.name for it in last(folder).iterdir())}


def last(folder: Path) -> Path:
    return max((folder / "stopped-sharded").glob("0*"), key=lambda it: int(it.name))


def go_on(world: World, shard: int | None, root: Path) -> dict[str, Tensor]:
    """From a run's last checkpoint to its end; nothing is written there."""
    found = Resumption.last(root, print)
    assert found is not None and found.updates == STOPPED - 1  # listeners come before the saver
    trainer = make(world, Watch(), shard=shard)
    trainer.fit(found)
    return weights(trainer)


CHECKS = {"compare": compare, "quantized": quantized, "interrupt": interrupt}


def main(folder: Path, size: int, *checks: str) -> None:
    world = World.join(device="cpu")
    seen = {name: CHECKS[name](world, size, folder) for name in checks}
    (folder / f"{world.rank}.json").write_text(json.dumps(seen))
    world.meet()
    os._exit(0)


def resume(folder: Path, shard: int | None, root: Path) -> None:
    world = World.join(device="cpu")
    found = go_on(world, shard, root)
    if world.first:
        save_file(found, folder / "resumed.safetensors")
    world.meet()
    os._exit(0)
