"""Everything that a plan needs to know of a recipe: gradient, passes, images, activations."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from dat.config.build import make_model
from dat.config.finetune import resolve_finetuning
from dat.config.schema import RunConfig
from dat.data import Partitions, Splits, load
from dat.tools.planning.datasets import KNOWN_DATASETS, DatasetShape
from dat.tools.planning.gradient import Gradient, slots_of, watch_backward
from dat.tools.planning.memory import Activations, count_activations, estimate_memory, host_memory
from dat.tools.planning.model import ComputeTimes
from dat.tools.planning.timing import (
    FEW,
    SECONDS,
    SizePhase,
    TimedSteps,
    measure,
    random_images,
    seconds_per_image,
    size_phases,
    split_by_passes,
    timed_steps,
)


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
    sizes: tuple[SizePhase, ...] = ()
    """The image sizes of training, if they change."""

    @property
    def images(self) -> int:
        """Training images per epoch."""
        data = self.config.data
        return max(round(data.labelled_images(self.shape.total) * (1 - data.holdout)), 1)

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
    data = random_images(shape.image, shape.classes, FEW)
    config = resolve_finetuning(config, data)
    activations = _count_without_memory(config, data, shape)
    model = make_model(config, data)
    x, _ = data.test.batch(torch.arange(FEW), torch.device("cpu"))
    per_image = seconds_per_image(model, x)
    timed = timed_steps(config, per_image, share)
    gradient = watch_backward(
        model,
        x,
        lambda logits: logits.logsumexp(1).mean(),
        repeats=3 if per_image < SECONDS / 10 else 1,
    )
    return RecipeProfile(
        config=config,
        shape=shape,
        gradient=gradient,
        compute=_measured(config, shape, timed, devices)
        if seconds is None
        else split_by_passes(config, seconds, share),
        activations=activations or count_activations(model, shape.image),
        measured=seconds is None,
        sizes=size_phases(config, model, x),
    )


def _measured(
    config: RunConfig, shape: DatasetShape, timed: TimedSteps, devices: int
) -> ComputeTimes:
    data = random_images(shape.image, shape.classes, timed.images)
    return measure(config, data, timed, devices)


def _count_without_memory(
    config: RunConfig, data: Splits, shape: DatasetShape
) -> Activations | None:
    """The activations, from a model without values; raise if this machine has too little memory for
    a step. None for a model that cannot be built or run on the meta device."""
    try:
        with torch.device("meta"):
            model = make_model(config, data)
        activations = count_activations(model, shape.image)
    except Exception:  # a network can fail in any way; if it is invalid, so does the real one
        return None
    _check_memory(config, model, activations, shape)
    return activations


def _check_memory(
    config: RunConfig, model: nn.Module, activations: Activations, shape: DatasetShape
) -> None:
    values = sum(slot.length for slot in slots_of(model).values())
    channels, height, width = shape.image
    needed = estimate_memory(
        config,
        values=values,
        activations=activations,
        pixels=channels * height * width,
        images=FEW,
        exchange=0,
    ).total
    available = host_memory()
    if available is not None and needed > available:
        raise ValueError(
            f"model.name = {config.model.name}: a step of {FEW} images needs about "
            f"{needed / 1e9:,.1f} GB with {values:,} parameters, and this machine has "
            f"{available / 1e9:,.1f} GB available; run dat plan on a machine with more memory"
        )
