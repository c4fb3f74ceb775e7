"""The time of a recipe's passes: as given, or measured here on a few random images."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dat.attacks import NoAttack
from dat.config.schema import RunConfig
from dat.data import ImageData, Splits
from dat.distributed import Buckets, Default
from dat.distributed.affinity import cores
from dat.tools.planning.model import ComputeTimes
from dat.tools.profiling import WARMUP, profile_steps
from dat.train.image_size import ImageSize, scaled
from dat.train.subgroup import Subgroup

STEPS = 3
"""Timed steps; a single one if it takes longer than SECONDS."""
SECONDS = 1.0
"""Target duration of a timed step; it uses fewer images than the worker's share if needed."""
FEW, MOST = 2, 64
"""Images of a timed step; batch norm needs two."""


class SizePhase(NamedTuple):
    """Epochs of training at one image size (`train.resize`)."""

    size: int
    """The shorter side in pixels."""
    epochs: int
    ratio: float
    """The time of a pass, as a fraction of one at full size."""


class TimedSteps(NamedTuple):
    """How much is timed."""

    images: int
    steps: int = STEPS
    warmup: int = WARMUP


def passes(config: RunConfig) -> int:
    """Pairs of forward and backward passes of the attack."""
    if isinstance(config.attack, NoAttack):
        return 0
    return int(getattr(config.attack, "steps", 1))


def _units(config: RunConfig) -> int:
    """The duration of a step in forward passes. A backward pass of the attack costs as much as a
    forward pass; that of the update costs twice as much, as it includes the weight gradients."""
    return 2 * passes(config) + 3


def split_by_passes(config: RunConfig, seconds: float, share: float) -> ComputeTimes:
    """Divide a step's seconds among its passes."""
    if not math.isfinite(seconds) or seconds <= 0:
        raise ValueError(f"--compute {seconds}: must be above 0")
    unit = seconds / _units(config)
    return ComputeTimes(
        images=max(round(share), 1),
        before=2 * passes(config) * unit,
        forward=unit,
        backward=2 * unit,
    )


def seconds_per_image(model: nn.Module, x: Tensor) -> float:
    """Of a forward pass on this machine's CPU."""
    with torch.no_grad():
        model(x)
        start = time.perf_counter()
        model(x)
    return (time.perf_counter() - start) / len(x)


def timed_steps(config: RunConfig, per_image: float, share: float) -> TimedSteps:
    """What can be timed in a few seconds, given the duration of a forward pass."""
    most, step = max(round(share), 1), per_image * _units(config)
    fits = int(min(SECONDS / step, MOST, most))
    if fits >= min(FEW, most):
        return TimedSteps(fits)
    return TimedSteps(min(FEW, most), steps=1, warmup=1)


def measure(config: RunConfig, data: Splits, timed: TimedSteps, devices: int) -> ComputeTimes:
    """Time real steps of the recipe on one worker, at full image size."""
    options = replace(config.train.options, subgroup=Subgroup(), image_size=ImageSize())
    absent = ("parts", "limit", "labels", "unlabelled", "pseudo_labels", "synthetic")
    sources: dict[str, Any] = dict.fromkeys(absent)
    if config.data.augmentation == "resized-crop":  # takes place when pictures are decoded
        sources["augmentation"] = "crop-flip"
    config = replace(
        config,
        data=replace(config.data, **sources),
        train=replace(config.train, batch=timed.images, options=options),
        comm=replace(config.comm, threads=config.comm.threads or max(cores() // devices, 1)),
        quantizer=Buckets(),
        protocol=Default(),
    )
    profile = profile_steps(config, "plan", steps=timed.steps, warmup=timed.warmup, data=data)
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


def size_phases(config: RunConfig, model: nn.Module, x: Tensor) -> tuple[SizePhase, ...]:
    """The image sizes of training and how long passes take at each, measured with the images `x`;
    empty if all epochs are at full size."""
    resizing, epochs = config.train.options.image_size, config.train.epochs
    resizing.check_epochs(epochs)
    if not resizing.sizes:
        return ()
    full = seconds_per_image(model, x)
    starts = (0, *resizing.until)
    phases = [
        SizePhase(size, end - start, seconds_per_image(model, scaled(x, size)) / full)
        for size, start, end in zip(resizing.sizes, starts[:-1], resizing.until, strict=True)
    ]
    return (*phases, SizePhase(min(x.shape[2:]), epochs - starts[-1], 1.0))


def random_images(image: tuple[int, int, int], classes: int, count: int) -> Splits:
    """Random images with the shape and the classes of a dataset."""
    random = torch.Generator().manual_seed(0)
    images = torch.rand(count, *image, generator=random)
    data = ImageData.of(images, torch.arange(count) % classes, classes=classes)
    return Splits.of(data, data)
