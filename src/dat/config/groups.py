"""The groups of settings other than components: data, model, training, evaluation, ..."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dat.config.checks import check_suites
from dat.core.devices import DEVICES
from dat.core.settings import Arguments, SettingError, Settings, arguments, inline, setting
from dat.data import AUGMENTATIONS, WEIGH_BY, ReadOptions
from dat.models import ACTIVATIONS, MODELS, NAME_PATTERNS, is_library
from dat.train.loggers import LOGGERS
from dat.train.options import Options
from dat.train.sharding import Sharding

if TYPE_CHECKING:
    from dat.data import Augmentation, Mix


@dataclass(frozen=True, kw_only=True)
class DataConfig(Settings):
    """What to train on."""

    name: str = setting(
        "digits",
        "a built-in or downloaded dataset (dat data list), an .npz or .parquet file, a folder of "
        "images, of arrays or of parts (dat data shard), or package.module:function",
        or_import=True,
    )
    holdout: float = setting(
        0.1, "share of the training set that is held out to select the best weights", ge=0, lt=1
    )
    parts: int | None = setting(
        None,
        "number of partitions of the data, all drawn from equally; none: 24, which 1, 2, 3, 4, 6, "
        "8, 12 or 24 workers share evenly, otherwise one per worker",
        ge=1,
    )
    weigh_by: str = setting(
        "parts",
        "if parts on disk differ in size, weigh equally: parts, as in the paper's equation 2, or "
        "images",
        choices=WEIGH_BY,
    )
    size: int | None = setting(
        None, "image size in pixels to scale to; none: as stored, if all have the same size", ge=1
    )
    resize: int | None = setting(
        None, "pixels of an image's shorter side before the center crop; none: data.size", ge=1
    )
    corrupt: str = setting(
        "stop", "what to do about an image that cannot be decoded", choices=("stop", "skip")
    )
    test_share: float = setting(
        0.2, "share of the images to test on, if a folder has no test set", gt=0, lt=1
    )
    memory: float = setting(
        2.0, "GiB of images to keep in memory; larger data is read from disk when drawn", ge=0
    )
    loaders: int | None = setting(
        None, "processes per worker that decode images; none: its share of the cores", ge=0
    )
    limit: int | None = setting(
        None,
        "number of training images to use, class-balanced and chosen by the seed, before any are "
        "held out; none: all",
        ge=1,
    )
    labels: int | None = setting(None, "number of labels to keep, class-balanced; none: all", ge=1)
    unlabelled: str | None = setting(
        None,
        "additional images without labels: rest (those whose labels data.labels drops), a folder "
        "of images, an .npy or .npz file, or a dataset whose labels are ignored",
        or_import=True,
    )
    pseudo_labels: str | None = setting(
        None,
        "a file of `dat label` with labels for data.unlabelled; none: no labels (for objective "
        "trades)",
    )
    confidence: float = setting(
        0.0, "drop unlabelled images with pseudo-labels below this confidence", ge=0, le=1
    )
    unlabelled_share: float = setting(0.5, "share of unlabelled images in a batch", gt=0, lt=1)
    unlabelled_weight: float = setting(
        1.0, "loss weight of an unlabelled image, relative to a labelled one", ge=0
    )
    epoch_by: str = setting(
        "labelled",
        "what defines the length of an epoch: labelled, unlabelled (or synthetic) images or both "
        "are seen once; original: as many images of any kind as the training set has",
        choices=("labelled", "unlabelled", "both", "original"),
    )
    synthetic: str | None = setting(
        None, "generated images with labels, an .npz file with the arrays image and label"
    )
    synthetic_share: float = setting(0.7, "share of synthetic images in a batch", gt=0, lt=1)
    augmentation: str = setting(
        "none",
        "random augmentation: crop, after padding by 4 pixels; flip, horizontally; resized-crop, a "
        "random area scaled to data.size, with flips",
        choices=AUGMENTATIONS,
    )
    cutout: int = setting(0, "cutout: side of the black square in pixels; 0: no cutout", ge=0)
    randaugment: int = setting(
        0, "RandAugment: number of operations per image; 0: no RandAugment", ge=0
    )
    magnitude: int = setting(9, "RandAugment: strength of the operations", ge=0, le=30)
    jitter: float = setting(
        0.0,
        "color jitter: largest relative change of brightness, contrast and saturation, e.g. 0.4; "
        "0: no jitter",
        ge=0,
        le=1,
    )
    erasing: float = setting(
        0.0,
        "random erasing: share of the images in which a box is filled with noise, e.g. 0.25; 0: "
        "none",
        ge=0,
        le=1,
    )

    def labelled_images(self, total: int) -> int:
        """The number of labelled images, out of a training set of this many."""
        return min(size for size in (total, self.limit, self.labels) if size is not None)

    def mix(self) -> Mix:
        """How labelled and unlabelled images are mixed in a batch."""
        from dat.data import Mix

        if self.synthetic is not None:
            return Mix(share=self.synthetic_share, epoch_by=self.epoch_by, name="synthetic")
        return Mix(
            share=self.unlabelled_share, weight=self.unlabelled_weight, epoch_by=self.epoch_by
        )

    def augmented(self) -> Augmentation:
        """The random augmentation."""
        from dat.data import Augmentation

        return Augmentation(
            kind=self.augmentation,
            cutout=self.cutout,
            randaugment=self.randaugment,
            magnitude=self.magnitude,
            jitter=self.jitter,
            erasing=self.erasing,
        )

    def reading(self) -> ReadOptions:
        """How image files are read."""
        return ReadOptions(
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

    name: str = setting(
        "cnn",
        "network architecture; also any of timm, torchvision or Hugging Face transformers",
        choices=tuple(MODELS),
        patterns=NAME_PATTERNS,
        or_import=True,
    )
    width: int | None = setting(None, "base number of channels; none: as published", ge=1)
    activation: str | None = setting(
        None, "activation of the built-in CNNs; none: relu", choices=ACTIVATIONS
    )
    args: Arguments = arguments(
        "further arguments of the network's factory: model.args.drop_path_rate=0.1"
    )
    pretrained: bool | str = setting(
        False,
        "pre-trained weights to start from: true, those that the library has for this name, or a "
        "file; false: train from scratch",
    )
    mean: tuple[float, ...] | None = setting(
        None,
        "normalization in front of the network, per channel; none: that of the pre-trained "
        "weights, or of the training images",
    )
    std: tuple[float, ...] | None = setting(
        None, "the standard deviations that belong to model.mean", gt=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.mean is None) != (self.std is None) or len(self.mean or ()) != len(self.std or ()):
            raise SettingError("mean and std: give one number per channel for both, or for none")
        if self.pretrained is True and not is_library(self.name):
            raise SettingError(
                f"pretrained = true: {self.name} comes without weights; give a file, or take a "
                "network of timm, torchvision or hf"
            )


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig(Settings):
    """The pre-trained network, and which of its layers learn (`dat finetune`)."""

    weights: str | None = setting(
        None, "pre-trained weights to start from, with a new head; none: train from scratch"
    )
    classes: int | None = setting(
        None, "number of classes of the pre-trained network; none: read from its weights", ge=1
    )
    channels: int | None = setting(
        None,
        "image channels of the pre-trained network; gray images are repeated to match; none: read "
        "from its weights",
        ge=1,
    )
    size: int | None = setting(
        None, "size in pixels to upsample images to inside the model; none: no upsampling", ge=1
    )
    layers: str = setting(
        "all", "layers that learn: all, head, or the number of last blocks, including the head"
    )
    decay: float = setting(
        1.0,
        "layer-wise learning rate decay: a block's rate, relative to the next block's",
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
    """The length of training, the batch size, and all options."""

    epochs: int = setting(30, "passes over the training set", ge=1)
    batch: int = setting(256, "global batch size: images per step, over all workers", ge=1)
    options: Options = inline(Options)
    log: tuple[str, ...] = setting(
        ("tensorboard",),
        "loggers of metrics, besides metrics.jsonl: tensorboard, wandb, mlflow; comma-separated",
        choices=tuple(LOGGERS),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        growth = self.options.batch_schedule.epochs
        if growth and growth[-1] >= self.epochs:
            shown = ", ".join(map(str, growth))
            raise SettingError(f"grow = {shown}: must be below epochs = {self.epochs}")


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(Settings):
    """How the trained model is evaluated on the test set."""

    checks = (check_suites,)

    attacks: tuple[str, ...] = setting(
        ("pgd-20",),
        "attacks: pgd-20, pgd-100x5 (five restarts), cw-20, fgsm, apgd-ce, apgd-t, fab-t, square, "
        "autoattack, autoattack-rand; comma-separated",
    )
    precision: str = setting(
        "float32",
        "precision of attacks, and of dat certify; adversarial examples are always verified in the "
        "model's own precision; float16 scales each image's gradient",
        choices=("float32", "bfloat16", "float16"),
    )
    images: int | None = setting(None, "number of test images, class-balanced; none: all", ge=1)
    batch: int = setting(256, "batch size; does not affect the result", ge=1)
    report: int = setting(
        200, "number of test images for the error analysis of the report; 0: no report", ge=0
    )


@dataclass(frozen=True, kw_only=True)
class CommConfig(Settings):
    """Where the workers run and how they communicate."""

    device: str = setting("auto", "auto: the GPU if there is one", choices=DEVICES)
    backend: str = setting(
        "auto",
        "auto: nccl on NVIDIA and AMD GPUs, xccl on Intel's, gloo elsewhere",
        choices=("auto", "gloo", "nccl", "xccl"),
    )
    threads: int | None = setting(
        None, "CPU threads per worker; none: its share of the cores", ge=1
    )
    deterministic: bool = setting(
        True, "on GPUs, use deterministic kernels only; false may be faster"
    )
    allocator: str = setting(
        "tuned",
        "memory allocator: tuned, which keeps freed memory for the next tensors (glibc only), or "
        "system",
        choices=("tuned", "system"),
    )
    pin: bool = setting(False, "pin each worker to its share of the CPU cores")
    timeout: float = setting(300.0, "seconds to wait for a worker that does not respond", gt=0)
    sharding: Sharding = inline(Sharding)
