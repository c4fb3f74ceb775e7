"""The only place that turns a config into objects, and the jobs that the command line starts."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from torch import nn

from dat.attacks import ATTACKS, FGSM, NFGSM, PGD, YOPO, Free, NoAttack, attack_mode
from dat.comm import Auto, World, choose, protocol_name, quantizer_name
from dat.config import DataConfig, RunConfig, merge
from dat.data import (
    ImageData,
    Mix,
    PseudoLabels,
    Splits,
    load,
    load_unlabelled,
    split_holdout,
    split_labels,
)
from dat.evaluation import Assessment, assess
from dat.evaluation.suites import AUTOATTACK, CLEAN, suite
from dat.finetune import finetuned, outer_oracle, settle
from dat.models import build_model, normalized
from dat.objectives import (
    MART,
    TRADES,
    Adversarial,
    GradAlign,
    LogitPairing,
    Noisy,
    Smooth,
)
from dat.optim import LSGD, SGD
from dat.report import Progress
from dat.smoothing import Smoothed
from dat.train import EpochRecord, RunFolder, Trainer
from dat.train.folder import CONFIG, RESULT
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
    )


def make_model(config: RunConfig, data: Splits, *, start: bool = False) -> nn.Module:
    """The network; to `start` training with the weights that fine-tuning starts from."""
    if config.finetune.weights is not None:
        return finetuned(config, data, start=start)
    net = build_model(
        config.model.name,
        data.train.classes,
        channels=data.train.channels,
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

    labelled: ImageData
    holdout: ImageData | None
    unlabelled: ImageData | None
    """With pseudo-labels, or without any."""


def training_data(config: RunConfig, data: Splits) -> TrainingData:
    """The labels that there are, split into those to train on and those held out, and the rest."""
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
    return load_unlabelled(name, data.train)


def make_trainer(config: RunConfig, data: Splits, world: World) -> Trainer:
    images = training_data(config, data)
    check_attacks(config, data.train.classes)
    model = make_model(config, data, start=True)
    check_model(model, data.train)
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
        team=config.train.team,
        parts=config.data.parts,
        augmentation=config.data.augmentation,
        attack_bn=config.train.attack_bn,
        selection=PGD(steps=config.train.select_steps),
        select_by=config.train.select_by,
        select_every=config.train.select_every,
        ema=config.train.ema,
        sentinel=Sentinel(action=config.train.sentinel, rescue=ATTACKS[config.train.rescue]()),
        weight_attack=WeightAttack(config.train.awp, config.train.awp_warmup),
        quantizer=config.quantizer,
        protocol=config.protocol,
        seed=config.seed,
        world=world,
    )


def train(
    asked: RunConfig,
    recipe: str,
    out: Path,
    *,
    overwrite: bool = False,
    quiet: bool = False,
    resolution: Callable[[], int | None] | None = None,
) -> dict[str, Any] | None:
    """Train on all workers, measure the best weights on the test set, leave a run's folder.

    The first worker gets the result that is in the folder; the others get none. `resolution` is
    that of the pre-trained network, if there is one.
    """
    with make_world(asked) as world:
        config, trainer, test = world.together(lambda: _prepare(asked, world, resolution))
        folder = world.together(lambda: _folder(out, world, overwrite))
        settle_protocol(trainer, quiet=quiet)
        if folder:
            resolved = replace(
                config,
                data=_resolved(config, trainer),
                quantizer=trainer.quantizer,
                protocol=trainer.protocol,
            )
            folder.describe({"recipe": recipe} | resolved.dump(), world.size)
            trainer.listeners = [folder] if quiet else [folder, Progress(str(out))]
        records = trainer.fit()
        result = _result(config, recipe, trainer, records, test)
        if folder:
            folder.finish(result)
        return result if world.first else None


def settle_protocol(trainer: Trainer, *, quiet: bool = False) -> None:
    """What the default or a measurement decides is decided once, and written down with the run."""
    length = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    asked, world = trainer.protocol, trainer.world
    trainer.quantizer, trainer.protocol = choose(trainer.quantizer, asked, world, length)
    if isinstance(asked, Auto) and world.first and not quiet:
        chosen = f"{protocol_name(trainer.protocol)}, {trainer.quantizer.bits} bits"
        print(f"protocol auto: {chosen}, as measured", file=sys.stderr)


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


def method_name(config: RunConfig, workers: int) -> str:
    """What the paper would call this: AT, Fast AT, DAT-PGD, DAT-FGSM w/o LALR, DAT-LSGD, ..."""
    if isinstance(config.objective, Noisy):
        return _noisy_name(config, workers)
    if isinstance(config.attack, NoAttack):
        return "Standard"
    plain = isinstance(config.objective, Adversarial)
    objective = "" if plain else f" {OBJECTIVE_NAMES.get(type(config.objective), 'own')}"
    awp = " + AWP" if config.train.awp else ""
    if workers == 1:
        return (AT_NAMES.get(type(config.attack), "AT") if plain else objective[1:]) + awp
    if isinstance(config.optimizer, LSGD):
        return f"DAT-LSGD{objective}{awp}"
    oracle = f"DAT-{type(config.attack).__name__}{objective}{awp}"
    return f"{oracle}{' w/o LALR' if isinstance(config.optimizer, SGD) else ''}"


AT_NAMES = {PGD: "AT", FGSM: "Fast AT", NFGSM: "N-FGSM", Free: "Free AT", YOPO: "YOPO"}
OBJECTIVE_NAMES = {TRADES: "TRADES", MART: "MART", LogitPairing: "ALP", GradAlign: "GradAlign"}


def _noisy_name(config: RunConfig, workers: int) -> str:
    assert isinstance(config.objective, Noisy)
    copies = f"N = {config.objective.copies}"
    if not isinstance(config.objective, Smooth):
        return f"Stability ({copies})"
    if isinstance(config.attack, NoAttack):
        return f"Gaussian ({copies})"
    return f"Smooth-{'AT' if workers == 1 else 'DAT'} ({copies})"


def accuracy_of(
    config: RunConfig, model: nn.Module, test: ImageData, world: World, **options: Any
) -> Assessment:
    """Measure a model, as it will be used, as the config says."""
    deployed = config.objective.deployed(model)
    found = assess(
        deployed,
        first_images(test, config.evaluate.images),
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


def first_images(data: ImageData, count: int | None) -> ImageData:
    return data if count is None or count >= len(data) else data.take(torch.arange(count))


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


def _folder(out: Path, world: World, overwrite: bool) -> RunFolder | None:
    return RunFolder.create(out, overwrite=overwrite) if world.first else None


def _prepare(
    config: RunConfig, world: World, resolution: Callable[[], int | None] | None = None
) -> tuple[RunConfig, Trainer, ImageData]:
    """The config with what pre-trained weights decide; the trainer, which keeps its own part of the
    training set; the test set."""
    data = load(config.data.name)
    config = settle(config, data, resolution)
    return config, make_trainer(config, data, world), data.test


def _resolved(config: RunConfig, trainer: Trainer) -> DataConfig:
    """What a default or the current folder decided, written down, so the run can be repeated."""
    data = config.data
    return replace(
        data,
        name=_anchored(data.name),
        unlabelled=data.unlabelled and _anchored(data.unlabelled),
        pseudo_labels=data.pseudo_labels and _anchored(data.pseudo_labels),
        parts=len(trainer.supply.sources[0].plan.parts),
    )


def _anchored(name: str) -> str:
    """A path of a file or folder as seen from anywhere; other names as they are."""
    path = Path(name)
    return str(path.resolve()) if path.suffix in (".npz", ".npy") or path.is_dir() else name


OVERFIT = 3.0
"""Points of held-out RA lost since the best epoch that are worth a word."""


def _overfitting(trainer: Trainer, records: list[EpochRecord]) -> list[str]:
    """Robust overfitting (Rice et al. 2020): the last weights are worse than the best were."""
    best, last = trainer.best_accuracy(), records[-1].holdout_ra
    if trainer.collapses or best is None or last is None or best.ra - last < OVERFIT:
        return []
    return [
        f"robust overfitting: held-out RA was {best.ra:.1f} % after epoch {trainer.best_epoch()} "
        f"and {last:.1f} % after the last; best.safetensors is the former"
    ]


def _result(
    config: RunConfig,
    recipe: str,
    trainer: Trainer,
    records: list[EpochRecord],
    test: ImageData,
) -> dict[str, Any]:
    world, epochs, best = trainer.world, len(records), trainer.best_accuracy()
    found = {
        name: figures(
            config, accuracy_of(config, trainer.best_model(name), test, world, check=False)
        )
        for name in trainer.models()
    }
    result: dict[str, Any] = {
        "recipe": recipe,
        "method": method_name(config, world.size),
        "workers": world.size,
        "batch": config.train.batch,
        "quantizer": quantizer_name(trainer.quantizer),
        "bits": trainer.quantizer.bits,
        "protocol": protocol_name(trainer.protocol),
        "epochs": epochs,
        "steps": trainer.updates,
        **found[""],
        "best_epoch": trainer.best_epoch(),
        "holdout_ta": best.ta if best else None,
        "holdout_ra": best.ra if best else None,
        "last_holdout_ra": records[-1].holdout_ra,
        "collapses": [str(it) for it in trainer.collapses],
        "warnings": _overfitting(trainer, records),
        "comm_seconds_per_epoch": sum(r.comm_seconds for r in records) / epochs,
        "exposed_seconds_per_epoch": sum(r.exposed_seconds for r in records) / epochs,
        "train_seconds_per_epoch": sum(r.seconds for r in records) / epochs,
        "train_seconds": sum(r.seconds for r in records) + trainer.discarded_seconds,
        "mb_per_step": sum(r.mb_per_step for r in records) / epochs,
        "mb_busiest": sum(r.mb_busiest for r in records) / epochs,
        "mb_per_epoch": sum(r.mb_epoch for r in records) / epochs,
    }
    if "ema-" in found:
        result |= {
            f"ema_{key}": found["ema-"][key] for key in ("ta", "ra", "aa") if key in found["ema-"]
        }
    return result
