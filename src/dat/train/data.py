"""The training data, and how a worker's share of it becomes batches."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from dat.data import Augmentation, Batches, ImageData, Mix, PartitionPlan, Partitions, make_batches
from dat.distributed import World


@dataclass(frozen=True, kw_only=True)
class TrainingData:
    """Labelled images, and optional held-out and unlabelled ones."""

    labelled: ImageData | Partitions
    """The complete training set, or its partitions; a worker keeps only its share."""
    holdout: ImageData | Partitions | None = None
    """Held-out training images that select the best weights by RA; none: the last weights."""
    unlabelled: ImageData | None = None
    """Additional images, with or without pseudo-labels; a worker keeps its share of them too."""
    mix: Mix = field(default_factory=Mix)
    """How labelled and unlabelled images are mixed in a batch."""
    augmentation: Augmentation = field(default_factory=Augmentation)
    parts: int | None = None
    """Number of partitions of the data; none: `dat.data.default_partitions`."""
    loaders: int | None = None
    """Processes that decode images; none: this worker's share of the cores."""

    @classmethod
    def of(cls, data: TrainingData | ImageData | Partitions) -> TrainingData:
        return data if isinstance(data, cls) else cls(labelled=data)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self.labelled) + len(self.unlabelled or ())

    def batches(self, world: World, *, batch: int, subgroup: int, seed: int) -> Batches:
        """This worker's share of the data; `subgroup` consecutive ranks hold the same images."""
        dealing = PartitionPlan(
            batch=batch,
            parts=self.parts,
            workers=world.size // subgroup,
            place=world.rank // subgroup,
            seed=seed,
            loaders=torch.get_num_threads() if self.loaders is None else self.loaders,
            random_crops=self.augmentation.kind == "resized-crop",
        )
        return make_batches(self.labelled, self.unlabelled, self.mix, dealing)
