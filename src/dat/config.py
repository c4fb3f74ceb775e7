"""RunConfig: every setting of a run, typed, documented and validated; saved beside every run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dat.attacks import ATTACKS, Attack
from dat.comm import GATHER, NORMS, PROTOCOLS, QUANTIZERS, Protocol, Quantizer
from dat.compute import Compute
from dat.data import AUGMENTATIONS, WEIGH_BY, Reading
from dat.fields import SettingError, Settings, component, section, setting
from dat.loggers import LOGGERS
from dat.models import MODELS
from dat.objectives import OBJECTIVES, TRADES, Objective
from dat.optim import OPTIMIZERS, SCHEDULES, OuterOracle, Schedule
from dat.threat import ThreatModel


@dataclass(frozen=True, kw_only=True)
class DataConfig(Settings):
    """What to train on."""

    name: str = setting(
        "digits",
        "a built-in or fetched set (dat data list), an .npz or .parquet file, a folder of "
        "pictures, of arrays or of parts (dat data shard), or package.module:function",
    )
    holdout: float = setting(
        0.1, "share of the training set held out to choose the best weights by", ge=0, lt=1
    )
    parts: int | None = setting(
        None,
        "parts the data is split into, each drawn from alike; none is 24, which 1, 2, 3, 4, 6, 8, "
        "12 or 24 workers share out evenly, and else one a worker",
        ge=1,
    )
    weigh_by: str = setting(
        "parts",
        "of parts on disk that differ in size, what counts alike: parts, as in the paper's "
        "equation 2, or images",
        choices=WEIGH_BY,
    )
    size: int | None = setting(
        None, "pixels a side that pictures are scaled to; none: as they are, if all alike", ge=1
    )
    resize: int | None = setting(
        None, "pixels of a picture's shorter side before its middle is cut out; none: size", ge=1
    )
    corrupt: str = setting(
        "stop", "what to do about a picture that cannot be read", choices=("stop", "skip")
    )
    test_share: float = setting(
        0.2, "share kept for testing of a folder that has no test set", gt=0, lt=1
    )
    memory: float = setting(
        2.0, "GiB of images that are read once and kept; more stay on disk until drawn", ge=0
    )
    loaders: int | None = setting(
        None, "processes a worker that decode pictures; none: its share of the cores", ge=0
    )
    labels: int | None = setting(
        None, "keep only so many labels, spread evenly over the classes; none keeps all", ge=1
    )
    unlabelled: str | None = setting(
        None,
        "images without labels beside the labelled ones: rest (what data.labels leaves over), a "
        "folder of pictures, an .npy or .npz file, or a set whose labels are ignored",
    )
    pseudo_labels: str | None = setting(
        None, "labels for them: a file of `dat label`; none leaves them without (objective trades)"
    )
    confidence: float = setting(
        0.0, "pseudo-labels below this confidence are left out, with their images", ge=0, le=1
    )
    unlabelled_share: float = setting(0.5, "their share of a batch", gt=0, lt=1)
    unlabelled_weight: float = setting(1.0, "how much one counts beside a labelled image", ge=0)
    epoch_by: str = setting(
        "labelled", "whose number makes an epoch", choices=("labelled", "unlabelled", "both")
    )
    augmentation: str = setting(
        "none",
        "random changes to images: crop pads by 4 pixels and cuts out, flip mirrors, resized-crop "
        "cuts out any part of a picture, scales it and flips",
        choices=AUGMENTATIONS,
    )
    cutout: int = setting(0, "pixels a side of a square that is blackened; 0 is none", ge=0)
    randaugment: int = setting(0, "RandAugment: changes in a row; 0 is none", ge=0)
    magnitude: int = setting(9, "RandAugment: how strong they are", ge=0, le=30)

    def reading(self) -> Reading:
        """How pictures become images."""
        return Reading(
            size=self.size,
            resize=self.resize,
            memory=self.memory,
            corrupt=self.corrupt,
            random_crops=self.augmentation == "resized-crop",
            test_share=self.test_share,
        )


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Settings):
    """What to train."""

    name: str = setting("cnn", "the network", choices=tuple(MODELS), or_import=True)
    width: int | None = setting(None, "channels at the base; none is the published width", ge=1)


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig(Settings):
    """What a pre-trained network brings along, and how much of it learns (`dat finetune`)."""

    weights: str | None = setting(
        None, "pre-trained weights to start from, with a new head; none trains from scratch"
    )
    classes: int | None = setting(
        None, "classes the pre-trained network was made for; none is read from its weights", ge=1
    )
    channels: int | None = setting(
        None, "channels it was made for, grey images are repeated; none is read as well", ge=1
    )
    size: int | None = setting(
        None, "pixels that images are up-sampled to inside the model; none leaves them alone", ge=1
    )
    layers: str = setting(
        "all", "what learns: all, head, or the last so many blocks, the head among them, e.g. 2"
    )
    decay: float = setting(
        1.0,
        "factor of a block's learning rate on that of the next one, nearer to the head",
        gt=0,
        le=1,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        number = self.layers.isdecimal() and int(self.layers) > 0
        if self.layers not in ("all", "head") and not number:
            raise SettingError(
                f"layers = {self.layers!r}: must be all, head, or a whole number, at least 1"
            )


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Settings):
    """How long, and in which batches."""

    epochs: int = setting(30, "passes over the training set", ge=1)
    batch: int = setting(256, "global batch: images of all workers in one step", ge=1)
    grow: tuple[int, ...] = setting(
        (),
        "epochs after which the batch grows, e.g. 10,15, in place of a rate that drops; empty: "
        "never",
        ge=1,
    )
    grow_by: int = setting(2, "what the batch is multiplied by each time", ge=2)
    team: int = setting(
        1, "workers that share out the noisy copies of the same images; divides the workers", ge=1
    )
    attack_bn: str = setting(
        "eval", "mode of batch normalisation during the attack", choices=("eval", "train")
    )
    bn: str = setting(
        "local",
        "over which images batch normalisation goes: local, a worker's share of the batch; sync, "
        "all workers' shares together; ghost, a share in groups of train.ghost images",
        choices=NORMS,
    )
    ghost: int = setting(32, "images in a group of bn ghost, at most", ge=2)
    awp: float = setting(
        0.0, "AWP: attack the weights as well, by so much of each layer's norm; 0 is none", ge=0
    )
    awp_warmup: int = setting(0, "epochs without AWP at the beginning", ge=0)
    sentinel: str = setting(
        "warn",
        "what to do when single-step training collapses: nothing, say so, stop, or go back to the "
        "last good epoch and go on with train.rescue",
        choices=("off", "warn", "stop", "rescue"),
    )
    rescue: str = setting("n-fgsm", "the attack to go on with", choices=("n-fgsm", "pgd"))
    guard: str = setting(
        "stop",
        "when a loss or gradient is not finite: stop, skip the step, or rollback to the last "
        "checkpoint and leave the step out then; always reported, ten times at most",
        choices=("stop", "skip", "rollback"),
    )
    save_every: int = setting(
        0, "steps between checkpoints; 0 is one at the end of every epoch", ge=0
    )
    save_keep: int = setting(2, "of the last checkpoints so many are kept, and the best", ge=1)
    ema: float = setting(0.0, "decay of the averaged weights; 0 keeps none", ge=0, lt=1)
    select_by: str = setting(
        "ra", "what is highest at the best weights, on the held-out images", choices=("ra", "ta")
    )
    select_steps: int = setting(10, "PGD steps on the held-out images", ge=1)
    select_every: int = setting(1, "epochs between measurements on the held-out images", ge=1)
    log: tuple[str, ...] = setting(
        ("tensorboard",),
        "where figures go while it runs, beside metrics.jsonl: tensorboard, wandb, mlflow; several "
        "with commas",
        choices=tuple(LOGGERS),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        told = ", ".join(map(str, self.grow))
        if list(self.grow) != sorted(set(self.grow)):
            raise SettingError(f"grow = {told}: must increase")
        if self.grow and self.grow[-1] >= self.epochs:
            raise SettingError(f"grow = {told}: must be below epochs = {self.epochs}")


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(Settings):
    """How the finished model is measured on the test set."""

    attacks: tuple[str, ...] = setting(
        ("pgd-20",),
        "what images must survive: pgd-20, pgd-100x5 (five restarts), cw-20, fgsm, apgd-ce, "
        "apgd-t, fab-t, square, autoattack, autoattack-rand; several with commas",
    )
    precision: str = setting(
        "float32",
        "in which the network computes under attack, while verdicts are in the model's own; dat "
        "certify counts answers in it",
        choices=("float32", "bfloat16", "float16"),
    )
    images: int | None = setting(
        None, "so many test images, alike of every class; none is all", ge=1
    )
    batch: int = setting(256, "images at a time; has no influence on the result", ge=1)
    report: int = setting(
        200, "so many test images are looked at closely for the run's report; 0: no report", ge=0
    )


@dataclass(frozen=True, kw_only=True)
class CommConfig(Settings):
    """Where the workers run and how they talk."""

    device: str = setting(
        "auto", "auto is cuda where there is one", choices=("auto", "cpu", "cuda")
    )
    backend: str = setting(
        "auto", "auto is nccl on cuda, gloo on cpu", choices=("auto", "gloo", "nccl")
    )
    threads: int | None = setting(None, "CPU threads a worker; none shares the cores out", ge=1)
    deterministic: bool = setting(True, "repeatable kernels on cuda; false may be faster")
    allocator: str = setting(
        "tuned",
        "tuned: freed memory is kept for the next tensors, where the C library is glibc; system: "
        "it is left alone",
        choices=("tuned", "system"),
    )
    pin: bool = setting(False, "bind each worker to its share of the machine's cores")
    timeout: float = setting(300.0, "seconds to wait for a silent worker", gt=0)
    shard: int | None = setting(
        None,
        "over how many neighbouring workers the weights are sharded (FSDP; fewer than all: HSDP); "
        "divides the workers, none: every worker has all",
        ge=1,
    )
    gather: str = setting(
        "attack",
        "how long sharded weights stay gathered: for the attack and the update's forward pass, or "
        "a block at a time, which takes less memory and sends more",
        choices=GATHER,
    )


@dataclass(frozen=True, kw_only=True)
class RunConfig(Settings):
    """A whole run."""

    about: str = setting("", "one line that says what this run is")
    seed: int = setting(0, "every random number follows from it", ge=0)
    data: DataConfig = section(DataConfig, "what to train on")
    model: ModelConfig = section(ModelConfig, "what to train")
    finetune: FinetuneConfig = section(FinetuneConfig, "what a pre-trained network brings along")
    threat: ThreatModel = section(ThreatModel, "what the adversary may do")
    attack: Attack = component(ATTACKS, "pgd", "inner maximisation oracle")
    objective: Objective = component(OBJECTIVES, "at", "lambda * clean loss + phi")
    optimizer: OuterOracle = component(OPTIMIZERS, "lamb", "outer minimisation oracle")
    schedule: Schedule = component(SCHEDULES, "piecewise", "learning rate over the epochs")
    train: TrainConfig = section(TrainConfig, "how long, in which batches")
    evaluate: EvaluateConfig = section(EvaluateConfig, "how the result is measured")
    quantizer: Quantizer = component(QUANTIZERS, "bucket", "in how many bits a gradient is sent")
    protocol: Protocol = component(
        PROTOCOLS, "default", "who sends it to whom; default is dense at 32 bits, else chunked"
    )
    compute: Compute = section(Compute, "how a worker computes")
    comm: CommConfig = section(CommConfig, "where the workers run and how they talk")

    def __post_init__(self) -> None:
        super().__post_init__()
        data = self.data
        if data.unlabelled == "rest" and data.labels is None:
            raise SettingError("data.unlabelled = rest: the rest of what? set data.labels as well")
        if data.pseudo_labels is not None and data.unlabelled is None:
            raise SettingError("data.pseudo_labels: set data.unlabelled, the images to label")
        goes_back = self.train.sentinel in ("stop", "rescue")
        if goes_back and data.holdout == 0:
            raise SettingError(
                f"train.sentinel = {self.train.sentinel}: looks at held-out images; set "
                "data.holdout above 0"
            )
        if self.train.sentinel == "rescue" and type(self.attack) is ATTACKS[self.train.rescue]:
            raise SettingError(
                f"train.rescue = {self.train.rescue}: is the very attack that would collapse; "
                "use another"
            )
        if isinstance(self.objective, TRADES) and not getattr(self.attack, "random_start", True):
            raise SettingError(
                "attack.random_start = false: the KL of objective trades is flat at the image, so "
                "an attack that starts there goes nowhere; set it to true"
            )
        if self.schedule.warmup > self.train.epochs:
            raise SettingError(
                f"schedule.warmup = {self.schedule.warmup:g}: must be at most train.epochs = "
                f"{self.train.epochs}"
            )


COMPONENTS = {
    field.name: field.metadata["default"]
    for field in dataclasses.fields(RunConfig)
    if "registry" in field.metadata
}
"""The groups that hold a component, and the one that they hold by default."""


def merge(base: Mapping[str, Any], edits: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `edits` laid over it, group by group.

    An edit that names another component drops what `base` said of the old one: the steps of PGD
    mean nothing to FGSM, and a rate that was tuned for LAMB is none for SGD.
    """
    merged = dict(base)
    for key, edit in edits.items():
        below, edit = _group(key, base.get(key, {})), _group(key, edit)
        if isinstance(edit, Mapping) and isinstance(below, Mapping):
            now = below.get("name", COMPONENTS.get(key))
            replaced = key in COMPONENTS and edit.get("name", now) != now
            merged[key] = dict(edit) if replaced else {**below, **edit}
        else:
            merged[key] = edit
    return merged


def _group(key: str, value: object) -> object:
    """The short form: `attack: fgsm` means `attack: {name: fgsm}`."""
    named = key in COMPONENTS or key in ("data", "model")
    return {"name": value} if named and isinstance(value, str) else value


def parse_edits(words: Sequence[str]) -> dict[str, Any]:
    """`attack.steps=5 seed=1` from a command line, as nested groups."""
    edits: dict[str, Any] = {}
    for word in words:
        path, equals, value = word.partition("=")
        group, dot, key = path.partition(".")
        if not equals or not all(path.split(".")):
            raise SettingError(f"{word!r}: settings are given as key=value, e.g. attack.steps=5")
        edit: Any = {key: value} if dot else _group(group, value)
        below = edits.get(group)
        both = isinstance(edit, dict) and isinstance(below, dict)
        edits[group] = {**below, **edit} if both and below is not None else edit
    return edits
