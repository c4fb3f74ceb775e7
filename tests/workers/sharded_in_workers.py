"""Sharded training in real workers, compared with training of replicated models."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from dat.attacks import PGD, Free
from dat.core.threat import ThreatModel
from dat.data import ImageData
from dat.distributed import Buckets, ShardedExchange, World, local_tensor
from dat.models.preact_resnet import PreActBlock
from dat.models.vit import ViT
from dat.objectives import TRADES
from dat.optim import LAMB, LARS, SGD, AdamW
from dat.train import Callback, Checkpoint, Checkpointer, Trainer
from dat.train.activation_checkpointing import blocks_of
from dat.train.engine import Compute
from dat.train.step import StepReport
from tests.trainers import make_trainer

STEPS, TIMES = 20, 30
STOPPED = 7
"""The update during which a run is interrupted."""


class Double(nn.Module):
    """In double precision, where rounding flips no sign. `scale` has fewer rows than there are
    workers."""

    def __init__(self, *, normalized: bool) -> None:
        super().__init__()
        with torch.random.fork_rng([]):
            torch.manual_seed(0)
            self.net = (normed() if normalized else vit(3, 10)).double()
        self.scale = nn.Parameter(torch.full((1, 4), 2.0, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.net(x.double())  # type: ignore[no-any-return]


def vit(channels: int, width: int) -> nn.Module:
    return ViT(4, channels=channels, patch=4, width=width, depth=2)


def normed() -> nn.Module:
    """Two blocks with batch normalization."""
    first = nn.Sequential(nn.Conv2d(3, 5, 3, bias=False), nn.BatchNorm2d(5), nn.ReLU())
    blocks = (PreActBlock(5, 5), PreActBlock(5, 7, stride=2))
    return nn.Sequential(first, *blocks, nn.Flatten(), nn.Linear(63, 4))


class Recorder(Callback):
    """Records the loss, the trust ratios and the bytes sent of every step."""

    def __init__(self, until: int | None = None) -> None:
        self.losses: list[float] = []
        self.ratios: list[dict[str, float]] = []
        self.sent: list[int] = []
        self.until = until

    def on_step_end(self, trainer: Trainer, epoch: int, report: StepReport) -> None:
        self.losses.append(report.loss)
        self.ratios.append(trainer.trust_ratios())
        self.sent.append(report.traffic.sent)
        if trainer.updates == self.until:
            assert trainer.checkpointer is not None
            trainer.checkpointer.close()
            trainer.world.barrier()
            raise InterruptedError


def images(count: int = 60) -> ImageData:
    generator = torch.Generator().manual_seed(5)
    labels = torch.arange(count) % 4
    pictures = torch.rand(count, 3, 8, 8, generator=generator) * 0.6
    return ImageData.of(pictures + labels.reshape(-1, 1, 1, 1) / 10, labels, classes=4)


def make(world: World, recorder: Recorder, **options: Any) -> Trainer:
    batch = 6 if world.size < 4 else 8
    defaults: dict[str, Any] = {
        "model": Double(normalized=options.pop("normalized", False)),
        "data": images(10 * batch),
        "holdout": images(12),
        "threat": ThreatModel(eps=0.05),
        "attack": PGD(steps=2),
        "select_steps": 1,
        "optimizer": LAMB(lr=0.02),
        "epochs": 2,
        "batch": batch,
        "parts": batch,  # by default they depend on the number of workers
        "ema": 0.9,
        "compute": Compute(fold=False),
        "world": world,
        "callbacks": [recorder],
    }
    return make_trainer(**defaults | options)


SHORT = {"ema": 0.0, "epochs": 1, "holdout": None}
CASES: dict[str, dict[str, Any]] = {
    "lamb": {},
    "block": {"gather": "block", "compute": Compute(fold=False, recompute=True), **SHORT},
    "lars": {"optimizer": LARS(lr=0.02), **SHORT},
    "clipped": {"optimizer": LARS(lr=0.02, clip=0.05), **SHORT},
    "classic": {"optimizer": LARS(lr=0.02, preset="classic"), **SHORT},
    "sgd": {"optimizer": SGD(lr=0.05), **SHORT},
    "adamw": {"optimizer": AdamW(lr=0.01), **SHORT},
    "free": {"attack": Free(replays=2), **SHORT},
    "trades": {"objective": TRADES(), **SHORT},
    "batch norm": {"normalized": True, **SHORT},
}


COMMON = ("lamb", "classic", "batch norm")
"""The cases that are run with more than two workers."""


def weights(trainer: Trainer) -> dict[str, Tensor]:
    """The unsharded last, averaged and best weights."""
    unshard = trainer.worker.exchange.unsharded_model
    models = {name: unshard(model) for name, model in trainer.models().items()}
    models["best-"] = trainer.best_model()
    return {
        f"{name}{key}": value.detach().clone().contiguous()
        for name, model in models.items()
        for key, value in model.state_dict().items()
    }


def compare(world: World, size: int, folder: Path) -> Any:
    """Run every case with and without sharding."""
    results = {}
    for case, options in CASES.items():
        if world.size > 2 and case not in COMMON:
            continue
        for shard in (None, size):
            recorder = Recorder()
            trainer = make(world, recorder, **options, shard=shard)
            trainer.fit()
            name = f"{case} {'sharded' if shard else 'whole'}"
            tensors = weights(trainer)
            if world.first:
                save_file(tensors, folder / f"{name}.safetensors")
            moments = [
                value
                for state in trainer.worker.optimizer.state.values()
                for value in state.values()
                if isinstance(value, Tensor)
            ]
            results[name] = {
                "losses": recorder.losses,
                "ratios": recorder.ratios,
                "sent": recorder.sent[1],
                "parameters": sum(local_tensor(p).numel() for p in trainer.model.parameters()),
                "moments": sum(local_tensor(moment).numel() for moment in moments),
            }
    return results


def quantized(world: World, size: int, folder: Path) -> Any:
    """The noise of the summed gradient in 4 bits, over many repetitions, and the bytes sent."""

    def gradient(bits: int, times: int) -> tuple[Tensor, Tensor, int]:
        torch.manual_seed(0)
        net = vit(1, 24)
        exchange = ShardedExchange(
            net, world, size=size, blocks=blocks_of(net), quantizer=Buckets(bits=bits), seed=3
        )
        x = torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(world.rank))
        sums = []
        for step in range(times):
            loss = exchange(x).square().sum()
            exchange.begin(0, step)
            exchange.ledger.read_and_reset()
            loss.backward()
            sent = exchange.ledger.read_and_reset().sent
            grads = [p.grad.full_tensor() for p in net.parameters() if p.grad is not None]  # type: ignore[attr-defined]
            sums.append(torch.cat([grad.flatten() for grad in grads]))
            net.zero_grad()
        vectors = torch.cat([torch.full((p.numel(),), p.dim() == 1) for p in net.parameters()])
        return torch.stack(sums), vectors, sent

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
    """Interrupt a sharded and a replicated run, resume the sharded one, and compare it with a run
    that is never interrupted."""
    trainer = make(world, Recorder(), shard=size)
    trainer.fit()
    expected = weights(trainer)
    if world.first:
        save_file(expected, folder / "never.safetensors")
    for shard in (size, None):
        root = folder / f"stopped-{'sharded' if shard else 'whole'}"
        checkpointer = Checkpointer(root, every=1, report=lambda text: None)
        recorder = Recorder(STOPPED)
        stopped = make(world, recorder, shard=shard, callbacks=[recorder, checkpointer])
        try:
            stopped.fit()
        except InterruptedError:
            world.barrier()
    resumed = continue_run(world, size, folder / "stopped-sharded")
    equal = all(torch.equal(resumed[name], value) for name, value in expected.items())
    return {
        "equal": equal,
        "files": sorted(file.name for file in last_checkpoint(folder).iterdir()),
    }


def last_checkpoint(folder: Path) -> Path:
    return max((folder / "stopped-sharded").glob("0*"), key=lambda path: int(path.name))


def continue_run(world: World, shard: int | None, root: Path) -> dict[str, Tensor]:
    """Train from the last checkpoint of a run to its end, without writing to its folder."""
    checkpoint = Checkpoint.last(root, print)
    # the checkpointer is the last callback, so it has not written the interrupted update
    assert checkpoint is not None and checkpoint.updates == STOPPED - 1
    trainer = make(world, Recorder(), shard=shard)
    trainer.fit(checkpoint)
    return weights(trainer)


CHECKS = {"compare": compare, "quantized": quantized, "interrupt": interrupt}


def main(folder: Path, size: int, *checks: str) -> None:
    world = World.join(device="cpu")
    results = {name: CHECKS[name](world, size, folder) for name in checks}
    (folder / f"{world.rank}.json").write_text(json.dumps(results))
    world.barrier()
    os._exit(0)


def resume(folder: Path, shard: int | None, root: Path) -> None:
    world = World.join(device="cpu")
    resumed = continue_run(world, shard, root)
    if world.first:
        save_file(resumed, folder / "resumed.safetensors")
    world.barrier()
    os._exit(0)
