"""The training job: from a config to a run's folder and its result."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dat.config.build import accuracy_of, figures, make_trainer, make_world
from dat.config.finetune import resolve_finetuning
from dat.config.schema import DataConfig, RunConfig
from dat.config.trust import code_arguments
from dat.core.files import CHECKPOINTS, PAGE, RESULT
from dat.data import ImageData, Partitions, Splits, is_known, load
from dat.distributed import Auto, World, protocol_name, quantizer_name
from dat.jobs.error_analysis import analyze_errors
from dat.jobs.method import method_name
from dat.report import Progress, print_text, progress_bar
from dat.report.page import write_page
from dat.train import Callback, Checkpoint, Checkpointer, EpochRecord, RunFolder, Trainer
from dat.train.checkpoint import remove_unfinished
from dat.train.diagnostics import chance_level_warnings, label_warnings, output_warnings
from dat.train.log import WorkerLog, log, worker_log
from dat.train.logged import Logged
from dat.train.loggers import make_loggers


def train(
    config: RunConfig,
    recipe: str,
    out: Path,
    *,
    overwrite: bool = False,
    quiet: bool = False,
    resume: bool = False,
    resolution: Callable[[], int | None] | None = None,
) -> dict[str, Any] | None:
    """Train on all workers, evaluate the best weights on the test set, and write a run's folder.

    Rank 0 returns the result, which is also in the folder; other ranks return None. `resume`
    continues from the last checkpoint in the folder. `resolution` returns the image size of the
    pre-trained network, if there is one.
    """
    with make_world(config) as world, ExitStack() as stack:
        config, trainer, summary = world.run_or_fail_together(
            lambda: _prepare(config, world, resolution)
        )
        checkpoint = world.run_or_fail_together(lambda: _last(out, world)) if resume else None
        folder = world.run_or_fail_together(lambda: _folder(out, world, overwrite, checkpoint))
        stack.enter_context(worker_log(out, world))
        checkpointing, stopping = config.train.options.checkpointing, threading.Event()
        checkpointer = Checkpointer(
            out / CHECKPOINTS,
            every=checkpointing.every,
            keep=checkpointing.keep,
            report=_report if world.first else log.warning,
            code=code_arguments(config),
            stopping=stopping.is_set,
        )
        callbacks: list[Callback] = [WorkerLog()]
        if world.first and not quiet:
            for line in summary.lines:
                print_text(line, stderr=True)
        resolve_protocol(trainer, quiet=quiet)
        if folder:
            resolved = replace(
                config,
                data=_resolved(config, trainer, on_disk=summary.in_parts),
                quantizer=trainer.exchange.quantizer,
                protocol=trainer.exchange.protocol,
            )
            values = {"recipe": recipe} | resolved.dump()
            if not checkpoint:
                folder.describe(values, world)
            loggers = Logged(out, make_loggers(config.train.log), values, result_follows=True)
            stack.callback(loggers.close)
            callbacks += [loggers, folder, *([] if quiet else [Progress(str(out))])]
            for change in checkpoint.changes(trainer) if checkpoint else ():
                _report(change)
        trainer.callbacks = [*callbacks, checkpointer]
        with _stop_on_signals(stopping, first=world.first):
            records = trainer.fit(checkpoint)
        result = _result(config, recipe, trainer, records, summary)
        if folder:
            folder.finish(result)
            loggers.close(result)
        _write_report(config, trainer, summary.test, out, quiet=quiet)
        return result if world.first else None


def _write_report(
    config: RunConfig, trainer: Trainer, test: ImageData, out: Path, *, quiet: bool
) -> None:
    """Analyze the errors of the best weights, on all workers, and write the run's report."""
    world, images = trainer.world, config.evaluate.report
    if not images:
        return
    with progress_bar("error analysis", show=world.first and not quiet) as progress:
        analysis = analyze_errors(
            config, trainer.best_model(""), test, world, images=images, progress=progress
        )
    if analysis:
        analysis.write(out)
        write_page([out], out / PAGE)


