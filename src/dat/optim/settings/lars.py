"""LARS's settings: preset `paper` is LALR over momentum (eq. (3); Algorithm 1 of You et al. 2019,
arXiv 1904.00962), `classic` is the original (`classic_lars.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dat.core.settings import SettingError, setting
from dat.optim.base import OptimizerSettings, parameter_groups

if TYPE_CHECKING:
    from torch import nn

    from dat.optim.lalr import Layerwise


@dataclass(frozen=True, kw_only=True)
class LARSSettings(OptimizerSettings):
    """Momentum SGD with layer-wise learning rates."""

    preset: str = setting(
        "paper",
        "paper: eq. (3) over momentum; classic: You et al. 2017, with the rate inside the momentum",
        choices=("paper", "classic"),
    )
    momentum: float = setting(0.9, "momentum", ge=0, lt=1)
    c_l: float = setting(0.0, "paper: lower bound of the scaling tau(||theta||)", ge=0)
    c_u: float = setting(
        10.0, "paper: upper bound of the scaling tau(||theta||)", gt=0, finite=False
    )
    # Only lr * trust_coefficient matters for adapted layers. At 1, lr has its usual meaning, also
    # for layers that are not adapted; You et al. use 0.001 and lr about 10.
    trust_coefficient: float = setting(
        1.0, "classic: trust coefficient; 1 with lr 0.01 equals 0.001 with lr 10", gt=0
    )
    decay_1d: bool = setting(True, "apply weight decay to biases and BN parameters")
    adapt_1d: bool = setting(True, "adapt the learning rate of biases and BN parameters")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.c_l > self.c_u:
            raise SettingError(f"c_l = {self.c_l:g} is above c_u = {self.c_u:g}")

    def __call__(self, model: nn.Module, *, batch: int = 256) -> Layerwise:
        from dat.optim.classic_lars import ClassicLARS
        from dat.optim.lars import LARS

        groups = parameter_groups(
            model,
            lr=self.lr,
            weight_decay=self.weight_decay,
            decay_1d=self.decay_1d,
            adapt=self.adapt_1d,
        )
        if self.preset == "classic":
            classic = ClassicLARS(
                groups,
                lr=self.lr,
                momentum=self.momentum,
                trust_coefficient=self.trust_coefficient,
            )
            return self.finish(classic)
        return self.finish(LARS.of(self, groups))
