"""The only place that turns a config into objects."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from torch import nn

from dat.attacks import ATTACKS, PGD, attack_mode
from dat.comm import World
from dat.config import RunConfig, merge
from dat.data import (
    Augmentation,
    ImageData,
    Mix,
    Parts,
    PseudoLabels,
    Splits,
    load_unlabelled,
    some_images,
    split_holdout,
    split_labels,
)
from dat.evaluation import Assessment, assess
from dat.evaluation.suites import AUTOATTACK, CLEAN, suite
from dat.finetune import finetuned, outer_oracle
from dat.models import build_model, normalized
from dat.smoothing import Smoothed
from dat.train import Trainer
from dat.train.folder import CONFIG, RESULT
from dat.train.growth import Growth
from dat.train.perturbation import WeightAttack
from dat.train.sentinel import Sentinel


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
    """The network; to `start` training with the weights that fine-tuning starts from."""
    if config.finetune.weights is not None:
        return finetuned(config, data, start=start)
    net = build_model(
        config.model.name,
        data.test.classes,
        channels=data.test.channels,
        width=config.model.width,
        seed=config.seed,
    )
    return normalized(net, data.mean, data.std)


def check_model(model: nn.Module, data: ImageData) -> None:
    """Show it two images: a network that does not fit the data should say so before training."""
    x, _ = data.batch(torch.arange(2) % len(data), torch.device("cpu"))
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
    """Refuse an attack that there is not before the work begins."""
    for name in config.evaluate.attacks:
        try:
            suite(name, classes)
        except ValueError as error:
            raise ValueError(f"evaluate.attacks: {error}") from None


class TrainingData(NamedTuple):
    """What is trained on."""

    labelled: ImageData | Parts
    holdout: ImageData | Parts | None
    unlabelled: ImageData | None
    """With pseudo-labels, or without any."""


def training_data(config: RunConfig, data: Splits) -> TrainingData:
    """The labels that there are, split into those to train on and those held out, and the rest."""
    if isinstance(data.training, Parts):
        _check_parts(config)
        parts = replace(data.training, weigh_by=config.data.weigh_by)
        some, held = parts.split_holdout(config.data.holdout, config.seed)
        return TrainingData(some, held, unlabelled_data(config, data))
    labelled, rest = data.train, None
    if config.data.labels is not None:
        labelled, rest = split_labels(labelled, config.data.labels, config.seed)
    train, holdout = split_holdout(labelled, config.data.holdout, config.seed)
    unlabelled = unlabelled_data(config, data, rest)
    if unlabelled is not None and config.data.pseudo_labels is not None:
        found = PseudoLabels.read(Path(config.data.pseudo_labels), unlabelled)
        unlabelled = found.applied(unlabelled, config.data.confidence)
    return TrainingData(train, holdout, unlabelled)


def unlabelled_data(
    config: RunConfig, data: Splits, rest: ImageData | None = None
) -> ImageData | None:
    """The images without labels, as the config names them."""
    name = config.data.unlabelled
    if name is None:
        return None
    if name == "rest":
        if rest is None and config.data.labels is not None:
            _, rest = split_labels(data.train, config.data.labels, config.seed)
        assert rest is not None  # the config refuses it otherwise
        return rest.without_labels()
    return load_unlabelled(name, data.training, config.data.reading())


def _check_parts(config: RunConfig) -> None:
    """What needs all labels in one place is not for data that stays in several."""
    for field in ("labels", "pseudo_labels"):
        if getattr(config.data, field) is not None:
            raise ValueError(f"data.{field}: not for data in parts, which stays where it is")


def make_trainer(config: RunConfig, data: Splits, world: World) -> Trainer:
    images = training_data(config, data)
    check_attacks(config, data.test.classes)
    model = make_model(config, data, start=True)
    check_model(model, data.test)
    return Trainer(
        model=model,
        data=images.labelled,
        holdout=images.holdout,
        unlabelled=images.unlabelled,
        mix=Mix(
            share=config.data.unlabelled_share,
            weight=config.data.unlabelled_weight,
            epoch_by=config.data.epoch_by,
        ),
        threat=config.threat,
        attack=config.attack,
        objective=config.objective,
        optimizer=outer_oracle(config),
        schedule=config.schedule,
        epochs=config.train.epochs,
        batch=config.train.batch,
        growth=Growth(config.train.grow, config.train.grow_by),
        team=config.train.team,
        parts=config.data.parts,
        augmentation=Augmentation(
            kind=config.data.augmentation,
            cutout=config.data.cutout,
            randaugment=config.data.randaugment,
            magnitude=config.data.magnitude,
        ),
        loaders=config.data.loaders,
        attack_bn=config.train.attack_bn,
        bn=config.train.bn,
        ghost=config.train.ghost,
        compute=config.compute,
        selection=PGD(steps=config.train.select_steps),
        select_by=config.train.select_by,
        select_every=config.train.select_every,
        ema=config.train.ema,
        sentinel=Sentinel(action=config.train.sentinel, rescue=ATTACKS[config.train.rescue]()),
        guard=config.train.guard,
        weight_attack=WeightAttack(config.train.awp, config.train.awp_warmup),
        quantizer=config.quantizer,
        protocol=config.protocol,
        shard=config.comm.shard,
        gather=config.comm.gather,
        seed=config.seed,
        world=world,
    )


def read_run(run: Path, edits: dict[str, Any] | None = None) -> tuple[str, RunConfig]:
    """The recipe's name and the config of a run's folder."""
    path = run / CONFIG
    if not path.is_file():
        raise ValueError(f"{run}: not the folder of a run (no {CONFIG} in it)")
    try:
        values = yaml.safe_load(path.read_text())
        recipe = str(values.pop("recipe", "?"))
    except (yaml.YAMLError, AttributeError, UnicodeDecodeError):
        raise ValueError(f"{path}: not a config") from None
    return recipe, RunConfig.read(merge(values, edits or {}))


def read_result(run: Path) -> dict[str, Any]:
    """The final figures of a run."""
    read_run(run)
    path = run / RESULT
    if not path.is_file():
        raise ValueError(f"{run}: the run is not finished (no {RESULT} in it)")
    try:
        result: dict[str, Any] = dict(json.loads(path.read_text()))
        return {"run": str(run), "method": result["method"], "attack": result["attack"]} | result
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path}: not a result") from None


def accuracy_of(
    config: RunConfig, model: nn.Module, test: ImageData, world: World, **options: Any
) -> Assessment:
    """Measure a model, as it will be used, as the config says."""
    deployed = config.objective.deployed(model)
    found = assess(
        deployed,
        some_images(test, config.evaluate.images),
        config.evaluate.attacks,
        threat=config.threat,
        batch=config.evaluate.batch,
        seed=config.seed,
        precision=config.evaluate.precision,
        world=world,
        **options,
    )
    if isinstance(deployed, Smoothed):
        return replace(found, network=f"{deployed.note}, {found.network}")
    return found


def figures(config: RunConfig, found: Assessment) -> dict[str, Any]:
    """TA, RA and AA as tables show them: RA is that of the first attack which is not AutoAttack."""
    plain = [name for name in found.suites if not name.startswith(AUTOATTACK) and name != CLEAN]
    threat = f"{config.threat.norm} {config.threat.eps:.4g}"
    result: dict[str, Any] = {"images": found.images, "ta": found.ta}
    result |= {"attack": f"{plain[0]}, {threat}" if plain else threat}
    result |= {"ra": found.ra(plain[0]) if plain else None}
    if AUTOATTACK in found.suites:
        result["aa"] = found.ra(AUTOATTACK)
    return result
