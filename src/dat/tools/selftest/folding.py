"""The network that attacks use, a frozen copy with folded batch norms, against the model."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dat.attacks import attack_mode
from dat.models import build_model
from dat.tools.selftest.result import Context, Result, failed, passed
from dat.train.engine import Compute, Engine

NETWORKS = (("preact-resnet18", 8), ("cnn", 8))
"""Networks and widths."""
IEEE_ERROR, TF32_ERROR = 1e-4, 2e-2
"""Largest relative errors of logits, and of gradients in the L2 norm."""


def folding(context: Context) -> Result:
    """Logits and image gradients of the copy are those of the model."""
    limit, errors = context.tolerance(IEEE_ERROR, TF32_ERROR), {}
    for name, width in NETWORKS:
        model, x = _trained_looking(context, name, width)
        engine = Engine.of(model, Compute(), x, work=0)
        notes = "; ".join(engine.notes)
        if "not folded" in notes:
            return failed(f"{name}: {notes}")
        x = engine.to_memory_format(x)
        with attack_mode(model):
            expected = _logits_and_gradient(model, x)
            actual = _logits_and_gradient(engine.target(eval_mode=True), x)
        for part, one, other in zip(("logits", "gradient"), actual, expected, strict=True):
            errors[f"{name}: {part}"] = float((one - other).norm() / other.norm())
    wrong = {name: error for name, error in errors.items() if not error <= limit}
    mode = "TF32" if context.tf32 else "IEEE float32"
    if wrong:
        name, error = next(iter(wrong.items()))
        return failed(
            f"{name}: relative error {error:.1e}, above {limit:.0e} ({mode})",
            "set compute.fold=false until this is fixed; attach this report to an issue",
            errors=errors,
        )
    return passed(f"largest relative error {max(errors.values()):.1e} ({mode})", errors=errors)


def _trained_looking(context: Context, name: str, width: int) -> tuple[nn.Module, Tensor]:
    """A network whose batch norms are not those of initialization, and images."""
    generator = context.generator("folding")
    model = build_model(name, 10, channels=3, width=width, seed=context.seed).to(context.device)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                for tensor, low in ((module.weight, 0.5), (module.bias, -0.3)):
                    spread = torch.rand(tensor.shape, generator=generator)
                    tensor.copy_(low + spread)
        x = torch.rand(8, 3, 16, 16, generator=generator).to(context.device)
        model.train()
        model(x)
    return model, x


def _logits_and_gradient(network: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.detach().requires_grad_(True)
    logits: Tensor = network(x)
    (gradient,) = torch.autograd.grad(logits.square().sum(), x)
    return logits.detach(), gradient
