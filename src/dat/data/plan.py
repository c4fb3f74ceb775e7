"""How datasets are partitioned among workers, and mixed into batches."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dat.core.rng import derive
from dat.data.batches import Batches, BatchSource
from dat.data.images import ImageData
from dat.data.lazy_images import LazyImages
from dat.data.local import Partitions
from dat.data.partitions import PartitionSampler, RandomPartitionSampler, default_partitions
from dat.data.streams import Stream, StreamSource


@dataclass(frozen=True)
class Mix:
    """How unlabelled images are mixed into a batch."""

    share: float = 0.5
    """Their share of a batch."""
    weight: float = 1.0
    """Weight of an unlabelled image relative to a labelled one."""
    epoch_by: str = "labelled"
    """Which images define the length of an epoch: `labelled`, `unlabelled` or `both`; `original`:
    as many images of either kind as there are labelled ones."""
    name: str = "unlabelled"
    """Prefix of its settings, as in `data.NAME_share`."""


@dataclass(frozen=True)
class PartitionPlan:
    """How datasets are partitioned among workers, and how this one reads its share."""

    batch: int
    """The global batch size."""
    workers: int
    rank: int
    """This worker's rank."""
    seed: int
    parts: int | None = None
    loaders: int = 0
    random_crops: bool = False

    def source(
        self, data: ImageData | Partitions | Stream, count: int, parts: int | None, seed: int
    ) -> BatchSource:
        """This worker's share of a dataset that contributes `count` images to a batch."""
        if isinstance(data, Stream):
            if parts is not None or self.random_crops:
                raise ValueError("data.parts, resized-crop: not supported for a stream")
            return StreamSource.of_stream(data, count, workers=self.workers, rank=self.rank)
        if isinstance(data, Partitions):
            if parts not in (None, len(data.sizes)):
                raise ValueError(
                    f"data.parts = {parts}: the data is already stored in {len(data.sizes)} "
                    "partitions; remove the setting"
                )
            sampler: PartitionSampler = data.sampler(count, workers=self.workers, seed=seed)
        else:
            sampler = RandomPartitionSampler(
                len(data), count, parts=parts, workers=self.workers, seed=seed
            )
        source = BatchSource.of(data, sampler, self.rank)
        images = source.data.images
        lazy = images if isinstance(images, LazyImages) else None
        if not self.random_crops:
            return replace(source, crops=seed) if lazy and lazy.random else source
        if lazy is None or not lazy.slow or lazy.random:
            raise ValueError(
                "data.augmentation = resized-crop: needs picture files, not images of one size; "
                "use crop-flip, or crop in the dataset's own transform"
            )
        return replace(source, crops=seed)


def make_batches(
    labelled: ImageData | Partitions | Stream,
    unlabelled: ImageData | None,
    mix: Mix,
    dealing: PartitionPlan,
) -> Batches:
    """The batches of one worker."""
    batch, parts, seed = dealing.batch, dealing.parts, dealing.seed
    if unlabelled is None:
        source = dealing.source(labelled, batch, parts, seed)
        return Batches([source], source.sampler.steps, dealing.loaders)
    count = round(mix.share * batch)
    if not 0 < count < batch:
        raise ValueError(
            f"data.{mix.name}_share = {mix.share:g}: leaves {batch - count} labelled and {count} "
            f"{mix.name} images in a batch of {batch}; it needs at least one of each"
        )
    if parts is None:
        parts = min(default_partitions(dealing.workers, size) for size in (batch - count, count))
    given = isinstance(labelled, Partitions)
    first = dealing.source(labelled, batch - count, None if given else parts, seed)
    second = dealing.source(unlabelled, count, parts, derive(seed, "unlabelled"))
    steps = {
        "labelled": first.sampler.steps,
        "unlabelled": second.sampler.steps,
        "both": (len(labelled) + len(unlabelled)) // batch,
        "original": max(len(labelled) // batch, 1),
    }[mix.epoch_by]
    second = replace(second, weight=mix.weight, offset=len(labelled))
    return Batches([first, second], steps, dealing.loaders)
