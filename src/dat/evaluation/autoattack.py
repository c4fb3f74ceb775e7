"""AutoAttack (Croce & Hein 2020) for any model, in one call."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from dat.comm import World
from dat.data import ImageData
from dat.evaluation.accuracy import world_of
from dat.evaluation.assess import assess
from dat.evaluation.journal import Cost
from dat.evaluation.survey import Progress, silent
from dat.threat import ThreatModel

VERSIONS = {"standard": "autoattack", "rand": "autoattack-rand"}


@dataclass(frozen=True)
class AutoAttacked:
    """What AutoAttack found."""

    examples: Tensor
    """An adversarial example for each image that has one; elsewhere the image itself."""
    fell_to: tuple[str | None, ...]
    """For each image `clean` if it was wrong to begin with, the attack that broke it, or none."""
    counts: dict[str, int]
    """How many fell to each, in order."""
    costs: dict[str, Cost]
    warnings: tuple[str, ...]
    """Signs that the model's robustness is not what it seems."""

    @property
    def robust(self) -> Tensor:
        """Which images withstood everything."""
        return torch.tensor([name is None for name in self.fell_to])

    @property
    def ta(self) -> float:
        """Test accuracy in percent."""
        return 100.0 * (1 - self.counts["clean"] / len(self.fell_to))

    @property
    def ra(self) -> float:
        """Robust accuracy in percent."""
        return 100.0 * self.fell_to.count(None) / len(self.fell_to)


def autoattack(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    eps: float = 8 / 255,
    norm: str = "linf",
    version: str = "standard",
    batch: int = 256,
    seed: int = 0,
    folder: Path | str | None = None,
    world: World | None = None,
    progress: Progress = silent,
) -> AutoAttacked:
    """Attack images in [0, 1] with the whole suite; `model` maps them to logits.

    `standard` is APGD-CE, targeted APGD-DLR, targeted FAB and Square; `rand` is for models that
    answer at random. With a `folder`, an interrupted call goes on where it was. Under torchrun
    all workers call it with the same arguments, share the work, and get the same result.
    """
    if batch < 1:
        raise ValueError(f"batch = {batch}: must be at least 1")
    if version not in VERSIONS:
        raise ValueError(f"version = {version!r}: must be one of {', '.join(VERSIONS)}")
    name = VERSIONS[version]
    data = ImageData.of(x.detach().cpu(), y.detach().cpu())
    found = assess(
        model,
        data,
        [name],
        threat=ThreatModel(norm=norm, eps=eps),
        world=world_of(model) if world is None else world,
        batch=batch,
        seed=seed,
        folder=None if folder is None else Path(folder),
        keep=True,
        progress=progress,
    )
    verdicts = found.suites[name]
    words = {-1: "clean", 0: None} | dict(enumerate(verdicts.attacks, 1))
    fell_to = tuple(words[number] for number in verdicts.fell.tolist())
    assert verdicts.examples is not None
    kind = x.dtype if x.is_floating_point() else torch.float32  # bytes could not hold them
    return AutoAttacked(
        examples=verdicts.examples.reshape(x.shape).to(x.device, kind),
        fell_to=fell_to,
        counts={"clean": fell_to.count("clean")} | verdicts.counts(),
        costs=verdicts.costs,
        warnings=found.warnings,
    )
