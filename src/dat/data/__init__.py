"""Data: datasets, how they are read, and which worker draws which images."""

from typing import TYPE_CHECKING

from dat.core.lazy import lazy_names
from dat.data.augment import AUGMENTATIONS, Augmentation, CropWindows
from dat.data.reading import WEIGH_BY, ReadOptions

if TYPE_CHECKING:
    from dat.data.batches import Batches, BatchSource, RawBatch
    from dat.data.images import UNLABELLED, ImageData, as_floats
    from dat.data.lazy_images import LazyImages, chunks
    from dat.data.local import LocalPartitionSampler, Partitions
    from dat.data.names import is_known
    from dat.data.partitions import (
        PartitionSampler,
        RandomPartitionSampler,
        class_balanced_subset,
        default_partitions,
        limit_images,
        split_holdout,
        split_labels,
    )
    from dat.data.plan import Mix, PartitionPlan, make_batches
    from dat.data.pseudo import PseudoLabels
    from dat.data.sources import SOURCES, Splits, load
    from dat.data.streams import Stream
    from dat.data.synthetic import load_synthetic
    from dat.data.torch_datasets import Data, image_data
    from dat.data.unlabelled import load_unlabelled
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        renamed={
            "Dealing": "PartitionPlan",
            "Drawn": "RawBatch",
            "Parts": "Partitions",
            "Plan": "PartitionSampler",
            "Reading": "ReadOptions",
            "Rounds": "LocalPartitionSampler",
            "Source": "BatchSource",
            "Split": "RandomPartitionSampler",
            "Stored": "LazyImages",
            "Supply": "Batches",
            "Windows": "CropWindows",
            "default_parts": "default_partitions",
            "some_images": "class_balanced_subset",
            "supply": "make_batches",
        },
        images="UNLABELLED ImageData as_floats",
        local="Partitions LocalPartitionSampler",
        partitions=(
            "PartitionSampler RandomPartitionSampler class_balanced_subset default_partitions "
            "limit_images split_holdout split_labels"
        ),
        pseudo="PseudoLabels",
        names="is_known",
        sources="SOURCES Splits load",
        streams="Stream",
        synthetic="load_synthetic",
        torch_datasets="Data image_data",
        lazy_images="LazyImages chunks",
        batches="RawBatch BatchSource Batches",
        plan="Mix PartitionPlan make_batches",
        unlabelled="load_unlabelled",
    )

__all__ = [
    "AUGMENTATIONS",
    "SOURCES",
    "UNLABELLED",
    "WEIGH_BY",
    "Augmentation",
    "BatchSource",
    "Batches",
    "CropWindows",
    "Data",
    "ImageData",
    "LazyImages",
    "LocalPartitionSampler",
    "Mix",
    "PartitionPlan",
    "PartitionSampler",
    "Partitions",
    "PseudoLabels",
    "RandomPartitionSampler",
    "RawBatch",
    "ReadOptions",
    "Splits",
    "Stream",
    "as_floats",
    "chunks",
    "class_balanced_subset",
    "default_partitions",
    "image_data",
    "is_known",
    "limit_images",
    "load",
    "load_synthetic",
    "load_unlabelled",
    "make_batches",
    "split_holdout",
    "split_labels",
]
