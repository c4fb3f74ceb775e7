"""`dat profile`: where the time and memory of a training step go."""

from __future__ import annotations

import argparse
from pathlib import Path

from dat.cli.arguments import (
    Commands,
    positive_int,
    recipe_arguments,
    trust_argument,
    workers_argument,
)
from dat.cli.workers import starts_workers
from dat.jobs.launch import launch


def add(commands: Commands) -> None:
    profile = commands.add(
        "profile",
        _profile,
        "profile the time and memory of a recipe's training steps",
        "  dat profile digits\n"
        "  dat profile digits attack.steps=5 --workers 2 --steps 30\n"
        "  dat profile digits --trace trace.json     view it in ui.perfetto.dev, chrome://tracing",
    )
    recipe_arguments(profile)
    workers_argument(profile)
    trust_argument(profile)
    profile.add_argument(
        "--steps", type=positive_int, default=10, metavar="N", help="timed steps (default: 10)"
    )
    profile.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="save a trace of two further steps as .json or .json.gz",
    )


def _profile(arguments: argparse.Namespace, argv: list[str]) -> int:
    from dat.config.recipes import read
    from dat.config.schema import parse_edits

    config = read(arguments.recipe, parse_edits(arguments.settings), trust=arguments.trust)
    _check_trace(arguments.trace)
    if starts_workers(arguments):
        return launch(arguments.workers, argv)
    from dat.report import show_profile
    from dat.tools.profiling import profile_steps

    profile = profile_steps(config, arguments.recipe, steps=arguments.steps, file=arguments.trace)
    if profile is not None:
        show_profile(profile, as_json=arguments.json)
    return 0


def _check_trace(file: Path | None) -> None:
    if file is None:
        return
    if not file.name.endswith((".json", ".json.gz")):
        raise ValueError(f"--trace {file}: must end in .json or .json.gz")
    if not file.parent.is_dir():
        raise ValueError(f"--trace {file}: folder {file.parent} does not exist")
