"""torch.compile for the attacked network, and for the model in the update."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dat.core import devices
from dat.core.lazy import torch
from dat.core.settings import SettingError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from dat.train.engine import Compute

COMPILE_FROM = 5_000_000
"""Images times passes from which a minute of compilation pays off, for `compute.compile = auto`."""


def compile_attacked(
    network: nn.Module, compute: Compute, x: Tensor, work: int
) -> tuple[nn.Module | None, str]:
    """The compiled network, or None, and a note."""
    by_default = compute.compile == "auto" and devices.compiles_by_default(x.device)
    if compute.compile != "on" and not by_default:
        return None, ""
    if compute.compile == "auto" and work < COMPILE_FROM:
        return None, "not compiled: the run is too short"
    if not compute.fold:
        raise SettingError("compute.compile = on: needs the folded copy; set compute.fold = true")
    _cache_compiled()
    compiled: Any = torch.compile(network, dynamic=False)
    try:
        probe = x.detach().clone().requires_grad_(True)
        torch.autograd.grad(compiled(probe).sum(), probe)
    except Exception as error:  # a compiler can fail in any way
        if compute.compile == "auto":
            return None, f"not compiled: {type(error).__name__}"
        reason = str(error).strip().splitlines()[0]
        raise SettingError(f"compute.compile = on: cannot be compiled ({reason})") from error
    return compiled, "compiled"


def compile_update(model: nn.Module) -> Callable[..., Any]:
    """The compiled `forward` of the model, which stays as it is: attacks without a copy,
    evaluation and saved files do not change."""
    _cache_compiled()
    compiled: Callable[..., Any] = torch.compile(model.forward, dynamic=False)

    def forward(*arguments: Any, **options: Any) -> Any:
        try:
            return compiled(*arguments, **options)
        except torch._dynamo.exc.TorchDynamoException as error:
            reason = str(error).strip().splitlines()[0]
            raise SettingError(
                f"compute.compile_update = true: cannot be compiled ({reason}); set it to false"
            ) from error

    return forward


def _cache_compiled() -> None:
    """Keep compiled networks between runs."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path.home() / ".cache/dat/compiled"))
