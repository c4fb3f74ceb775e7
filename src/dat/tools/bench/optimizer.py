"""`dat bench optimizer`: the update alone, compared with torch's optimizers and other packages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from dat.models import build_model
from dat.optim import LAMB, LARS, Muon
from dat.optim.orthogonal import is_matrix
from dat.tools.bench.baselines import import_package, load_baselines
from dat.tools.bench.limits import describe_machine, measure_limits, use_threads
from dat.tools.bench.timing import Comparison, take_turns

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
ADAM, MOMENTUM = 7 * 4, 5 * 4
"""Lower bound on the bytes moved per parameter. With two moments: read weight, gradient and both
moments, write all but the gradient. With one moment: five values instead of seven."""


class Candidate(NamedTuple):
    """An optimizer to time."""

    make: MakeOptimizer
    least: int
    """Lower bound on the bytes it moves per parameter."""


def bench_optimizer(
    against: Sequence[str] = ("adamw", "sgd"),
    *,
    model: str = "resnet50",
    width: int | None = None,
    repeats: int = 5,
    seconds: float = 0.0,
    threads: int | None = None,
) -> Comparison:
    """Each optimizer has its own copy of the model's parameters and gradients."""
    use_threads(threads)
    candidates = dict(OURS)
    for make_candidates in load_baselines("optimizer", against).values():
        candidates |= make_candidates()
    optimizers = {name: _make(one.make, model, width) for name, one in candidates.items()}
    machine = describe_machine(limits := measure_limits())
    values = sum(p.numel() for p in _parameters(next(iter(optimizers.values()))))
    turns = {name: optimizer.step for name, optimizer in optimizers.items()}
    timings = take_turns(turns, repeats=repeats, seconds=seconds, title="updating")
    moved = {name: float(values * candidate.least) for name, candidate in candidates.items()}
    state = {name: _state_bytes(optimizer) / values for name, optimizer in optimizers.items()}
    return Comparison(
        bench="optimizer",
        timings=timings,
        machine=machine,
        least={name: bytes_ / limits.bandwidth for name, bytes_ in moved.items()},
        limit="weights, gradients and moments are read once and written once, as fast as a copy",
        traffic=moved,
        extras={name: {"state_bytes": bytes_} for name, bytes_ in state.items()},
        settings={"model": model, "width": width, "parameters": values},
    )


def _make(make: MakeOptimizer, name: str, width: int | None) -> torch.optim.Optimizer:
    model = build_model(name, 1000, width=width)
    random = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.grad = 1e-3 * torch.randn(parameter.shape, generator=random)
    return make(model)


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of state kept between steps, without step counters."""
    values = (value for state in optimizer.state.values() for value in state.values())
    return sum(v.nbytes for v in values if isinstance(v, torch.Tensor) and v.numel() > 1)


OURS = {
    "ours, LAMB": Candidate(LAMB(lr=1e-3), ADAM),
    "ours, LARS": Candidate(LARS(lr=1e-3), MOMENTUM),
}


def torch_adamw() -> dict[str, Candidate]:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    return {"torch AdamW, fused": Candidate(make, ADAM)}


def torch_sgd() -> dict[str, Candidate]:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, fused=True)

    return {"torch SGD, momentum, fused": Candidate(make, MOMENTUM)}


def muon_optimizers() -> dict[str, Candidate]:
    """Ours, and torch's for the matrices of the network, which it takes as such only."""

    def torchs(model: nn.Module) -> torch.optim.Optimizer:
        matrices = []
        for parameter in filter(is_matrix, model.parameters()):
            assert parameter.grad is not None
            matrices.append(nn.Parameter(parameter.detach().flatten(1)))
            matrices[-1].grad = parameter.grad.flatten(1)
        return torch.optim.Muon(matrices, lr=1e-3)

    return {
        "ours, Muon": Candidate(Muon(lr=1e-3, head="muon"), MOMENTUM),
        "ours, Muon, bfloat16": Candidate(
            Muon(lr=1e-3, head="muon", precision="bfloat16"), MOMENTUM
        ),
        "torch Muon, bfloat16, matrices": Candidate(torchs, MOMENTUM),
    }


def timm_optimizers() -> dict[str, Candidate]:
    optim = import_package("timm.optim")
    return _layerwise("timm", optim.Lamb, optim.Lars)


def pytorch_optimizers() -> dict[str, Candidate]:
    package = import_package("pytorch_optimizer")
    return _layerwise("pytorch_optimizer", package.Lamb, package.LARS)


def _layerwise(package: str, lamb: Any, lars: Any) -> dict[str, Candidate]:
    def make(kind: Any) -> MakeOptimizer:
        return lambda model: kind(model.parameters(), lr=1e-3)

    return {
        f"{package} LAMB": Candidate(make(lamb), ADAM),
        f"{package} LARS": Candidate(make(lars), MOMENTUM),
    }