def resolve_protocol(trainer: Trainer, *, quiet: bool = False) -> None:
    """Resolve the default protocol, or measure which is fastest (`protocol auto`), once per run."""
    requested = trainer.exchange.protocol
    trainer.exchange = exchange = trainer.exchange.resolved(trainer)
    if isinstance(requested, Auto) and trainer.world.first and not quiet:
        fastest = f"{protocol_name(exchange.protocol)}, {exchange.quantizer.bits} bits"
        print(f"protocol auto: {fastest} (fastest in a measurement)", file=sys.stderr)


def _folder(
    out: Path, world: World, overwrite: bool, checkpoint: Checkpoint | None
) -> RunFolder | None:
    if not world.first:
        return None
    if checkpoint is None:
        return RunFolder.create(out, overwrite=overwrite)
    # otherwise a worker's old file could end up in a new checkpoint
    remove_unfinished(out / CHECKPOINTS)
    return RunFolder(out)


def _last(out: Path, world: World) -> Checkpoint:
    """The checkpoint to resume from, the same on all workers."""
    if (out / RESULT).is_file():
        raise ValueError(f"{out}: the run is complete; there is nothing to resume")
    checkpoint = Checkpoint.last(out / CHECKPOINTS, _report if world.first else log.warning)
    if checkpoint is None:
        raise ValueError(f"{out}: no checkpoint to resume from")
    return checkpoint


def _report(message: str) -> None:
    """Print and log a message on rank 0; other ranks only log it."""
    log.warning(message)
    print(message, file=sys.stderr)


@contextmanager
def _stop_on_signals(stopping: threading.Event, *, first: bool) -> Iterator[None]:
    """Request a stop, with a checkpoint, when a scheduler sends SIGTERM, or on Ctrl-C; the second
    Ctrl-C ends the process at once, as does one that came too late for another step."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before, interrupted = signal.getsignal(signal.SIGINT), threading.Event()

    def interrupt(number: int, frame: object) -> None:
        signal.signal(signal.SIGINT, before)
        interrupted.set()
        stopping.set()
        if first:  # print might be interrupted while it holds its lock
            os.write(sys.stderr.fileno(), STOPPING.encode())

    signal.signal(signal.SIGTERM, lambda number, frame: stopping.set())
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
        if interrupted.is_set():
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


STOPPING = "\ninterrupted: saving a checkpoint after this step; Ctrl-C again stops at once\n"


def _prepare(
    config: RunConfig, world: World, resolution: Callable[[], int | None] | None = None
) -> tuple[RunConfig, Trainer, DataSummary]:
    """The config with everything resolved that pre-trained weights determine, the trainer, and a
    summary of the data."""
    if world.first:
        make_loggers(config.train.log)  # report a missing package before writing anything
    data = load(config.data.name, config.data.reading())
    config = resolve_finetuning(config, data, resolution)
    trainer = make_trainer(config, data, world)
    lines = data_lines(config.data.name, data, trainer)
    warnings = label_warnings(_counts(data), data.test)
    warnings += output_warnings(trainer.model, data.test)
    lines += [f"warning: {text}" for text in warnings]
    in_parts = isinstance(data.training, Partitions)
    return config, trainer, DataSummary(data.test, lines, in_parts, warnings)


class DataSummary(NamedTuple):
    """What is needed of the data after the trainer has dropped all but this worker's share."""

    test: ImageData
    lines: list[str]
    """The description printed before training."""
    in_parts: bool
    warnings: list[str]


