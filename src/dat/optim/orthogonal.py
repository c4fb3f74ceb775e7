"""Muon's update of a matrix: Nesterov momentum, orthogonalized by Newton-Schulz iterations
(Jordan et al. 2024, kellerjordan.github.io/posts/muon).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from dat.core.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

COEFFICIENTS = 3.4445, -4.7750, 2.0315
"""a, b, c of X <- a X + (b A + c A^2) X, where A = X X^T. As the slope at zero is steep, five steps
map all singular values above 0.002 of the norm to between 0.68 and 1.21, where they then stay."""
EPS = 1e-7
"""Lower bound of the norm that a matrix is divided by."""
BUFFER = "momentum_buffer"
"""The name of the momentum in a parameter's state, as in torch."""


def is_matrix(param: Tensor) -> bool:
    """Whether a parameter is a matrix once all dimensions but the first are flattened. Biases,
    norms, class tokens and position embeddings (1 x tokens x width) are not."""
    return param.dim() >= 2 and param.shape[0] > 1 and param[0].numel() > 1


def as_matrix(tensor: Tensor) -> Tensor:
    """Outputs x the rest: the weight of a convolution as a matrix."""
    return tensor.flatten(1)


def nesterov(
    params: list[Tensor],
    grads: list[Tensor],
    states: list[dict[str, Any]],
    *,
    momentum: float,
    enabled: bool = True,
) -> list[Tensor]:
    """Update the momentum of each parameter; return it with Nesterov's correction."""
    for param, state in zip(params, states, strict=True):
        if BUFFER not in state:
            state[BUFFER] = torch.zeros_like(param)
    buffers = [state[BUFFER] for state in states]
    torch._foreach_lerp_(buffers, grads, 1 - momentum)
    return list(torch._foreach_lerp(grads, buffers, momentum)) if enabled else buffers


def orthogonalize(matrix: Tensor, *, steps: int = 5, dtype: torch.dtype | None = None) -> Tensor:
    """About U V^T of a matrix with the singular value decomposition U S V^T, in the matrix's own
    precision unless a `dtype` is given."""
    a, b, c = COEFFICIENTS
    x = matrix.to(dtype or matrix.dtype)
    tall = x.shape[0] > x.shape[1]
    if tall:  # X X^T is then the smaller of the two products
        x = x.T
    x = x / x.norm().clamp(min=EPS)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def flops(param: Tensor, steps: int) -> float:
    """Floating-point operations of `orthogonalize` for the matrix of a parameter."""
    rows, columns = sorted((param.shape[0], param[0].numel()))
    return steps * (4.0 * rows**2 * columns + 2.0 * rows**3)


def rate_factor(param: Tensor, adjust: str) -> float:
    """The factor on the learning rate of a matrix, as `adjust_lr_fn` of `torch.optim.Muon`.

    `original` is sqrt(max(1, rows / columns)). `match_rms_adamw` is 0.2 * sqrt(max(rows, columns)):
    entries of the update then have a root mean square of about 0.2, as those of AdamW (Liu et al.
    2025, arXiv 2502.16982).
    """
    rows, columns = param.shape[0], param[0].numel()
    if adjust == "original":
        return math.sqrt(max(1.0, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns))
