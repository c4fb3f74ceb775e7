"""What is to be trained, as the planner sees it: gradient, passes, images, activations."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from dat.attacks import NoAttack
from dat.build import make_model
from dat.comm import Buckets, Default
from dat.comm.world import cores
from dat.config import RunConfig
from dat.data import ImageData, Parts, Splits, load
from dat.finetune import settle
from dat.planning.gradient import Gradient, watch_backward
from dat.planning.memory import Activations, count_activations
from dat.planning.model import Compute
from dat.profiling import profile_steps

STEPS = 3
"""That are timed."""
SECONDS = 1.0
"""That a timed step should take at most; the worker's share is cut down to that."""
LEAST, MOST = 4, 64
"""Images that are computed at least and at most."""


class Shape(NamedTuple):
    """What has to be known of the images."""

    classes: int
    image: tuple[int, int, int]
    total: int
    """Images of the training set."""


KNOWN = {
    "imagenet": Shape(1000, (3, 224, 224), 1_281_167),
    "cifar10": Shape(10, (3, 32, 32), 50_000),
    "cifar100": Shape(100, (3, 32, 32), 50_000),
    "mnist": Shape(10, (1, 28, 28), 60_000),
    "fashion-mnist": Shape(10, (1, 28, 28), 60_000),
}
"""Sets that need not be here to plan with."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A recipe, taken apart."""

    config: RunConfig
    shape: Shape
    gradient: Gradient
    compute: Compute
    """Of the images that were measured; `Compute.of` scales it."""
    activations: Activations
    measured: bool
    """The passes were timed here, not given."""

    @property
    def images(self) -> int:
        """That are trained on in an epoch."""
        return max(round(self.shape.total * (1 - self.config.data.holdout)), 1)

    def steps(self, batch: float) -> int:
        return max(round(self.images / batch), 1)


def find_shape(config: RunConfig) -> Shape:
    """From the data, or from what is known of sets that are not here."""
    name = config.data.name
    if name in KNOWN:
        known, size = KNOWN[name], config.data.size
        image = (known.image[0], size, size) if size else known.image
        return known._replace(image=image)
    try:
        data = load(name, config.data.reading())
    except ValueError as error:
        raise ValueError(
            f"{error}; without the data, plan with one of {', '.join(KNOWN)}"
        ) from None
    channels, height, width = data.test.shape
    training = data.training
    total = sum(training.sizes) if isinstance(training, Parts) else len(training)
    return Shape(data.test.classes, (channels, height, width), total)


def examine(config: RunConfig, share: float, seconds: float | None, *, devices: int = 1) -> Subject:
    """Take a recipe apart; `seconds` is what a worker's step with its share takes, if known."""
    shape = find_shape(config)
    data = _made_up(shape, MOST)
    config = settle(config, data)
    model = make_model(config, data)
    x, _ = data.test.batch(torch.arange(LEAST), torch.device("cpu"))
    gradient = watch_backward(model, x, lambda logits: logits.logsumexp(1).mean())
    if seconds is None:
        compute = _measured(config, data, _fitting(config, model, x, share), devices)
    else:
        compute = divided(config, seconds, share)
    return Subject(
        config=config,
        shape=shape,
        gradient=gradient,
        compute=compute,
        activations=count_activations(model, shape.image),
        measured=seconds is None,
    )


def passes(config: RunConfig) -> int:
    """Forward and backward passes of the attack, in pairs."""
    if isinstance(config.attack, NoAttack):
        return 0
    return int(getattr(config.attack, "steps", 1))


def divided(config: RunConfig, seconds: float, share: float) -> Compute:
    """A step's seconds by the passes in it: a backward pass of the attack costs as much as a
    forward pass, that of an update, which also needs the gradient of the weights, twice as much."""
    if not math.isfinite(seconds) or seconds <= 0:
        raise ValueError(f"--compute {seconds}: must be above 0")
    unit = seconds / (2 * passes(config) + 3)
    return Compute(
        images=max(round(share), 1),
        before=2 * passes(config) * unit,
        forward=unit,
        backward=2 * unit,
    )


def _fitting(config: RunConfig, model: nn.Module, x: torch.Tensor, share: float) -> int:
    """As many images as a step of about SECONDS can take."""
    with torch.no_grad():
        model(x)
        start = time.perf_counter()
        model(x)
        one = (time.perf_counter() - start) / len(x)
    fits = int(SECONDS / (one * (2 * passes(config) + 3)))
    return max(min(fits, MOST, round(share)), min(LEAST, max(round(share), 1)), 1)


def _measured(config: RunConfig, data: Splits, images: int, devices: int) -> Compute:
    """Real steps of the recipe on one worker, of so many images."""
    alike = replace(
        config,
        data=replace(config.data, parts=None, labels=None, unlabelled=None, pseudo_labels=None),
        train=replace(config.train, batch=images, team=1),
        comm=replace(config.comm, threads=config.comm.threads or max(cores() // devices, 1)),
        quantizer=Buckets(),
        protocol=Default(),
    )
    found = profile_steps(alike, "plan", steps=STEPS, data=data)
    assert found is not None  # there is one worker
    return from_stages(found)


def from_stages(found: dict[str, Any]) -> Compute:
    """What `dat profile` says, as the planner needs it."""
    seconds = {it["stage"]: it["seconds"] for it in found["stages"]}
    forward, backward = seconds.pop("update/forward"), seconds.pop("update/backward")
    after = sum(seconds.pop(name) for name in ("optimizer", "rest", "exchange"))
    return Compute(
        images=found["batch"],
        before=sum(seconds.values()),
        forward=forward,
        backward=backward,
        after=after,
        threads=found["threads"],
    )


def _made_up(shape: Shape, count: int) -> Splits:
    """Images of the right shape, and as many classes."""
    random = torch.Generator().manual_seed(0)
    images = torch.rand(count, *shape.image, generator=random)
    labels = torch.arange(count) % shape.classes
    return Splits.of(*(ImageData.of(images, labels, classes=shape.classes) for _ in range(2)))
