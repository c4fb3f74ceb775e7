"""The training data, and how a worker's share of it becomes batches."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import DataLoader

from dat.core.short_repr import short_repr
from dat.data import (
    Augmentation,
    Batches,
    ImageData,
    LazyImages,
    Mix,
    PartitionPlan,
    Partitions,
    Stream,
    image_data,
    make_batches,
)
from dat.distributed import World


@dataclass(frozen=True, kw_only=True)
class TrainingData:
    """Labelled images, and optional held-out and unlabelled ones."""

    labelled: ImageData | Partitions | Stream
    """The complete training set, or its partitions; a worker keeps only its share. A map-style
    dataset or a pair of tensors becomes an `ImageData`."""
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
    """Processes that decode images; none: this worker's share of the cores, but for a dataset
    object this process alone, as a script has to be written for others (`if __name__ ==
    "__main__"`)."""

    __repr__ = short_repr

    def __post_init__(self) -> None:
        """Accept what PyTorch users have: datasets, and pairs of tensors."""
        for name in ("labelled", "holdout", "unlabelled"):
            given = getattr(self, name)
            if isinstance(given, DataLoader):
                raise ValueError(
                    "the trainer draws its own batches, the same on any number of workers: pass "
                    "the loader's dataset (loader.dataset)"
                )
            if given is not None and not isinstance(given, ImageData | Partitions | Stream):
                object.__setattr__(self, name, image_data(given))

    @classmethod
    def of(cls, data: Any) -> TrainingData:
        """From images alone, as a dataset in any form."""
        return data if isinstance(data, cls) else cls(labelled=data)

    def __len__(self) -> int:
        return len(self.labelled) + len(self.unlabelled or ())

    def batches(self, world: World, *, batch: int, subgroup: int, seed: int) -> Batches:
        """This worker's share of the data; `subgroup` consecutive ranks hold the same images."""
        dealing = PartitionPlan(
            batch=batch,
            parts=self.parts,
            workers=world.size // subgroup,
            rank=world.rank // subgroup,
            seed=seed,
            loaders=self._loaders(),
            random_crops=self.augmentation.kind == "resized-crop",
        )
        return make_batches(self.labelled, self.unlabelled, self.mix, dealing)

    def _loaders(self) -> int:
        if self.loaders is not None:
            return self.loaders
        both = (self.labelled, self.unlabelled)
        images = [data.images for data in both if isinstance(data, ImageData)]
        if any(isinstance(lazy, LazyImages) and lazy.random for lazy in images):
            return 0
        return torch.get_num_threads()
