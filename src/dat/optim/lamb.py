"""LAMB (You et al. 2019, arXiv 1904.00962): LALR over Adam, the paper's own oracle (Algorithm A2).

Its versions differ, so they have names: `paper` is Algorithm A2, `official` is the LAMB of the
paper's repository (github.com/dat-2022/dat, after cybertronai/pytorch-lamb), `modern` leaves biases
and BN alone, as timm does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from dat.fields import SettingError, setting
from dat.optim.base import OuterOracle, parameter_groups
from dat.optim.directions import AdamDirection
from dat.optim.lalr import LALR


class Preset(NamedTuple):
    """What a preset says about the fields that are left at none."""

    debias: bool
    decay_1d: bool
    adapt_1d: bool


PRESETS = {
    "paper": Preset(debias=True, decay_1d=True, adapt_1d=True),
    "official": Preset(debias=False, decay_1d=True, adapt_1d=True),
    "modern": Preset(debias=True, decay_1d=False, adapt_1d=False),
}


@dataclass(frozen=True, kw_only=True)
class LAMB(OuterOracle):
    """A preset, and fields that override it where they are not none.

    The weight decay is part of u, so it is inside the trust ratio (A2 shows none; set it to 0 for
    A2 to the letter).
    """

    preset: str = setting(
        "paper",
        "paper: Algorithm A2; official: the authors' code, not debiased; "
        "modern: biases and BN neither decayed nor adapted",
        choices=tuple(PRESETS),
    )
    betas: tuple[float, float] = setting((0.9, 0.999), "decay of the two moments", ge=0, lt=1)
    zeta: float = setting(1e-6, "added to sqrt(v)", gt=0)
    c_l: float = setting(0.0, "lower bound of the scaling tau(||theta||)", ge=0)
    c_u: float = setting(10.0, "upper bound of the scaling tau(||theta||)", gt=0, finite=False)
    debias: bool | None = setting(None, "debias the moments; none is as the preset says")
    decay_1d: bool | None = setting(
        None, "decay biases and BN scales and shifts; none is as the preset says"
    )
    adapt_1d: bool | None = setting(
        None, "adapt the rate of biases and BN scales and shifts; none is as the preset says"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.c_l > self.c_u:
            raise SettingError(f"c_l = {self.c_l:g} is above c_u = {self.c_u:g}")

    def __call__(self, model: nn.Module, *, batch: int = 256) -> LALR:
        preset = PRESETS[self.preset]
        groups = parameter_groups(
            model,
            lr=self.lr,
            weight_decay=self.weight_decay,
            decay_1d=preset.decay_1d if self.decay_1d is None else self.decay_1d,
            adapt=preset.adapt_1d if self.adapt_1d is None else self.adapt_1d,
        )
        debias = preset.debias if self.debias is None else self.debias
        direction = AdamDirection(self.betas, self.zeta, debias)
        return LALR(groups, direction, lr=self.lr, c_l=self.c_l, c_u=self.c_u)
