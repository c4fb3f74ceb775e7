"""The only place that turns a config into objects."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dat.attacks import attack_mode
from dat.attacks.suites import AUTOATTACK, CLEAN, suite
from dat.config.finetune import finetuned, make_optimizer
from dat.config.network import network_of, pretrained_model
from dat.config.schema import RunConfig
from dat.core.smoothing import Smoothed
from dat.core.threat import show_radius
from dat.data import (
    ImageData,
    Partitions,
    PseudoLabels,
    Splits,
    class_balanced_subset,
    load_synthetic,
    load_unlabelled,
    split_holdout,
    split_labels,
)
from dat.distributed import World
from dat.evaluation import Assessment, assess
from dat.models import adapted, normalized
from dat.train import GradientExchange, Trainer, TrainingData


def make_world(config: RunConfig) -> World:
    comm = config.comm
    return World.join(
        device=comm.device,
        backend=comm.backend,
        threads=comm.threads,
        timeout=comm.timeout,
        deterministic=comm.deterministic,
        allocator=comm.allocator,
        pin=comm.pin,
    )


def make_model(config: RunConfig, data: Splits, *, start: bool = False) -> nn.Module:
    """Build the network; with `start`, load the weights that fine-tuning starts from."""
    if config.model.pretrained:
        return pretrained_model(config, data, start=start)
    if config.finetune.weights is not None:
        return finetuned(config, data, start=start)
    net = network_of(config, data.test.classes, data.test.channels)
    return normalized(net, config.model.mean or data.mean, config.model.std or data.std)


def check_model(model: nn.Module, data: ImageData) -> None:
    """Run the model on two images, so that one that does not fit the data fails before training."""
    x, _ = data.batch(torch.arange(2) % len(data), torch.device("cpu"))
    model = adapted(model, x)
    with attack_mode(model), torch.no_grad():
        try:
            shape = tuple(model(x).shape)
        except Exception as error:
            raise ValueError(
                f"the model cannot take images of shape {tuple(x.shape[1:])} "
                f"({' '.join(str(error).split())})"
            ) from error
    if shape != (2, data.classes):
        raise ValueError(
            f"the model gives {shape} for 2 images of {data.classes} classes: "
            f"must be (2, {data.classes})"
        )


def check_attacks(config: RunConfig, classes: int) -> None:
    """Refuse unknown attacks before any work begins."""
    for name in config.evaluate.attacks:
        try:
            suite(name, classes)
        except ValueError as error:
            raise ValueError(f"evaluate.attacks: {error}") from None


def training_data(config: RunConfig, data: Splits) -> TrainingData:
    """Split the labelled images into those to train on and those held out, and add unlabelled
    ones."""
    settings, rest = config.data, None
    labelled: ImageData | Partitions
    holdout: ImageData | Partitions | None
    if isinstance(data.training, Partitions):
        _check_parts(config)
        parts = replace(data.training, weigh_by=settings.weigh_by)
        labelled, holdout = parts.split_holdout(settings.holdout, config.seed)
    else:
        images = data.train
        if settings.labels is not None:
            images, rest = split_labels(images, settings.labels, config.seed)
        labelled, holdout = split_holdout(images, settings.holdout, config.seed)
    unlabelled = unlabelled_data(config, data, rest)
    if unlabelled is not None and settings.pseudo_labels is not None:
        pseudo = PseudoLabels.read(Path(settings.pseudo_labels), unlabelled)
        unlabelled = pseudo.applied(unlabelled, settings.confidence)
    return TrainingData(
        labelled=labelled,
        holdout=holdout,
        unlabelled=unlabelled,
        mix=settings.mix(),
        augmentation=settings.augmented(),
        parts=settings.parts,
        loaders=settings.loaders,
    )


def unlabelled_data(
    config: RunConfig, data: Splits, rest: ImageData | None = None
) -> ImageData | None:
    """The additional images that the config names, if any: unlabelled or synthetic."""
    name = config.data.unlabelled
    if config.data.synthetic is not None:
        return load_synthetic(config.data.synthetic, data.training, config.data.memory)
    if name is None:
        return None
    if name == "rest":
        if rest is None and config.data.labels is not None:
            _, rest = split_labels(data.train, config.data.labels, config.seed)
        assert rest is not None  # the config refuses it otherwise
        return rest.without_labels()
    return load_unlabelled(name, data.training, config.data.reading())


def _check_parts(config: RunConfig) -> None:
    """Refuse settings that need all labels on one machine."""
    for field in ("labels", "pseudo_labels"):
        if getattr(config.data, field) is not None:
            raise ValueError(
                f"data.{field}: not supported for data in parts, which is never brought together"
            )


def make_trainer(config: RunConfig, data: Splits, world: World) -> Trainer:
    images = training_data(config, data)
    check_attacks(config, data.test.classes)
    model = make_model(config, data, start=True)
    check_model(model, data.test)
    exchange = GradientExchange(
        quantizer=config.quantizer, protocol=config.protocol, sharding=config.comm.sharding
    )
    return Trainer(
        model=model,
        data=images,
        threat=config.threat,
        attack=config.attack,
        objective=config.objective,
        optimizer=make_optimizer(config),
        schedule=config.schedule,
        epochs=config.train.epochs,
        batch=config.train.batch,
        exchange=exchange,
        compute=config.compute,
        options=config.train.options,
        seed=config.seed,
        world=world,
    )


def accuracy_of(
    config: RunConfig, model: nn.Module, test: ImageData, world: World, **options: Any
) -> Assessment:
    """Evaluate a model, as deployed, with the config's attacks."""
    deployed = config.objective.deployed(model)
    assessment = assess(
        deployed,
        class_balanced_subset(test, config.evaluate.images),
        config.evaluate.attacks,
        threat=config.threat,
        batch=config.evaluate.batch,
        seed=config.seed,
        precision=config.evaluate.precision,
        world=world,
        **options,
    )
    if isinstance(deployed, Smoothed):
        return replace(assessment, network=f"{deployed.note}, {assessment.network}")
    return assessment


def figures(config: RunConfig, assessment: Assessment) -> dict[str, Any]:
    """TA, RA and AA for tables; RA is that of the first attack other than AutoAttack."""
    suites = assessment.suites
    attacks = [name for name in suites if not name.startswith(AUTOATTACK) and name != CLEAN]
    threat = f"{config.threat.norm} {show_radius(config.threat.eps)}"
    result: dict[str, Any] = {"images": assessment.images, "ta": assessment.ta}
    result |= {"attack": f"{attacks[0]}, {threat}" if attacks else threat}
    result |= {"ra": assessment.ra(attacks[0]) if attacks else None}
    if AUTOATTACK in suites:
        result["aa"] = assessment.ra(AUTOATTACK)
    return result
