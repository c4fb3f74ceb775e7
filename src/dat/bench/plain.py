"""The loops that people write by hand, to measure ours beside them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dat.bench.scene import Scene


def attack(model: nn.Module, x: Tensor, y: Tensor, scene: Scene) -> Tensor:
    """PGD as most people write it; `autograd.grad` asks for the images' gradient alone."""
    eps = scene.eps
    x_adv = (x + torch.empty_like(x).uniform_(-eps, eps)).clamp(0, 1)
    for _ in range(scene.steps):
        x_adv.requires_grad_(True)
        loss = F.cross_entropy(model(x_adv), y)
        (gradient,) = torch.autograd.grad(loss, x_adv)
        x_adv = x_adv.detach() + scene.step * gradient.sign()
        x_adv = torch.min(torch.max(x_adv, x - eps), x + eps).clamp(0, 1)
    return x_adv


def attack_with_all_gradients(model: nn.Module, x: Tensor, y: Tensor, scene: Scene) -> Tensor:
    """PGD by `backward`, which computes the parameters' gradients too and throws them away."""
    eps = scene.eps
    x_adv = (x + torch.empty_like(x).uniform_(-eps, eps)).clamp(0, 1)
    for _ in range(scene.steps):
        x_adv = x_adv.detach().requires_grad_(True)
        F.cross_entropy(model(x_adv), y).backward()
        assert x_adv.grad is not None
        x_adv = x_adv.detach() + scene.step * x_adv.grad.sign()
        x_adv = torch.min(torch.max(x_adv, x - eps), x + eps).clamp(0, 1)
    return x_adv


def update(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    x_adv: Tensor,
    y: Tensor,
    *,
    clean: Tensor | None = None,
    together: bool = False,
) -> None:
    """One step of training on adversarial images, and on `clean` ones if there are any: in a
    forward pass of their own or `together` with the others."""
    optimizer.zero_grad()
    if clean is not None and together:
        twice = F.cross_entropy(model(torch.cat((clean, x_adv))), torch.cat((y, y)))
        loss = 2 * twice
    else:
        loss = F.cross_entropy(model(x_adv), y)
        if clean is not None:
            loss = loss + F.cross_entropy(model(clean), y)
    loss.backward()
    optimizer.step()
