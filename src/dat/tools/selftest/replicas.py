"""Replicas stay equal: all workers apply the same update, to the last bit."""

from __future__ import annotations

import hashlib

import torch
from torch import nn
from torch.nn import functional as F

from dat.attacks import PGD, AttackTarget, attack_mode
from dat.core.rng import Streams
from dat.core.threat import ThreatModel
from dat.distributed import Buckets, Exchange
from dat.models import build_model
from dat.optim import LAMB
from dat.tools.selftest.result import Context, Result, failed, passed

STEPS = 2
BATCH = 8
"""Images per worker and step; each worker has its own."""


def replicas(context: Context) -> Result:
    """After two adversarial steps with quantized gradients, all weights have the same digest."""
    digests = {}
    for bits in (8, 4):
        model = _train(context, bits)
        digests[bits] = own = digest(model)
        if different := context.same_on_all_workers(own):
            ranks = ", ".join(map(str, different))
            return failed(
                f"{bits} bits: the weights of workers {ranks} differ from those of worker 0",
                "train with quantizer.bits=32 until this is fixed; attach this report to an issue",
            )
    # without an update, replicas would be equal as well
    if digests[8] == digests[4]:
        return failed("8 and 4 bits give the same weights: the gradients were not quantized")
    workers = context.world.size
    if workers == 1:
        return passed(f"{STEPS} steps with 8 and 4 bits; a single worker has no other to compare")
    return passed(f"{workers} workers, {STEPS} steps with 8 and 4 bits: equal weights")


def digest(model: nn.Module) -> int:
    """A digest of parameters and buffers."""
    state = hashlib.blake2b(digest_size=7)
    for tensor in model.state_dict().values():
        state.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return int.from_bytes(state.digest())


def _train(context: Context, bits: int) -> nn.Module:
    world, device = context.world, context.device
    model = build_model("cnn", 4, channels=3, width=8, seed=context.seed).to(device)
    exchange = Exchange(model, world, quantizer=Buckets(bits=bits), seed=context.seed)
    optimizer = LAMB(lr=0.05)(model)
    attack, threat = PGD(steps=2), ThreatModel(eps=0.1)
    for step in range(STEPS):
        generator = context.generator("replicas", world.rank, step)
        x = torch.rand(BATCH, 3, 8, 8, generator=generator).to(device)
        y = torch.randint(4, (BATCH,), generator=generator).to(device)
        index = torch.arange(BATCH, device=device) + world.rank * BATCH
        draws = Streams.of(context.seed, "replicas", step, index=index)
        with attack_mode(model):
            x = attack(AttackTarget(model, y), x, threat, draws)
        exchange.begin(0, step)
        loss = F.cross_entropy(exchange(x), y, reduction="sum") / (BATCH * world.size)
        receive = exchange.all_gather_stats(loss.reshape(1))
        loss.backward()
        receive()
        optimizer.step()
        optimizer.zero_grad()
    exchange.close()
    return model
