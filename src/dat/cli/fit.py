"""What `dat train` and `dat finetune` share: their arguments, and the training itself."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dat.cli.arguments import quiet_argument, trust_argument, workers_argument
from dat.cli.workers import is_restart, starts_workers
from dat.core.files import check_output_folder, log_file
from dat.jobs.launch import is_worker, launch

if TYPE_CHECKING:
    from dat.config.schema import RunConfig


def fit_arguments(parser: argparse.ArgumentParser, default: str) -> None:
    workers_argument(parser)
    parser.add_argument("--out", type=Path, metavar="DIR", help=f"run folder (default: {default})")
    parser.add_argument("--overwrite", action="store_true", help="replace the run in that folder")
    parser.add_argument(
        "--restarts",
        type=int,
        default=3,
        metavar="N",
        help="restart up to N times from the last checkpoint when a worker dies (default: 3)",
    )
    trust_argument(parser)
    quiet_argument(parser)


def fit(
    arguments: argparse.Namespace,
    argv: list[str],
    config: RunConfig,
    recipe: str,
    out: Path,
    *,
    resume: bool = False,
    resolution: Callable[[], int | None] | None = None,
) -> int:
    """Train, starting workers if need be, and show the result."""
    from dat.data.names import check_name

    restart = is_worker() and is_restart(out)
    if not is_worker():
        check_name(config.data.name)
    if not is_worker() and not resume:
        check_output_folder(out, overwrite=arguments.overwrite)
    if starts_workers(arguments):
        _check_batch(config, arguments.workers)
        return launch(
            arguments.workers,
            argv if resume else [*argv, "--out", str(out)],
            restarts=arguments.restarts,
            log=partial(log_file, out),
            hint=partial(_hint, out, config),
        )
    from dat.jobs.train import train
    from dat.train.checkpoint import has_checkpoint

    try:
        result = train(
            config,
            recipe,
            out,
            overwrite=arguments.overwrite or restart,
            quiet=arguments.quiet,
            resume=resume or (restart and has_checkpoint(out)),
            resolution=resolution,
        )
    except KeyboardInterrupt as interrupt:
        if not is_worker() and (hint := _hint(out, config)):
            interrupt.add_note(hint)
        raise
    if result is not None:
        _show(result, arguments, config, out)
    return 0


def _check_batch(config: RunConfig, workers: int) -> None:
    """Refuse a batch that is too small for the workers before starting them; once the data is
    loaded, they check this again."""
    from dat.data.batch_size import check_batch

    shares = max(workers // config.train.options.subgroup.size, 1)
    check_batch(config.train.batch, shares, config.data.parts or shares)


def _hint(out: Path, config: RunConfig) -> str:
    """The command that resumes the run, if there is a checkpoint."""
    from dat.config.trust import code_arguments

    if not any((out / "checkpoints").glob("[0-9]*")):
        return ""
    return f"resume with: dat train --resume {' '.join([str(out), *code_arguments(config)])}"


def _show(
    result: dict[str, Any], arguments: argparse.Namespace, config: RunConfig, out: Path
) -> None:
    from dat.report import print_json, runs_table, warn

    if arguments.json:
        print_json(result)
        return
    collapses = result["collapses"] if arguments.quiet else []  # else shown when they happened
    warn([*collapses, *result["warnings"]])
    runs_table([result])
    events = ", TensorBoard events" if "tensorboard" in config.train.log else ""
    print(f"\n{out}: best weights, metrics{events}")
    if (out / "report.html").is_file():
        print(f"{out / 'report.html'}: HTML report")
