"""Adversarial training in a plain PyTorch loop with DistributedDataParallel.

    python examples/ddp_loop.py
    torchrun --nproc-per-node 2 examples/ddp_loop.py --objective trades
    torchrun --nproc-per-node 2 examples/ddp_loop.py --bits 4

Takes seconds on one CPU core. With `--bits`, DAT's exchange sends gradients quantized to that many
bits.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

import dat
from dat.objectives import TRADES

THREAT = dat.ThreatModel(norm="linf", eps=0.1)
OBJECTIVES = {"at": dat.Adversarial(clean_weight=0.5), "trades": TRADES(beta=3.0)}


def network() -> nn.Module:
    """Any classifier of images in [0, 1]."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(512, 10)),
    )


def train(
    net: nn.Module,
    data: Dataset[tuple[torch.Tensor, ...]],
    world: dat.World,
    *,
    objective: dat.Objective,
    epochs: int,
    bits: int | None = None,
) -> None:
    attack = dat.PGD(steps=5)
    sampler = DistributedSampler(data, world.size, world.rank)  # type: ignore[var-annotated]
    loader = DataLoader(data, batch_size=140 // world.size, sampler=sampler)
    exchange = None if bits is None else dat.Exchange(net, world, quantizer=dat.Buckets(bits=bits))
    # each replica keeps its own running statistics, which are averaged at the end
    model = exchange or DistributedDataParallel(net, forward_sync_buffers=False)
    share = 1 / world.size if exchange else 1.0  # dat.Exchange sums gradients; DDP averages
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, epochs * len(loader))

    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for step, (x, y) in enumerate(loader, epoch * len(loader)):
            seed = step * world.size + world.rank  # new random starts in each step and process
            x, y = x.to(world.device), y.to(world.device)
            batch = dat.Batch.of(x, y, threat=THREAT, seed=seed)
            with dat.attack_mode(net):  # unwrapped, BN in eval mode: no communication
                phi = objective.phi(net, batch)
                x_adv = attack(phi, x, THREAT, batch.draws.fork("attack"))
            optimizer.zero_grad()
            loss = objective.loss(model, batch, x_adv).loss.mean()  # calls the model once
            (loss * share).backward()
            optimizer.step()
            schedule.step()

    for buffer in net.buffers():
        if buffer.is_floating_point():
            dist.all_reduce(buffer)
            buffer /= world.size
    if exchange:
        exchange.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--objective", choices=OBJECTIVES, default="at")
    parser.add_argument("--bits", type=int, choices=(2, 3, 4, 5, 6, 7, 8, 16))
    parser.add_argument("--epochs", type=int, default=8)
    arguments = parser.parse_args()
    digits = load_digits()
    x = torch.from_numpy(digits.images).float().div(16).unsqueeze(1)  # pixels in [0, 1]
    y = torch.from_numpy(digits.target)
    with dat.World.join() as world:  # torchrun's processes, or this one alone
        torch.manual_seed(0)
        net = network().to(world.device)
        train(
            net,
            TensorDataset(x[:1400], y[:1400]),
            world,
            objective=OBJECTIVES[arguments.objective],
            epochs=arguments.epochs,
            bits=arguments.bits,
        )
        test = dat.ImageData.of(x[1400:], y[1400:])
        found = dat.evaluate(net.eval(), test, threat=THREAT, attack=dat.PGD(steps=10))
        if world.first:
            print(f"TA {found.ta:.1f} %, RA {found.ra:.1f} % under PGD-10, linf {THREAT.eps}")
            print(f"processes: {world.size}")


if __name__ == "__main__":
    main()
