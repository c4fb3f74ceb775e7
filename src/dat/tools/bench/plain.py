"""Hand-written loops, as found in most code bases, to compare ours with."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dat.tools.bench.workload import Workload


def attack(model: nn.Module, x: Tensor, y: Tensor, workload: Workload) -> Tensor:
    """PGD by `autograd.grad`, which computes the gradient of the images only."""
    eps = workload.eps
    x_adv = (x + torch.empty_like(x).uniform_(-eps, eps)).clamp(0, 1)
    for _ in range(workload.steps):
        x_adv.requires_grad_(True)
        loss = F.cross_entropy(model(x_adv), y)
        (gradient,) = torch.autograd.grad(loss, x_adv)
        x_adv = x_adv.detach() + workload.step_size * gradient.sign()
        x_adv = torch.min(torch.max(x_adv, x - eps), x + eps).clamp(0, 1)
    return x_adv


def attack_with_all_gradients(model: nn.Module, x: Tensor, y: Tensor, workload: Workload) -> Tensor:
    """PGD by `backward`, which also computes the gradients of the parameters and discards them."""
    eps = workload.eps
    x_adv = (x + torch.empty_like(x).uniform_(-eps, eps)).clamp(0, 1)
    for _ in range(workload.steps):
        x_adv = x_adv.detach().requires_grad_(True)
        F.cross_entropy(model(x_adv), y).backward()
        assert x_adv.grad is not None
        x_adv = x_adv.detach() + workload.step_size * x_adv.grad.sign()
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
    """One training step on adversarial images and, if given, on `clean` ones: in a separate forward
    pass, or `together` in one."""
    optimizer.zero_grad()
    if clean is not None and together:
        mean = F.cross_entropy(model(torch.cat((clean, x_adv))), torch.cat((y, y)))
        loss = 2 * mean
    else:
        loss = F.cross_entropy(model(x_adv), y)
        if clean is not None:
            loss = loss + F.cross_entropy(model(clean), y)
    loss.backward()
    optimizer.step()
