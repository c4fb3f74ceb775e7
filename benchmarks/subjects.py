"""Models to attack: one robust and one standard of ours, and robust ones that others trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dat.config.build import make_model
from dat.config.runs import read_run
from dat.data import load
from dat.train import load_weights


@dataclass(frozen=True)
class ModelSpec:
    """A model, images that go with it, and the ball to attack it in."""

    name: str
    model: nn.Module
    x: Tensor
    y: Tensor
    norm: str
    eps: float


def of_run(name: str, run: Path, images: int, norm: str, eps: float) -> ModelSpec:
    """The best weights of a run of ours."""
    _, config = read_run(run)
    data = load(config.data.name)
    model = make_model(config, data)
    load_weights(model, run / "best.safetensors")
    x, y = data.test.batch(torch.arange(images), torch.device("cpu"))
    return ModelSpec(name, model.eval(), x, y, norm, eps)


def of_wong(name: str, weights: Path, data: str, images: int, norm: str, eps: float) -> ModelSpec:
    """A network of github.com/locuslab/convex_adversarial (Wong et al. 2018): two convolutions of
    stride 2, two linear layers, provably robust. Its weights are files of that repository."""
    state = torch.load(weights, map_location="cpu", weights_only=True)
    state = state.get("state_dict", state)
    state = state[0] if isinstance(state, list) else state
    channels, flat = state["0.weight"].shape[1], state["5.weight"].shape[1]
    net = nn.Sequential(
        nn.Conv2d(channels, 16, 4, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 4, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(flat, 100),
        nn.ReLU(),
        nn.Linear(100, 10),
    )
    net.load_state_dict(state)
    x, y = load(data).test.batch(torch.arange(images), torch.device("cpu"))
    return ModelSpec(name, net.eval(), x, y, norm, eps)


class Counting(nn.Module):
    """Counts the samples that go through a network, forward and backward."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net, self.forwards, self.backwards = net, 0, 0

    def forward(self, x: Tensor) -> Any:
        self.forwards += len(x)
        self.backwards += len(x) * (x.requires_grad and torch.is_grad_enabled())
        return self.net(x)


def reference(folder: Path) -> Callable[..., Any]:
    """The reference implementation, from a checkout of github.com/fra31/auto-attack."""
    import sys

    sys.path.insert(0, str(folder))
    from autoattack import AutoAttack

    def make(subject: ModelSpec, model: nn.Module, **options: Any) -> Any:
        norm = {"linf": "Linf", "l2": "L2"}[subject.norm]
        return AutoAttack(
            model, norm=norm, eps=subject.eps, seed=0, verbose=False, device="cpu", **options
        )

    return make
