"""`dat selftrain`: train a base model, pseudo-label with it, and train on all images."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from dat.cli.arguments import (
    Commands,
    quiet_argument,
    recipe_arguments,
    trust_argument,
    workers_argument,
)
from dat.cli.workers import free_folder
from dat.jobs.launch import is_worker


def add(commands: Commands) -> None:
    selftrain = commands.add(
        "selftrain",
        _selftrain,
        "train a base model, pseudo-label unlabelled images, and train robustly on all images",
        "  dat selftrain digits data.labels=200 data.unlabelled=rest --workers 2\n"
        "  dat selftrain my.yaml data.unlabelled=pictures/ --base train.epochs=50",
    )
    recipe_arguments(selftrain)
    selftrain.add_argument(
        "--base",
        action="append",
        default=[],
        metavar="key=value",
        help="a setting of the base model; can be repeated",
    )
    selftrain.add_argument(
        "--out", type=Path, metavar="DIR", help="output folder (default: runs/RECIPE-selftrain)"
    )
    selftrain.add_argument(
        "--overwrite", action="store_true", help="replace the runs in that folder"
    )
    workers_argument(selftrain)
    trust_argument(selftrain)
    quiet_argument(selftrain)


def _selftrain(arguments: argparse.Namespace, argv: list[str]) -> int:
    from dat.cli.parser import parse
    from dat.config.recipes import read
    from dat.config.runs import read_run
    from dat.config.schema import parse_edits
    from dat.config.trust import code_arguments

    config = read(arguments.recipe, parse_edits(arguments.settings), trust=arguments.trust)
    if config.data.unlabelled is None:
        raise ValueError("data.unlabelled: specify the images to label, e.g. rest or a folder")
    if is_worker():
        raise ValueError(
            "selftrain starts its own workers; under a launcher, run dat train, dat label and "
            "dat train one after the other"
        )
    from dat.jobs.selftrain import stages

    out = arguments.out or free_folder(f"{Path(arguments.recipe).stem}-selftrain")
    options = [f"--{name}" for name in ("json", "quiet") if getattr(arguments, name)]
    options += ["--workers", str(arguments.workers)] if arguments.workers else []
    options += ["--trust"] if arguments.trust else []
    commands = stages(
        arguments.recipe, arguments.settings, config.data.unlabelled, arguments.base, out
    )
    for stage in commands:
        if stage[0] == "label":  # with the run of the stage before
            stage += code_arguments(read_run(Path(stage[1]), trust=True)[1])
        overwrite = ["--overwrite"] * (arguments.overwrite and stage[0] == "train")
        command = [*stage, *options, *overwrite]
        print(f"dat {' '.join(stage)}", file=sys.stderr)
        parsed = parse(command)
        code = int(parsed.run(parsed, command))
        if code:
            return code
    return 0
