"""Gradients inside `torch.inference_mode`, in which Lightning, for example, validates.

`torch.enable_grad` is not enough there. Inference mode has to be left, and autograd refuses the
tensors that were made in it, such as the labels of the batch that a loss refers to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only


@contextmanager
def outside_inference_mode() -> Iterator[None]:
    """Leave inference mode, and let autograd use tensors that were made in it, as copies."""
    with torch.inference_mode(False), _Copies():
        yield


class _Copies(TorchFunctionMode):
    """Passes copies of tensors made in inference mode to every function of torch."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        copies: list[tuple[Tensor, int]] = []

        def copied(tensor: Tensor) -> Tensor:
            if not tensor.is_inference():
                return tensor
            copy = tensor.clone()
            copies.append((copy, copy._version))
            return copy

        args, kwargs = tree_map_only(Tensor, copied, (args, dict(kwargs or {})))
        result = function(*args, **kwargs)
        if any(copy._version != version for copy, version in copies):
            raise RuntimeError(
                "an attack cannot overwrite a tensor that was made in inference mode; clone it "
                "inside the loss"
            )
        return result
