"""The smoothed classifier: noisy copies of an image vote on its class."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from dat.core.deprecation import RenamedAttribute
from dat.core.rng import generator
from dat.core.wrapper import ModelWrapper


class Smoothed(ModelWrapper):
    """A differentiable smoothed classifier, for attacks (Salman et al. 2019): the log of the mean
    softmax over `copies` noisy copies of the image.

    The noise is fixed and the same for all images, so that the output depends on the image alone
    and gradients match it. Certification needs fresh noise: see `certify`.
    """

    def __init__(self, network: nn.Module, *, sigma: float, copies: int = 8, seed: int = 0) -> None:
        super().__init__()
        if not sigma > 0 or copies < 1:
            raise ValueError(f"sigma = {sigma}, copies = {copies}: must be above 0")
        self.network, self.sigma, self.copies, self.seed = network, sigma, copies, seed
        self._noise: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        return _mean_log_softmax(self.network, x, self._noise_for(x))

    def _noise_for(self, x: Tensor) -> Tensor:
        noise = self._noise
        if noise is None or noise.shape[1:] != x.shape[1:]:
            random = generator(self.seed, "smoothed")
            noise = torch.randn((self.copies, *x.shape[1:]), generator=random) * self.sigma
        self._noise = noise.to(x)
        return self._noise

    def wrap(self, network: nn.Module) -> Smoothed:
        """The same wrapper around another network."""
        return Smoothed(network, sigma=self.sigma, copies=self.copies, seed=self.seed)

    def preprocess(self, x: Tensor) -> Tensor:
        """The input that the wrapped network receives, without the noise."""
        return x

    def with_fixed_noise(self, x: Tensor) -> nn.Module:
        """The classifier for images of this shape, with its noise as a buffer, so that it can be
        traced and exported."""
        return _FixedNoise(self.network, self._noise_for(x))

    settled = RenamedAttribute("with_fixed_noise")

    @property
    def note(self) -> str:
        """A description for reports."""
        return f"a vote of {self.copies} noisy copies (sigma {self.sigma:g})"

    def extra_repr(self) -> str:
        return f"sigma={self.sigma}, copies={self.copies}, seed={self.seed}"


class _FixedNoise(nn.Module):
    noise: Tensor

    def __init__(self, network: nn.Module, noise: Tensor) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("noise", noise)

    def forward(self, x: Tensor) -> Tensor:
        return _mean_log_softmax(self.network, x, self.noise)


def _mean_log_softmax(network: nn.Module, x: Tensor, noise: Tensor) -> Tensor:
    outputs = [network(x + copy_noise) for copy_noise in noise]
    votes = torch.stack([functional.log_softmax(logits, dim=1) for logits in outputs])
    return votes.logsumexp(0) - math.log(len(outputs))
