"""A batch that grows during a run (Smith et al. 2018, arXiv 1711.00489): where the rate would fall,
the noise of the gradient falls instead, and updates become fewer and larger."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dat.fields import SettingError


@dataclass(frozen=True)
class Growth:
    """From each of these epochs on, an update takes `by` times as many batches as before."""

    at: tuple[int, ...] = ()
    """Counted as milestones are: 10 is after ten epochs."""
    by: int = 2

    def __post_init__(self) -> None:
        told = ", ".join(map(str, self.at))
        if any(it < 1 for it in self.at) or list(self.at) != sorted(set(self.at)):
            raise SettingError(f"train.grow = {told}: must increase, from 1 on")
        if self.by < 2:
            raise SettingError(f"train.grow_by = {self.by}: must be a whole number, at least 2")

    def factor(self, epoch: int) -> int:
        """Of how many batches an update is made in that epoch, counted from 0."""
        return math.prod(self.by for it in self.at if epoch >= it)

    def check(self, epochs: int, batch: int, batches: int) -> None:
        """Refuse growth that the run never comes to, or that an epoch is too short for."""
        told = ", ".join(map(str, self.at))
        if self.at and self.at[-1] >= epochs:
            raise SettingError(f"train.grow = {told}: must be below train.epochs = {epochs}")
        most = self.factor(epochs)
        if most > batches:
            raise SettingError(
                f"train.grow = {told}: an update would take {most} batches of {batch} in the end, "
                f"and an epoch has {batches}; grow less, or from a smaller train.batch"
            )