def data_lines(name: str, data: Splits, trainer: Trainer) -> list[str]:
    """Describe the training data: number and shape of images, classes and parts."""
    train, (channels, height, width) = data.training, data.test.shape
    lines = [
        f"{name}: {len(train):,} training and {len(data.test):,} test images of "
        f"{channels} x {height} x {width}, {data.test.classes} classes"
    ]
    counts = _counts(data)
    if len(counts):
        low, high = int(counts.min()), int(counts.max())
        lines[0] += f" with {low:,} to {high:,} each" if low < high else f" with {low:,} each"
        if low == 0 and not label_warnings(counts, data.test):
            empty = (counts == 0).nonzero().squeeze(1).tolist()
            names = [train.names[label] if train.names else str(label) for label in empty]
            lines.append(f"warning: no training images of class {', '.join(names)}")
    if isinstance(train, ImageData):
        return lines
    plan = trainer.batches.sources[0].sampler
    passes = [plan.steps * plan.batch / len(plan.sizes) / size for size in plan.sizes]
    lines.append(
        f"in {len(plan.sizes)} parts of {min(plan.sizes):,} to {max(plan.sizes):,} images: an "
        f"epoch makes {max(passes):.2f} passes over the smallest, {min(passes):.2f} over the "
        "largest"
    )
    return lines


def _counts(data: Splits) -> Tensor:
    """The number of training images of each class."""
    train = data.training
    return train.counts() if isinstance(train, ImageData) else torch.tensor(train.totals)


def _resolved(config: RunConfig, trainer: Trainer, *, on_disk: bool) -> DataConfig:
    """The data settings with absolute paths and resolved defaults, so that the run can be
    repeated."""
    data = config.data
    return replace(
        data,
        name=_absolute(data.name),
        unlabelled=data.unlabelled and _absolute(data.unlabelled),
        pseudo_labels=data.pseudo_labels and _absolute(data.pseudo_labels),
        synthetic=data.synthetic and _absolute(data.synthetic),
        parts=trainer.images.parts if on_disk else len(trainer.batches.sources[0].sampler.sizes),
    )


def _absolute(name: str) -> str:
    """Make the path of a file or folder absolute; other names stay as they are."""
    path = Path(name)
    if is_known(name) or name == "rest":
        return name
    files = (".npz", ".npy", ".parquet")
    return str(path.resolve()) if path.suffix in files or path.is_dir() else name


def _result(
    config: RunConfig,
    recipe: str,
    trainer: Trainer,
    records: list[EpochRecord],
    summary: DataSummary,
) -> dict[str, Any]:
    test = summary.test
    world, epochs, best = trainer.world, len(records), trainer.best_accuracy()
    accuracies = {
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
        "last_batch": trainer.batch_in(epochs - 1),
        "quantizer": quantizer_name(trainer.exchange.quantizer),
        "bits": trainer.exchange.quantizer.bits,
        "protocol": protocol_name(trainer.exchange.protocol),
        "epochs": epochs,
        "steps": trainer.updates,
        **accuracies[""],
        "best_epoch": trainer.best_epoch(),
        "holdout_ta": best.ta if best else None,
        "holdout_ra": best.ra if best else None,
        "last_holdout_ra": records[-1].holdout_ra,
        "collapses": [str(collapse) for collapse in trainer.collapses],
        "warnings": [
            *summary.warnings,
            *(text for part in trainer.parts for text in part.warnings(trainer)),
            *chance_level_warnings(accuracies[""]["ta"], accuracies[""]["images"], test),
        ],
        "comm_seconds_per_epoch": sum(r.comm_seconds for r in records) / epochs,
        "exposed_seconds_per_epoch": sum(r.exposed_seconds for r in records) / epochs,
        "train_seconds_per_epoch": sum(r.seconds for r in records) / epochs,
        "train_seconds": sum(r.seconds for r in records) + trainer.discarded_seconds,
        "mb_per_step": sum(r.mb_per_step for r in records) / epochs,
        "mb_busiest": sum(r.mb_busiest for r in records) / epochs,
        "mb_between": sum(r.mb_between for r in records) / epochs,
        "mb_per_epoch": sum(r.mb_epoch for r in records) / epochs,
    }
    if averaged := accuracies.get("ema-"):
        result |= {f"ema_{key}": averaged[key] for key in ("ta", "ra", "aa") if key in averaged}
    return result
