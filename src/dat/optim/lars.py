"""LARS (Algorithm 1 of You et al. 2019, arXiv 1904.00962): LALR over momentum."""

from __future__ import annotations

from typing import Any, Self, TypedDict, Unpack, overload

from torch import Tensor
from torch.optim.optimizer import ParamsT

from dat.optim.configured import Configured
from dat.optim.directions import MomentumDirection
from dat.optim.lalr import LALR
from dat.optim.settings.lars import LARSSettings


class LARSOptions(TypedDict, total=False):
    """The types of the options; `LARSSettings` defines them."""

    weight_decay: float
    momentum: float
    c_l: float
    c_u: float
    decay_1d: bool
    adapt_1d: bool


class LARS(Configured, LALR):
    """SGD with momentum and layer-wise learning rates; `ClassicLARS` is the original of 2017.

    Without parameters, a `LARSSettings` with the same options, for a `Trainer`. Parameter groups
    may override lr, weight_decay, momentum, c_l, c_u, decay_1d, adapt_1d and adapt.
    """

    settings = LARSSettings
    settings_only = "clip", "preset", "trust_coefficient"

    @overload
    def __new__(
        cls, params: ParamsT, lr: float | Tensor = ..., **options: Unpack[LARSOptions]
    ) -> Self: ...

    @overload
    def __new__(  # type: ignore[misc]  # not an instance
        cls,
        *,
        lr: float = ...,
        clip: float | None = ...,
        preset: str = ...,
        trust_coefficient: float = ...,
        **options: Unpack[LARSOptions],
    ) -> LARSSettings: ...

    def __new__(cls, *args: Any, **options: Any) -> Any:
        return super().__new__(cls, *args, **options)

    def _configure(self, params: ParamsT, lr: float | Tensor, settings: LARSSettings) -> None:
        LALR.__init__(
            self,
            params,
            MomentumDirection(settings.momentum),
            lr=lr,
            weight_decay=settings.weight_decay,
            c_l=settings.c_l,
            c_u=settings.c_u,
            decay_1d=settings.decay_1d,
            adapt_1d=settings.adapt_1d,
        )
