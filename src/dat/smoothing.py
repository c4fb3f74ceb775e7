"""The smoothed classifier: a network's answer is put to the vote of noisy copies of the image."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from dat.rng import generator


class Smoothed(nn.Module):
    """log of the mean softmax over `copies` noisy copies: what a smoothed classifier answers, as
    something that can be attacked (Salman et al. 2019).

    All images meet the same noise, and every time, so that an answer depends on the image alone and
    the gradients are those of what was answered. A certificate needs fresh noise: see `certify`.
    """

    def __init__(self, network: nn.Module, *, sigma: float, copies: int = 8, seed: int = 0) -> None:
        super().__init__()
        if not sigma > 0 or copies < 1:
            raise ValueError(f"sigma = {sigma}, copies = {copies}: must be above 0")
        self.network, self.sigma, self.copies, self.seed = network, sigma, copies, seed
        self._noise: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        return _vote(self.network, x, self._drawn(x))

    def _drawn(self, x: Tensor) -> Tensor:
        noise = self._noise
        if noise is None or noise.shape[1:] != x.shape[1:]:
            random = generator(self.seed, "smoothed")
            noise = torch.randn((self.copies, *x.shape[1:]), generator=random) * self.sigma
        self._noise = noise.to(x)
        return self._noise

    def around(self, network: nn.Module) -> Smoothed:
        """The same of another network."""
        return Smoothed(network, sigma=self.sigma, copies=self.copies, seed=self.seed)

    def settled(self, x: Tensor) -> nn.Module:
        """The same for images of this shape alone, with the noise as a part of it: something that
        can be traced and exported."""
        return _Settled(self.network, self._drawn(x))

    @property
    def note(self) -> str:
        return f"a vote of {self.copies} noisy copies (sigma {self.sigma:g})"

    def extra_repr(self) -> str:
        return f"sigma={self.sigma}, copies={self.copies}, seed={self.seed}"


class _Settled(nn.Module):
    noise: Tensor

    def __init__(self, network: nn.Module, noise: Tensor) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("noise", noise)

    def forward(self, x: Tensor) -> Tensor:
        return _vote(self.network, x, self.noise)


def _vote(network: nn.Module, x: Tensor, noise: Tensor) -> Tensor:
    each = [network(x + its) for its in noise]
    votes = torch.stack([functional.log_softmax(logits, dim=1) for logits in each])
    return votes.logsumexp(0) - math.log(len(each))
