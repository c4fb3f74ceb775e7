"""SGD with momentum, torch's own: 'DAT w/o LALR' of the paper and, with a scaled rate, DAT-LSGD."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from dat.fields import SettingError, setting
from dat.optim.base import OuterOracle, parameter_groups


@dataclass(frozen=True, kw_only=True)
class SGD(OuterOracle):
    """`torch.optim.SGD`. The paper's code has weight decay 5e-4 on CIFAR, 1e-4 on ImageNet."""

    lr: float = setting(0.1, "peak learning rate eta", gt=0)
    momentum: float = setting(0.9, "momentum", ge=0, lt=1)
    nesterov: bool = setting(False, "Nesterov momentum")
    decay_1d: bool = setting(True, "decay biases and BN scales and shifts")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nesterov and self.momentum == 0:
            raise SettingError("nesterov = true: needs momentum above 0")

    def __call__(self, model: nn.Module, *, batch: int = 256) -> torch.optim.SGD:
        return self._make(model, self.lr)

    def _make(self, model: nn.Module, lr: float) -> torch.optim.SGD:
        groups = parameter_groups(
            model, lr=lr, weight_decay=self.weight_decay, decay_1d=self.decay_1d
        )
        return torch.optim.SGD(groups, lr=lr, momentum=self.momentum, nesterov=self.nesterov)


@dataclass(frozen=True, kw_only=True)
class LSGD(SGD):
    """The rate grows linearly with the batch: Goyal et al. 2017, arXiv 1706.02677.

    So trained Xie et al. (2019, arXiv 1812.03411), the paper's baseline DAT-LSGD. The warm-up that
    belongs to it is the schedule's.
    """

    lr: float = setting(0.1, "peak learning rate at base_batch", gt=0)
    base_batch: int = setting(256, "global batch at which lr holds as it is", ge=1)

    def __call__(self, model: nn.Module, *, batch: int = 256) -> torch.optim.SGD:
        return self._make(model, self.lr * batch / self.base_batch)
