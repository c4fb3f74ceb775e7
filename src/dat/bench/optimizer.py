"""`dat bench optimizer`: an outer step by itself, ours beside torch's and those of others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from dat.bench.limits import describe_machine, measure_limits, use_threads
from dat.bench.peers import choose, load
from dat.bench.race import Race, take_turns
from dat.models import build_model
from dat.optim import LAMB, LARS

Make = Callable[[nn.Module], torch.optim.Optimizer]
ADAM, MOMENTUM = 7 * 4, 5 * 4
"""Bytes a parameter that must be moved at least: weight, gradient and two moments are read, all but
the gradient written; with one moment, five numbers."""


class Contestant(NamedTuple):
    make: Make
    least: int
    """Bytes a parameter that it must move."""


def bench_optimizer(
    against: Sequence[str] = ("adamw", "sgd"),
    *,
    model: str = "resnet50",
    width: int | None = None,
    repeats: int = 5,
    seconds: float = 0.0,
    threads: int | None = None,
) -> Race:
    """Every contestant has parameters and gradients of its own, the size of the model's."""
    use_threads(threads)
    asked = choose(against, PEERS)
    contestants = OURS | {name: it for group in asked.values() for name, it in group().items()}
    optimizers = {name: _ready(it.make, model, width) for name, it in contestants.items()}
    machine = describe_machine(limits := measure_limits())
    values = sum(p.numel() for p in _parameters(next(iter(optimizers.values()))))
    jobs = {name: optimizer.step for name, optimizer in optimizers.items()}
    timings = take_turns(jobs, repeats=repeats, seconds=seconds, title="updating")
    moved = {name: float(values * it.least) for name, it in contestants.items()}
    return Race(
        bench="optimizer",
        timings=timings,
        machine=machine,
        least={name: bytes_ / limits.bandwidth for name, bytes_ in moved.items()},
        limit="weights, gradients and moments read once, and written once, as fast as a copy",
        traffic=moved,
        extras={name: {"state_bytes": _state(it) / values} for name, it in optimizers.items()},
        settings={"model": model, "width": width, "parameters": values},
    )


def _ready(make: Make, name: str, width: int | None) -> torch.optim.Optimizer:
    model = build_model(name, 1000, width=width)
    random = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.grad = 1e-3 * torch.randn(parameter.shape, generator=random)
    return make(model)


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _state(optimizer: torch.optim.Optimizer) -> int:
    """Bytes that it keeps from step to step; a counter is none."""
    values = (it for state in optimizer.state.values() for it in state.values())
    return sum(it.nbytes for it in values if isinstance(it, torch.Tensor) and it.numel() > 1)


def _adamw() -> dict[str, Contestant]:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    return {"torch AdamW, fused": Contestant(make, ADAM)}


def _sgd() -> dict[str, Contestant]:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, fused=True)

    return {"torch SGD, momentum, fused": Contestant(make, MOMENTUM)}


def _timm() -> dict[str, Contestant]:
    optim = load("timm.optim")
    return _layerwise("timm", optim.Lamb, optim.Lars)


def _pytorch_optimizer() -> dict[str, Contestant]:
    package = load("pytorch_optimizer")
    return _layerwise("pytorch_optimizer", package.Lamb, package.LARS)


def _layerwise(package: str, lamb: Any, lars: Any) -> dict[str, Contestant]:
    def make(kind: Any) -> Make:
        return lambda model: kind(model.parameters(), lr=1e-3)

    return {
        f"{package} LAMB": Contestant(make(lamb), ADAM),
        f"{package} LARS": Contestant(make(lars), MOMENTUM),
    }


OURS = {
    "ours, LAMB": Contestant(LAMB(lr=1e-3), ADAM),
    "ours, LARS": Contestant(LARS(lr=1e-3), MOMENTUM),
}
PEERS: dict[str, Callable[[], dict[str, Contestant]]] = {
    "adamw": _adamw,
    "sgd": _sgd,
    "timm": _timm,
    "pytorch_optimizer": _pytorch_optimizer,
}
