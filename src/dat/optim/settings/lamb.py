"""LAMB's settings. There are three presets: `paper` is Algorithm A2, `official` is the LAMB of the
paper's repository (github.com/dat-2022/dat, after cybertronai/pytorch-lamb), `modern` neither
decays nor adapts biases and BN, as in timm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from dat.core.settings import SettingError, setting
from dat.optim.base import OptimizerSettings, parameter_groups

if TYPE_CHECKING:
    from torch import nn

    from dat.optim.lamb import LAMB


class Preset(NamedTuple):
    """The values of the fields that are left at none."""

    debias: bool
    decay_1d: bool
    adapt_1d: bool


PRESETS = {
    "paper": Preset(debias=True, decay_1d=True, adapt_1d=True),
    "official": Preset(debias=False, decay_1d=True, adapt_1d=True),
    "modern": Preset(debias=True, decay_1d=False, adapt_1d=False),
}


@dataclass(frozen=True, kw_only=True)
class LAMBSettings(OptimizerSettings):
    """A preset, and fields that override it unless they are none.

    The weight decay is part of u, so it affects the trust ratio (A2 has none; set it to 0 for the
    exact algorithm).
    """

    preset: str = setting(
        "paper",
        "paper: Algorithm A2; official: the authors' code, without debiasing; "
        "modern: biases and BN neither decayed nor adapted",
        choices=tuple(PRESETS),
    )
    betas: tuple[float, float] = setting((0.9, 0.999), "decay rates of the moments", ge=0, lt=1)
    zeta: float = setting(1e-6, "term added to sqrt(v) for stability", gt=0)
    c_l: float = setting(0.0, "lower bound of the scaling tau(||theta||)", ge=0)
    c_u: float = setting(10.0, "upper bound of the scaling tau(||theta||)", gt=0, finite=False)
    debias: bool | None = setting(None, "debias the moments; none: according to the preset")
    decay_1d: bool | None = setting(
        None, "apply weight decay to biases and BN parameters; none: according to the preset"
    )
    adapt_1d: bool | None = setting(
        None, "adapt the learning rate of biases and BN parameters; none: according to the preset"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.c_l > self.c_u:
            raise SettingError(f"c_l = {self.c_l:g} is above c_u = {self.c_u:g}")

    def __call__(self, model: nn.Module, *, batch: int = 256) -> LAMB:
        from dat.optim.lamb import LAMB

        resolved = self.resolved()
        groups = parameter_groups(
            model,
            lr=self.lr,
            weight_decay=self.weight_decay,
            decay_1d=resolved.decay_1d,
            adapt=resolved.adapt_1d,
        )
        return self.finish(LAMB.of(self, groups))

    def resolved(self) -> Preset:
        """The preset, overridden by the fields that are not none."""
        given: dict[str, Any] = {name: getattr(self, name) for name in Preset._fields}
        chosen = {name: value for name, value in given.items() if value is not None}
        return PRESETS[self.preset]._replace(**chosen)
