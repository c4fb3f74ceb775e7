"""The result of certification: one certificate per image, stored in a folder and gathered."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dat.core.short_repr import short_repr
from dat.data import UNLABELLED
from dat.distributed import World
from dat.evaluation.certification.sampler import ABSTAIN
from dat.evaluation.progress_file import ProgressStore, errors_of

COLUMNS = ("idx", "label", "predict", "radius", "correct", "time", "samples")


class Certificate(NamedTuple):
    """The certificate of one image."""

    row: int
    predicted: int
    """The smoothed classifier's prediction, or -1."""
    radius: float
    """The l2 distance within which the prediction is constant."""
    samples: int
    seconds: float
    asked: tuple[int, ...] = ()
    """Per requested radius, the number of samples until it was decided."""


@dataclass(frozen=True)
class Certified:
    """The certificates of a dataset; each is false with probability at most alpha."""

    labels: Tensor
    predicted: Tensor
    radius: Tensor
    samples: Tensor
    seconds: Tensor
    radii: tuple[float, ...]
    """The requested radii; empty if the largest certifiable radius was requested."""
    asked: Tensor
    """Per image and per entry of `radii`, the number of samples until it was decided."""
    network: str = ""
    """How the sampled network was optimized."""
    batch: int = 0
    """Samples per batch."""

    __repr__ = short_repr

    @property
    def correct(self) -> Tensor:
        """Which images are classified correctly."""
        if (self.labels == UNLABELLED).any():
            raise ValueError("the images have no labels: pass labels to certify")
        return self.predicted == self.labels

    def accuracy(self, at: float) -> float:
        """Certified accuracy at a radius, in percent."""
        if self.radii and at > 0 and at not in self.radii:
            raise ValueError(f"r = {at:g}: was not requested; radii = {list(self.radii)}")
        return 100.0 * float((self.correct & (self.radius >= at)).double().mean())

    @property
    def acr(self) -> float:
        """Average certified radius; a lower bound if only some radii were requested."""
        return float((self.radius * self.correct).mean())

    @property
    def abstained(self) -> int:
        return int((self.predicted == ABSTAIN).sum())

    def table(self) -> str:
        """One line per image, in the tab-separated columns that the tools of Cohen et al. read."""
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
        for number, (label, predicted, radius, correct, seconds, samples) in enumerate(rows):
            clock = f"{int(seconds // 3600)}:{int(seconds // 60 % 60):02d}:{seconds % 60:09.6f}"
            cells = (number, label, predicted, f"{radius:.6g}", correct, clock, samples)
            lines.append("\t".join(map(str, cells)))
        return "\n".join(lines) + "\n"


def write(store: ProgressStore, certificates: Sequence[Certificate]) -> None:
    rows, predicted, radius, samples, seconds, asked = zip(*certificates, strict=True)
    columns = {
        "rows": torch.tensor(rows),
        "predicted": torch.tensor(predicted),
        "radius": torch.tensor(radius, dtype=torch.float64),
        "samples": torch.tensor(samples),
        "seconds": torch.tensor(seconds, dtype=torch.float64),
        "asked": torch.tensor(asked, dtype=torch.int64),
    }
    store.append("images", columns, {})


def read(store: ProgressStore) -> Iterator[Certificate]:
    names = ("rows", "predicted", "radius", "samples", "seconds", "asked")
    for path, tensors, _ in store.files():
        with errors_of(path):
            columns = [tensors[name].tolist() for name in names]
            certificates = [
                Certificate(row, predicted, radius, samples, seconds, tuple(asked))
                for row, predicted, radius, samples, seconds, asked in zip(*columns, strict=True)
            ]
        yield from certificates


def gather(
    certificates: Sequence[Certificate],
    labels: Tensor,
    radii: tuple[float, ...],
    world: World,
    *,
    network: str,
    batch: int,
) -> Certified:
    """Gather the certificates of all workers on every worker. Each image belongs to one worker and
    is zero on the others."""
    columns = torch.zeros(len(labels), 4 + len(radii), dtype=torch.float64)
    for row, *values, asked_samples in certificates:
        columns[row] = torch.tensor((*values, *asked_samples), dtype=torch.float64)
    predicted, radius, samples, seconds, asked = world.sum(columns).split(
        [1, 1, 1, 1, len(radii)], 1
    )
    return Certified(
        labels=labels,
        predicted=predicted.squeeze(1).long(),
        radius=radius.squeeze(1),
        samples=samples.squeeze(1).long(),
        seconds=seconds.squeeze(1),
        radii=radii,
        asked=asked.long(),
        network=network,
        batch=batch,
    )
