"""What certification finds: one certificate an image, kept in a folder and gathered."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dat.certification.sampler import ABSTAIN
from dat.comm import World
from dat.data import UNLABELLED
from dat.evaluation.journal import Notebook, telling

COLUMNS = ("idx", "label", "predict", "radius", "correct", "time", "samples")


class Certificate(NamedTuple):
    """What is known of one image."""

    row: int
    predicted: int
    """The smoothed classifier's class, or -1."""
    radius: float
    """It is the same within this distance."""
    samples: int
    seconds: float
    asked: tuple[int, ...] = ()
    """For each radius, the samples after which it was settled."""


@dataclass(frozen=True)
class Certified:
    """What certification found; every false claim about an image has a chance of at most alpha."""

    labels: Tensor
    predicted: Tensor
    radius: Tensor
    samples: Tensor
    seconds: Tensor
    radii: tuple[float, ...]
    """What was asked for; empty if the whole radius was."""
    asked: Tensor
    """For each image and each of `radii`, the samples after which it was settled."""
    network: str = ""
    """What was done to the network that was sampled."""
    batch: int = 0
    """Samples at a time."""

    @property
    def correct(self) -> Tensor:
        """Which images are classified right."""
        if (self.labels == UNLABELLED).any():
            raise ValueError("there are no labels to compare with: give certify the labels")
        return self.predicted == self.labels

    def accuracy(self, at: float) -> float:
        """Certified accuracy at a radius, in percent."""
        if self.radii and at > 0 and at not in self.radii:
            raise ValueError(f"r = {at:g}: was not asked for; radii = {list(self.radii)}")
        return 100.0 * float((self.correct & (self.radius >= at)).double().mean())

    @property
    def acr(self) -> float:
        """Average certified radius; from below if only some radii were asked for."""
        return float((self.radius * self.correct).mean())

    @property
    def abstained(self) -> int:
        return int((self.predicted == ABSTAIN).sum())

    def table(self) -> str:
        """One line an image, in tab-separated columns that the tools of Cohen et al. read."""
        lines = ["\t".join(COLUMNS)]
        rows = zip(
            self.labels.tolist(),
            self.predicted.tolist(),
            self.radius.tolist(),
            ((self.predicted == self.labels) & (self.predicted != ABSTAIN)).int().tolist(),
            self.seconds.tolist(),
            self.samples.tolist(),
            strict=True,
        )
        for number, (label, predicted, reach, correct, seconds, samples) in enumerate(rows):
            clock = f"{int(seconds // 3600)}:{int(seconds // 60 % 60):02d}:{seconds % 60:09.6f}"
            words = (number, label, predicted, f"{reach:.6g}", correct, clock, samples)
            lines.append("\t".join(map(str, words)))
        return "\n".join(lines) + "\n"


def write(notebook: Notebook, found: Sequence[Certificate]) -> None:
    columns = {
        "rows": torch.tensor([it.row for it in found]),
        "predicted": torch.tensor([it.predicted for it in found]),
        "radius": torch.tensor([it.radius for it in found], dtype=torch.float64),
        "samples": torch.tensor([it.samples for it in found]),
        "seconds": torch.tensor([it.seconds for it in found], dtype=torch.float64),
        "asked": torch.tensor([it.asked for it in found], dtype=torch.int64),
    }
    notebook.keep("images", columns, {})


def read(notebook: Notebook) -> Iterator[Certificate]:
    names = ("rows", "predicted", "radius", "samples", "seconds", "asked")
    for path, tensors, _ in notebook.kept():
        with telling(path):
            columns = [tensors[name].tolist() for name in names]
            found = [
                Certificate(row, predicted, reach, samples, seconds, tuple(asked))
                for row, predicted, reach, samples, seconds, asked in zip(*columns, strict=True)
            ]
        yield from found


def gather(
    found: Sequence[Certificate],
    labels: Tensor,
    radii: tuple[float, ...],
    world: World,
    *,
    network: str,
    batch: int,
) -> Certified:
    """All workers' certificates at every worker; each image is one worker's, elsewhere zero."""
    columns = torch.zeros(len(labels), 4 + len(radii), dtype=torch.float64)
    for it in found:
        values = (it.predicted, it.radius, it.samples, it.seconds, *it.asked)
        columns[it.row] = torch.tensor(values, dtype=torch.float64)
    predicted, reach, samples, seconds, asked = world.sum(columns).split(
        [1, 1, 1, 1, len(radii)], 1
    )
    return Certified(
        labels=labels,
        predicted=predicted.squeeze(1).long(),
        radius=reach.squeeze(1),
        samples=samples.squeeze(1).long(),
        seconds=seconds.squeeze(1),
        radii=radii,
        asked=asked.long(),
        network=network,
        batch=batch,
    )
