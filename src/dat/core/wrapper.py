"""The base class of modules that wrap a network."""

from __future__ import annotations

from torch import Tensor, nn


class ModelWrapper(nn.Module):
    """A module around `network` that can wrap another network in the same way.

    A base class rather than a protocol: from Python 3.12 on, a runtime protocol does not see
    `network`, as submodules are not found by `inspect.getattr_static`.
    """

    network: nn.Module

    def wrap(self, network: nn.Module) -> nn.Module:
        """The same wrapper around another network."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.extra_repr()}, network=<{type(self.network).__name__}>)"
        )

    def preprocess(self, x: Tensor) -> Tensor:
        """The input that the wrapped network receives for these images."""
        return x
