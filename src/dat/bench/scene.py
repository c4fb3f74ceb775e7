"""A network, images and an attack, the same for all contestants."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dat.attacks import FGSM, PGD, Attack
from dat.data import ImageData
from dat.models import build_model, normalized
from dat.threat import ThreatModel

MEAN, STD = (0.49, 0.48, 0.45), (0.25, 0.24, 0.26)
CLASSES = 10
RATIO = 1.25
"""FGSM's step, in units of eps."""


@dataclass(frozen=True, kw_only=True)
class Scene:
    """What is worked on; random images, as their content does not matter."""

    model: str = "preact-resnet18"
    width: int | None = 16
    batch: int = 128
    size: int = 32
    """Of the images, in pixels."""
    attack: str = "pgd-10"
    """`pgd-K` or `fgsm`."""
    eps: float = 8 / 255

    def __post_init__(self) -> None:
        if not re.fullmatch(r"fgsm|pgd-[1-9]\d*", self.attack):
            raise ValueError(f"--attack {self.attack}: must be fgsm, or pgd and its steps: pgd-10")

    @property
    def steps(self) -> int:
        return 1 if self.attack == "fgsm" else int(self.attack.removeprefix("pgd-"))

    @property
    def step(self) -> float:
        """How far a step goes."""
        return RATIO * self.eps if self.attack == "fgsm" else 2.5 * self.eps / self.steps

    @property
    def threat(self) -> ThreatModel:
        return ThreatModel(eps=self.eps)

    def oracle(self) -> Attack:
        """Our attack."""
        if self.attack == "fgsm":
            return FGSM(step_ratio=RATIO)
        return PGD(steps=self.steps)

    def network(self) -> nn.Module:
        net = build_model(self.model, CLASSES, width=self.width, seed=0)
        return normalized(net, MEAN, STD)

    def data(self, count: int | None = None) -> ImageData:
        """Bytes, as many as a batch has unless it is said otherwise."""
        random = torch.Generator().manual_seed(0)
        number = self.batch if count is None else count
        shape = (number, 3, self.size, self.size)
        images = torch.randint(0, 256, shape, generator=random, dtype=torch.uint8)
        labels = torch.randint(CLASSES, (number,), generator=random)
        return ImageData.of(images, labels, classes=CLASSES)

    def images(self) -> tuple[Tensor, Tensor]:
        """A batch, as floats."""
        data = self.data()
        return data.batch(torch.arange(len(data)), torch.device("cpu"))

    def settings(self) -> dict[str, Any]:
        return asdict(self)
