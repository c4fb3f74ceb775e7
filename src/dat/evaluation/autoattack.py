"""AutoAttack (Croce & Hein 2020) on any model, in one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from dat.attacks.suites import CLEAN, Suite, subset_of, suite
from dat.core.deprecation import RenamedAttribute
from dat.core.progress import Progress
from dat.core.threat import ThreatModel
from dat.data import Data, image_data
from dat.distributed import World
from dat.evaluation.assess import assess
from dat.evaluation.progress_file import Cost
from dat.evaluation.workers import world_of

VERSIONS = {"standard": "autoattack", "rand": "autoattack-rand"}


@dataclass(frozen=True, repr=False)
class AutoAttackResult:
    """The result of AutoAttack, or of some of its attacks."""

    examples: Tensor
    """An adversarial example for each image that was broken, otherwise the image itself."""
    broken_by: tuple[str | None, ...]
    """Per image: the attack that broke it, `clean` if it is misclassified as it is, or None."""
    counts: dict[str, int]
    """Number of images that each attack broke, in order."""
    costs: dict[str, Cost]
    warnings: tuple[str, ...]
    """Signs of gradient masking."""
    suite: str = "autoattack"
    """`autoattack`, `autoattack-rand` or, for a subset, the attacks that were run."""

    fell_to = RenamedAttribute("broken_by")

    @property
    def attacks(self) -> tuple[str, ...]:
        """The attacks that were run, in order."""
        return tuple(name for name in self.counts if name != CLEAN)

    @property
    def robust(self) -> Tensor:
        """Which images survived all attacks."""
        return torch.tensor([name is None for name in self.broken_by])

    @property
    def ta(self) -> float:
        """Test accuracy in percent."""
        return 100.0 * (1 - self.counts[CLEAN] / len(self.broken_by))

    @property
    def ra(self) -> float:
        """Robust accuracy in percent."""
        return 100.0 * self.broken_by.count(None) / len(self.broken_by)

    def table(self) -> str:
        """Which attack broke which image: a line per attack, with the accuracy after it (%)."""
        lines, remaining, images = ["attack\tbroke\taccuracy\timages"], 0, len(self.broken_by)
        for name, count in self.counts.items():
            remaining += count
            rows = [str(row) for row, broken_by in enumerate(self.broken_by) if broken_by == name]
            left = 100.0 * (1 - remaining / images)
            lines.append(f"{name}\t{count}\t{left:.1f}\t{','.join(rows)}")
        return "\n".join(lines) + "\n"

    def __repr__(self) -> str:
        part = "" if self.suite in VERSIONS.values() else " (not all of AutoAttack)"
        return (
            f"{self.suite}{part}: {len(self.broken_by)} images, TA {self.ta:.1f} %, RA "
            f"{self.ra:.1f} %; broken: "
            + ", ".join(f"{name} {count}" for name, count in self.counts.items())
        )


def autoattack(
    model: nn.Module,
    x: Tensor | Data,
    y: Tensor | None = None,
    *,
    eps: float = 8 / 255,
    norm: str = "linf",
    version: str = "standard",
    attacks: Sequence[str] | None = None,
    batch: int = 256,
    seed: int = 0,
    folder: Path | str | None = None,
    bundle: Path | str | None = None,
    world: World | None = None,
    progress: Progress | bool = False,
) -> AutoAttackResult:
    """Run AutoAttack on images in [0, 1] with labels, or on a dataset; `model` maps images to
    logits.

    `standard` is APGD-CE, targeted APGD-DLR, targeted FAB and Square; `rand` is for randomized
    models. `attacks` chooses some of them, in this order (`["apgd-ce", "square"]`); such a result
    is not AutoAttack, and its `suite` says so. `progress=True` draws a bar. With a `folder`, an
    interrupted call can be resumed; `bundle` is a file for the evidence that `dat.verify` checks.
    Under torchrun all workers call this with the same arguments, share the work, and get the same
    result.
    """
    if batch < 1:
        raise ValueError(f"batch = {batch}: must be at least 1")
    if version not in VERSIONS:
        raise ValueError(f"version = {version!r}: must be one of {', '.join(VERSIONS)}")
    if isinstance(attacks, str):
        raise ValueError(f"attacks = {attacks!r}: must be a list of names")

    def chosen(classes: int) -> Suite:
        name = VERSIONS[version]
        return suite(name, classes) if attacks is None else subset_of(name, attacks, classes)

    if not isinstance(x, Tensor):
        data = image_data(x)
    elif y is not None:
        data = image_data((x, y))
    else:
        raise ValueError("autoattack: give the labels as well, or a dataset")
    evaluation = assess(
        model,
        data,
        [chosen],
        threat=ThreatModel(norm=norm, eps=eps),
        world=world_of(model) if world is None else world,
        batch=batch,
        seed=seed,
        folder=None if folder is None else Path(folder),
        keep=True,
        bundle=bundle,
        progress=progress,
    )
    ((name, result),) = evaluation.suites.items()
    names = {-1: CLEAN, 0: None} | dict(enumerate(result.attacks, 1))
    broken_by = tuple(names[number] for number in result.broken_by.tolist())
    assert result.examples is not None
    return AutoAttackResult(
        examples=_like(result.examples, x),
        broken_by=broken_by,
        counts={CLEAN: broken_by.count(CLEAN)} | result.counts(),
        costs=result.costs,
        warnings=evaluation.warnings,
        suite=name,
    )


def _like(examples: Tensor, x: object) -> Tensor:
    """The examples with the shape, the device and the dtype of the images, if these are a tensor;
    never as uint8, which would round the perturbations."""
    if not isinstance(x, Tensor):
        return examples
    dtype = x.dtype if x.is_floating_point() else torch.float32
    return examples.reshape(x.shape).to(x.device, dtype)
