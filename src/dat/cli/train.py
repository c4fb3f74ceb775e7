"""`dat train`: train a model from a recipe, or resume a run."""

from __future__ import annotations

import argparse
from pathlib import Path

from dat.cli.arguments import Commands, recipe_arguments
from dat.cli.fit import fit, fit_arguments
from dat.cli.workers import free_folder


def add(commands: Commands) -> None:
    train = commands.add(
        "train",
        _train,
        "train a model from a recipe, evaluate it, and write a run folder",
        "  dat train digits --workers 4 attack.steps=5 optimizer.name=lars\n"
        "  dat train digits threat.eps=0.2 seed=1 --out runs/stronger\n"
        "  dat train --resume runs/stronger",
    )
    recipe_arguments(train, optional=True)
    fit_arguments(train, "runs/RECIPE")
    train.add_argument("--resume", type=Path, metavar="RUN", help="resume an interrupted run")


def _train(arguments: argparse.Namespace, argv: list[str]) -> int:
    if arguments.resume:
        return _resume(arguments, argv)
    if not arguments.recipe:
        raise ValueError("specify a recipe (see dat recipes), or --resume and a run folder")
    from dat.config.recipes import read
    from dat.config.schema import parse_edits

    config = read(arguments.recipe, parse_edits(arguments.settings), trust=arguments.trust)
    out = arguments.out or free_folder(Path(arguments.recipe).stem)
    return fit(arguments, argv, config, arguments.recipe, out)


def _resume(arguments: argparse.Namespace, argv: list[str]) -> int:
    """Continue a run with its own settings; only those of communication may change."""
    from dat.config.runs import read_run
    from dat.config.schema import parse_edits
    from dat.config.trust import repeated_code

    settings = [word for word in (arguments.recipe, *arguments.settings) if word]
    unchanged = repeated_code(read_run(arguments.resume, trust=True)[1], settings)
    changed = [word for word in settings if not word.startswith("comm.") and word not in unchanged]
    if changed or arguments.out:
        raise ValueError(
            f"{changed[0] if changed else '--out'}: a resumed run keeps its settings; only comm.* "
            "and --workers can change"
        )
    recipe, config = read_run(arguments.resume, parse_edits(settings), trust=arguments.trust)
    return fit(arguments, argv, config, recipe, arguments.resume, resume=True)
