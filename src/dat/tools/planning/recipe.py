"""Everything that a plan needs to know of a recipe: gradient, passes, images, activations."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from dat.attacks import NoAttack
from dat.config.build import make_model
from dat.config.finetune import resolve_finetuning
from dat.config.schema import RunConfig
from dat.data import ImageData, Partitions, Splits, load
from dat.distributed import Buckets, Default
from dat.distributed.affinity import cores
from dat.tools.planning.gradient import Gradient, watch_backward
from dat.tools.planning.memory import Activations, count_activations
from dat.tools.planning.model import ComputeTimes
from dat.tools.profiling import profile_steps
from dat.train.subgroup import Subgroup

STEPS = 3
"""Timed steps."""
SECONDS = 1.0
"""Target duration of a timed step; it uses fewer images than the worker's share if needed."""
MIN_IMAGES, MAX_IMAGES = 4, 64
"""Images of a timed step."""


class DatasetShape(NamedTuple):
    """What a plan needs to know of a dataset."""

    classes: int
    image: tuple[int, int, int]
    total: int
    """Images in the training set."""


KNOWN_DATASETS = {
    "imagenet": DatasetShape(1000, (3, 224, 224), 1_281_167),
    "cifar10": DatasetShape(10, (3, 32, 32), 50_000),
    "cifar100": DatasetShape(100, (3, 32, 32), 50_000),
    "mnist": DatasetShape(10, (1, 28, 28), 60_000),
    "fashion-mnist": DatasetShape(10, (1, 28, 28), 60_000),
}
"""Datasets that can be planned with without being on this machine."""


@dataclass(frozen=True, kw_only=True)
class RecipeProfile:
    """What a plan needs to know of a recipe."""

    config: RunConfig
    shape: DatasetShape
    gradient: Gradient
    compute: ComputeTimes
    """For the images that were measured; `of` scales it to another number."""
    activations: Activations
    measured: bool
    """Whether the passes were timed on this machine, or given."""

    @property
    def images(self) -> int:
        """Training images per epoch."""
        return max(round(self.shape.total * (1 - self.config.data.holdout)), 1)

    def steps(self, batch: float) -> int:
        """Steps per epoch."""
        return max(round(self.images / batch), 1)


def find_shape(config: RunConfig) -> DatasetShape:
    """Read the data, unless the dataset is a known one."""
    name = config.data.name
    if name in KNOWN_DATASETS:
        known, size = KNOWN_DATASETS[name], config.data.size
        image = (known.image[0], size, size) if size else known.image
        return known._replace(image=image)
    try:
        data = load(name, config.data.reading())
    except ValueError as error:
        raise ValueError(
            f"{error}; without data, plan with one of {', '.join(KNOWN_DATASETS)}"
        ) from None
    channels, height, width = data.test.shape
    training = data.training
    total = sum(training.sizes) if isinstance(training, Partitions) else len(training)
    return DatasetShape(data.test.classes, (channels, height, width), total)


def profile_recipe(
    config: RunConfig, share: float, seconds: float | None, *, devices: int = 1
) -> RecipeProfile:
    """`seconds` is the duration of a worker's step without exchange, for its `share` of the batch;
    if None, real steps are timed on this machine."""
    shape = find_shape(config)
    data = _random_images(shape, MAX_IMAGES)
    config = resolve_finetuning(config, data)
    model = make_model(config, data)
    x, _ = data.test.batch(torch.arange(MIN_IMAGES), torch.device("cpu"))
    gradient = watch_backward(model, x, lambda logits: logits.logsumexp(1).mean())
    if seconds is None:
        images = _affordable_images(config, model, x, share)
        compute = _measure(config, data, images, devices)
    else:
        compute = split_by_passes(config, seconds, share)
    return RecipeProfile(
        config=config,
        shape=shape,
        gradient=gradient,
        compute=compute,
        activations=count_activations(model, shape.image),
        measured=seconds is None,
    )


def passes(config: RunConfig) -> int:
    """Pairs of forward and backward passes of the attack."""
    if isinstance(config.attack, NoAttack):
        return 0
    return int(getattr(config.attack, "steps", 1))


def split_by_passes(config: RunConfig, seconds: float, share: float) -> ComputeTimes:
    """Divide a step's seconds among its passes. A backward pass of the attack costs as much as a
    forward pass; that of the update costs twice as much, as it includes the weight gradients."""
    if not math.isfinite(seconds) or seconds <= 0:
        raise ValueError(f"--compute {seconds}: must be above 0")
    unit = seconds / (2 * passes(config) + 3)
    return ComputeTimes(
        images=max(round(share), 1),
        before=2 * passes(config) * unit,
        forward=unit,
        backward=2 * unit,
    )


def _affordable_images(config: RunConfig, model: nn.Module, x: torch.Tensor, share: float) -> int:
    """The number of images for a step of about SECONDS."""
    with torch.no_grad():
        model(x)
        start = time.perf_counter()
        model(x)
        per_image = (time.perf_counter() - start) / len(x)
    fits = int(SECONDS / (per_image * (2 * passes(config) + 3)))
    return max(min(fits, MAX_IMAGES, round(share)), min(MIN_IMAGES, max(round(share), 1)), 1)


def _measure(config: RunConfig, data: Splits, images: int, devices: int) -> ComputeTimes:
    """Time real steps of the recipe on one worker, with this many images."""
    options = replace(config.train.options, subgroup=Subgroup())
    config = replace(
        config,
        data=replace(config.data, parts=None, labels=None, unlabelled=None, pseudo_labels=None),
        train=replace(config.train, batch=images, options=options),
        comm=replace(config.comm, threads=config.comm.threads or max(cores() // devices, 1)),
        quantizer=Buckets(),
        protocol=Default(),
    )
    profile = profile_steps(config, "plan", steps=STEPS, data=data)
    assert profile is not None  # there is one worker
    return compute_from_profile(profile)


def compute_from_profile(profile: dict[str, Any]) -> ComputeTimes:
    """Convert the result of `dat profile`."""
    seconds = {stage["stage"]: stage["seconds"] for stage in profile["stages"]}
    forward, backward = seconds.pop("update/forward"), seconds.pop("update/backward")
    after = sum(seconds.pop(name) for name in ("optimizer", "rest", "exchange"))
    return ComputeTimes(
        images=profile["batch"],
        before=sum(seconds.values()),
        forward=forward,
        backward=backward,
        after=after,
        threads=profile["threads"],
    )


def _random_images(shape: DatasetShape, count: int) -> Splits:
    """Random images with the shape and the classes of the dataset."""
    random = torch.Generator().manual_seed(0)
    images = torch.rand(count, *shape.image, generator=random)
    labels = torch.arange(count) % shape.classes
    return Splits.of(*(ImageData.of(images, labels, classes=shape.classes) for _ in range(2)))
