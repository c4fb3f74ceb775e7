"""How the network stands while it is attacked, and that it is found again as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def attack_mode(model: nn.Module, bn: str = "eval") -> Iterator[None]:
    """Attack with batch normalisation (and dropout) in `eval` or in `train` mode.

    Afterwards every module has the mode it had, and the running statistics are untouched.
    """
    if bn not in ("eval", "train"):
        raise ValueError(f"bn = {bn!r}: must be 'eval' or 'train'")
    was_training = [(module, module.training) for module in model.modules()]
    saved = [(buffer, buffer.clone()) for buffer in model.buffers()] if bn == "train" else []
    try:
        model.train(bn == "train")
        yield
    finally:
        for module, training in was_training:
            module.training = training
        with torch.no_grad():
            for buffer, value in saved:
                buffer.copy_(value)
