"""LAMB (You et al. 2019, arXiv 1904.00962): LALR over Adam, the paper's optimizer, Algorithm A2."""

from __future__ import annotations

from typing import Any, Self, TypedDict, Unpack, overload

from torch import Tensor
from torch.optim.optimizer import ParamsT

from dat.optim.configured import Configured
from dat.optim.directions import AdamDirection
from dat.optim.lalr import LALR
from dat.optim.settings.lamb import LAMBSettings


class LAMBOptions(TypedDict, total=False):
    """The types of the options; `LAMBSettings` defines them."""

    weight_decay: float
    preset: str
    betas: tuple[float, float]
    zeta: float
    c_l: float
    c_u: float
    debias: bool | None
    decay_1d: bool | None
    adapt_1d: bool | None


class LAMB(Configured, LALR):
    """Adam with layer-wise learning rates.

    Without parameters, a `LAMBSettings` with the same options, for a `Trainer`. Parameter groups
    may override lr, weight_decay, betas, zeta, debias, c_l, c_u, decay_1d, adapt_1d and adapt.
    """

    settings = LAMBSettings

    @overload
    def __new__(
        cls, params: ParamsT, lr: float | Tensor = ..., **options: Unpack[LAMBOptions]
    ) -> Self: ...

    @overload
    def __new__(  # type: ignore[misc]  # not an instance
        cls, *, lr: float = ..., clip: float | None = ..., **options: Unpack[LAMBOptions]
    ) -> LAMBSettings: ...

    def __new__(cls, *args: Any, **options: Any) -> Any:
        return super().__new__(cls, *args, **options)

    def _configure(self, params: ParamsT, lr: float | Tensor, settings: LAMBSettings) -> None:
        resolved = settings.resolved()
        LALR.__init__(
            self,
            params,
            AdamDirection(settings.betas, settings.zeta, resolved.debias),
            lr=lr,
            weight_decay=settings.weight_decay,
            c_l=settings.c_l,
            c_u=settings.c_u,
            decay_1d=resolved.decay_1d,
            adapt_1d=resolved.adapt_1d,
        )
