"""AutoAttack (Croce & Hein 2020) on any model, in one call."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from dat.core.deprecation import RenamedAttribute
from dat.core.threat import ThreatModel
from dat.data import Data, image_data
from dat.distributed import World
from dat.evaluation.assess import assess
from dat.evaluation.progress_file import Cost
from dat.evaluation.runner import Progress, silent
from dat.evaluation.workers import world_of

VERSIONS = {"standard": "autoattack", "rand": "autoattack-rand"}


@dataclass(frozen=True)
class AutoAttacked:
    """The result of AutoAttack."""

    examples: Tensor
    """An adversarial example for each image that was broken, otherwise the image itself."""
    broken_by: tuple[str | None, ...]
    """Per image: the attack that broke it, `clean` if it is misclassified as it is, or None."""
    counts: dict[str, int]
    """Number of images that each attack broke, in order."""
    costs: dict[str, Cost]
    warnings: tuple[str, ...]
    """Signs of gradient masking."""

    fell_to = RenamedAttribute("broken_by")

    @property
    def robust(self) -> Tensor:
        """Which images survived all attacks."""
        return torch.tensor([name is None for name in self.broken_by])

    @property
    def ta(self) -> float:
        """Test accuracy in percent."""
        return 100.0 * (1 - self.counts["clean"] / len(self.broken_by))

    @property
    def ra(self) -> float:
        """Robust accuracy in percent."""
        return 100.0 * self.broken_by.count(None) / len(self.broken_by)


def autoattack(
    model: nn.Module,
    x: Tensor | Data,
    y: Tensor | None = None,
    *,
    eps: float = 8 / 255,
    norm: str = "linf",
    version: str = "standard",
    batch: int = 256,
    seed: int = 0,
    folder: Path | str | None = None,
    bundle: Path | str | None = None,
    world: World | None = None,
    progress: Progress = silent,
) -> AutoAttacked:
    """Run AutoAttack on images in [0, 1] with labels, or on a dataset; `model` maps images to
    logits.

    `standard` is APGD-CE, targeted APGD-DLR, targeted FAB and Square; `rand` is for randomized
    models. With a `folder`, an interrupted call can be resumed; `bundle` is a file for the evidence
    that `dat.verify` checks. Under torchrun all workers call
    this with the same arguments, share the work, and get the same result.
    """
    if batch < 1:
        raise ValueError(f"batch = {batch}: must be at least 1")
    if version not in VERSIONS:
        raise ValueError(f"version = {version!r}: must be one of {', '.join(VERSIONS)}")
    name = VERSIONS[version]
    if not isinstance(x, Tensor):
        data = image_data(x)
    elif y is not None:
        data = image_data((x, y))
    else:
        raise ValueError("autoattack: give the labels as well, or a dataset")
    evaluation = assess(
        model,
        data,
        [name],
        threat=ThreatModel(norm=norm, eps=eps),
        world=world_of(model) if world is None else world,
        batch=batch,
        seed=seed,
        folder=None if folder is None else Path(folder),
        keep=True,
        bundle=bundle,
        progress=progress,
    )
    result = evaluation.suites[name]
    names = {-1: "clean", 0: None} | dict(enumerate(result.attacks, 1))
    broken_by = tuple(names[number] for number in result.broken_by.tolist())
    assert result.examples is not None
    return AutoAttacked(
        examples=_like(result.examples, x),
        broken_by=broken_by,
        counts={"clean": broken_by.count("clean")} | result.counts(),
        costs=result.costs,
        warnings=evaluation.warnings,
    )


def _like(examples: Tensor, x: object) -> Tensor:
    """The examples with the shape, the device and the dtype of the images, if these are a tensor;
    never as uint8, which would round the perturbations."""
    if not isinstance(x, Tensor):
        return examples
    dtype = x.dtype if x.is_floating_point() else torch.float32
    return examples.reshape(x.shape).to(x.device, dtype)
