"""The workload of a benchmark: network, images and attack, the same for all implementations."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dat.attacks import FGSM, PGD, Attack
from dat.core.threat import ThreatModel
from dat.data import ImageData
from dat.models import build_model, normalized

MEAN, STD = (0.49, 0.48, 0.45), (0.25, 0.24, 0.26)
CLASSES = 10
RATIO = 1.25
"""FGSM's step size, in units of eps."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Images are random, as their content does not affect the speed."""

    model: str = "preact-resnet18"
    width: int | None = 16
    batch: int = 128
    size: int = 32
    """Height and width of the images, in pixels."""
    attack: str = "pgd-10"
    """`pgd-K` or `fgsm`."""
    eps: float = 8 / 255

    def __post_init__(self) -> None:
        if not re.fullmatch(r"fgsm|pgd-[1-9]\d*", self.attack):
            raise ValueError(
                f"--attack {self.attack}: must be fgsm, or pgd with a number of steps, e.g. pgd-10"
            )

    @property
    def steps(self) -> int:
        return 1 if self.attack == "fgsm" else int(self.attack.removeprefix("pgd-"))

    @property
    def step_size(self) -> float:
        return RATIO * self.eps if self.attack == "fgsm" else 2.5 * self.eps / self.steps

    @property
    def threat(self) -> ThreatModel:
        return ThreatModel(eps=self.eps)

    def make_attack(self) -> Attack:
        """Our implementation of the attack."""
        if self.attack == "fgsm":
            return FGSM(step_ratio=RATIO)
        return PGD(steps=self.steps)

    def network(self) -> nn.Module:
        net = build_model(self.model, CLASSES, width=self.width, seed=0)
        return normalized(net, MEAN, STD)

    def data(self, count: int | None = None) -> ImageData:
        """`count` images as bytes (default: one batch)."""
        random = torch.Generator().manual_seed(0)
        number = self.batch if count is None else count
        shape = (number, 3, self.size, self.size)
        images = torch.randint(0, 256, shape, generator=random, dtype=torch.uint8)
        labels = torch.randint(CLASSES, (number,), generator=random)
        return ImageData.of(images, labels, classes=CLASSES)

    def images(self) -> tuple[Tensor, Tensor]:
        """One batch as floats, with its labels."""
        data = self.data()
        return data.batch(torch.arange(len(data)), torch.device("cpu"))

    def settings(self) -> dict[str, Any]:
        return asdict(self)
