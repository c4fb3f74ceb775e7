"""The mode of the network during an attack."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from dat.core.module_state import preserve_state

if TYPE_CHECKING:
    from torch import nn


@contextmanager
def attack_mode(model: nn.Module, bn: str = "eval") -> Iterator[None]:
    """Put batch normalization and dropout into `eval` or `train` mode during an attack.

    On exit, every module's mode, running statistics and other buffers are restored.
    """
    if bn not in ("eval", "train"):
        raise ValueError(f"bn = {bn!r}: must be 'eval' or 'train'")
    with preserve_state(model):
        model.train(bn == "train")
        yield
