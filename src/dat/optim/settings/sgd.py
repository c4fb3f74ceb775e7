"""torch's SGD with momentum: the paper's 'DAT w/o LALR' and, with a scaled rate, DAT-LSGD."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dat.core.lazy import torch
from dat.core.settings import SettingError, setting
from dat.optim.base import TorchSettings, parameter_groups

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class SGD(TorchSettings):
    """`torch.optim.SGD`. The paper's code uses weight decay 5e-4 on CIFAR, 1e-4 on ImageNet."""

    lr: float = setting(0.1, "peak learning rate eta", gt=0)
    momentum: float = setting(0.9, "momentum", ge=0, lt=1)
    nesterov: bool = setting(False, "Nesterov momentum")
    decay_1d: bool = setting(True, "apply weight decay to biases and BN parameters")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nesterov and self.momentum == 0:
            raise SettingError("nesterov = true: needs momentum above 0")

    def __call__(self, model: nn.Module, *, batch: int = 256) -> torch.optim.SGD:
        return self._with_rate(model, self.lr)

    def _with_rate(self, model: nn.Module, lr: float) -> torch.optim.SGD:
        groups = parameter_groups(
            model, lr=lr, weight_decay=self.weight_decay, decay_1d=self.decay_1d
        )
        return self.finish(
            torch.optim.SGD(groups, lr=lr, momentum=self.momentum, nesterov=self.nesterov)
        )


@dataclass(frozen=True, kw_only=True)
class LSGD(SGD):
    """SGD with the linear scaling rule (Goyal et al. 2017, arXiv 1706.02677).

    Xie et al. (2019, arXiv 1812.03411) trained this way, the paper's baseline DAT-LSGD. Use a
    schedule with warm-up.
    """

    lr: float = setting(0.1, "peak learning rate at base_batch", gt=0)
    base_batch: int = setting(256, "global batch size for which lr is given", ge=1)

    def __call__(self, model: nn.Module, *, batch: int = 256) -> torch.optim.SGD:
        return self._with_rate(model, self.lr * batch / self.base_batch)
