"""Smaller images first: most epochs at a fraction of the cost, the last ones at full size (as in
AdvXL, Wang et al. 2024, arXiv 2401.04727)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dat import models
from dat.attacks import attack_mode
from dat.core.lazy import functional as F
from dat.core.lazy import torch
from dat.core.settings import SettingError, setting
from dat.train.part import Option

if TYPE_CHECKING:
    from torch import Tensor

    from dat.objectives import Batch
    from dat.train.trainer import Trainer
    from dat.train.worker import Worker


@dataclass(frozen=True, kw_only=True)
class ImageSize(Option):
    """The size of the training images by epoch. Evaluation uses the full size."""

    sizes: tuple[int, ...] = setting(
        (),
        "shorter sides in pixels that training images are scaled down to at first, e.g. 84,112; "
        "empty: full size throughout",
        ge=1,
        key="resize",
    )
    until: tuple[int, ...] = setting(
        (),
        "the epoch after which each size of train.resize ends, e.g. 80,95; the rest is at full "
        "size",
        ge=1,
        key="resize_until",
    )

    @property
    def _shown(self) -> str:
        return f"train.resize = {', '.join(map(str, self.sizes))}"

    @property
    def _until(self) -> str:
        return f"train.resize_until = {', '.join(map(str, self.until))}"

    def size(self, epoch: int) -> int | None:
        """The shorter side in an epoch, counted from 0; None: full size."""
        sizes = zip(self.sizes, self.until, strict=True)
        return next((size for size, until in sizes if epoch < until), None)

    def check(self, trainer: Trainer) -> None:
        self.check_epochs(trainer.epochs)
        if self.sizes and trainer.attack.starts_from == "carried":
            raise SettingError(
                f"{self._shown}: attack.carry needs images of one size; set it to false"
            )

    def check_epochs(self, epochs: int) -> None:
        """Refuse sizes that do not fit this number of epochs."""
        if len(self.sizes) != len(self.until):
            shown = self._shown if self.sizes else self._until
            raise SettingError(
                f"{shown}: train.resize and train.resize_until must have the same length, not "
                f"{len(self.sizes)} and {len(self.until)}"
            )
        if list(self.until) != sorted(set(self.until)):
            raise SettingError(f"{self._until}: must increase")
        if self.until and self.until[-1] >= epochs:
            raise SettingError(f"{self._until}: must be below train.epochs = {epochs}")

    def build(self, trainer: Trainer) -> ImageSize:
        """Refuse sizes that the images or the network do not have."""
        images = trainer.batches.sources[0].data
        full = min(images.images.shape[2:])
        for size in self.sizes:
            if size > full:
                raise SettingError(f"{self._shown}: images are only {full} pixels wide or high")
            if not trainer.sharded:
                x, _ = images.batch(torch.arange(2) % len(images), trainer.world.device)
                self._check_network(trainer.model, scaled(x, size), images.classes)
        return self

    def _check_network(self, model: torch.nn.Module, x: Tensor, classes: int) -> None:
        network, reason = models.adapted(model, x), ""
        with attack_mode(model), torch.no_grad():
            try:
                shape = tuple(network(x).shape)
                reason = "" if shape == (len(x), classes) else f"it returns {shape}"
            except Exception as error:  # a network can fail in any way
                reason = " ".join(str(error).split())
        if reason:
            raise SettingError(
                f"{self._shown}: the network does not take images of {x.shape[2]} x {x.shape[3]} "
                f"pixels ({reason})"
            )

    def on_batch(self, worker: Worker, batch: Batch, epoch: int, step: int) -> Batch:
        size = self.size(epoch)
        return batch if size is None else batch.replaced(scaled(batch.x, size), batch.y)


def scaled(x: Tensor, size: int) -> Tensor:
    """Images scaled down to a shorter side of `size`, with antialiasing."""
    height, width = x.shape[2:]
    shorter = min(height, width)
    target = [round(side * size / shorter) for side in (height, width)]
    if target == [height, width]:
        return x
    resized = F.interpolate(x, target, mode="bilinear", align_corners=False, antialias=True)
    return resized.clamp_(0, 1)
