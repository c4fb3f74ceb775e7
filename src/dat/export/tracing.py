"""What networks need so that exporters can trace them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dat.core.lazy import torch

if TYPE_CHECKING:
    from torch import nn


@contextmanager
def symbolic_len(model: nn.Module) -> Iterator[None]:
    """Let `len(x)` in a network's code follow the batch size. Python's own returns a plain number,
    so the file would take one batch size only. Layers of torch do not need this."""
    namespaces = {id(names): names for names in map(_namespace, model.modules())}
    changed = [names for names in namespaces.values() if "len" not in names]
    for names in changed:
        names["len"] = _length
    try:
        yield
    finally:
        for names in changed:
            del names["len"]


def _namespace(module: nn.Module) -> dict[str, Any]:
    """The global names that a module's forward pass refers to; none for a layer of torch."""
    forward = inspect.unwrap(type(module).forward)
    names: dict[str, Any] = getattr(forward, "__globals__", {})
    return {} if str(names.get("__name__")).startswith("torch.") else names


def _length(value: Any) -> Any:
    return value.shape[0] if isinstance(value, torch.Tensor) and value.dim() else len(value)
