"""All training options, one line each.

To add an option, write its file and add a line here. Its settings then appear in the group `train`
of a recipe, checkpoints save its state, and tests/train/test_every_option.py covers it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from dat.core.settings import Settings, inline
from dat.core.short_repr import short_repr
from dat.train.averaging import Averaging
from dat.train.awp import AWP
from dat.train.batch_norm import BatchNormScope
from dat.train.batch_schedule import BatchSchedule
from dat.train.checkpointing import Checkpointing
from dat.train.eps_warmup import EpsWarmup
from dat.train.guard import Guard
from dat.train.image_size import ImageSize
from dat.train.inner import AttackMode
from dat.train.loss_scaling import LossScaling
from dat.train.mixing import Mixing
from dat.train.overfitting_monitor import OverfittingMonitor
from dat.train.part import Option
from dat.train.selection import Selection
from dat.train.subgroup import Subgroup


@dataclass(frozen=True, kw_only=True)
class Options(Settings):
    """The options of a run; their hooks run in this order."""

    batch_schedule: BatchSchedule = inline(BatchSchedule)
    subgroup: Subgroup = inline(Subgroup)
    mixing: Mixing = inline(Mixing)
    image_size: ImageSize = inline(ImageSize)
    eps_warmup: EpsWarmup = inline(EpsWarmup)
    attack_mode: AttackMode = inline(AttackMode)
    batch_norm: BatchNormScope = inline(BatchNormScope)
    awp: AWP = inline(AWP)
    overfitting_monitor: OverfittingMonitor = inline(OverfittingMonitor)
    guard: Guard = inline(Guard)
    loss_scaling: LossScaling = inline(LossScaling)
    checkpointing: Checkpointing = inline(Checkpointing)
    averaging: Averaging = inline(Averaging)
    selection: Selection = inline(Selection)

    __repr__ = short_repr

    def each(self) -> Iterator[Option]:
        for field in dataclasses.fields(self):
            yield getattr(self, field.name)
