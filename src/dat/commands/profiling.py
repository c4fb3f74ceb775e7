"""The command that shows where a step's time goes."""

from __future__ import annotations

import argparse
from pathlib import Path

from dat.commands.arguments import Commands, positive, recipe_arguments, workers_argument
from dat.commands.starting import starts_workers
from dat.launch import launch


def add(commands: Commands) -> None:
    profile = commands.add(
        "profile",
        _profile,
        "where the time and the memory of a recipe's steps go",
        "  dat profile digits\n"
        "  dat profile digits attack.steps=5 --workers 2 --steps 30\n"
        "  dat profile digits --trace trace.json     open it in ui.perfetto.dev, chrome://tracing",
    )
    recipe_arguments(profile)
    workers_argument(profile)
    profile.add_argument("--steps", type=positive, default=10, metavar="N", help="timed steps (10)")
    profile.add_argument(
        "--trace", type=Path, metavar="FILE", help="a trace of two more steps: .json, .json.gz"
    )


def _profile(arguments: argparse.Namespace, words: list[str]) -> int:
    from dat.config import parse_edits
    from dat.recipes import read

    config = read(arguments.recipe, parse_edits(arguments.settings))
    _check_trace(arguments.trace)
    if starts_workers(arguments):
        return launch(arguments.workers, words)
    from dat.profiling import profile_steps
    from dat.report import show_profile

    found = profile_steps(config, arguments.recipe, steps=arguments.steps, file=arguments.trace)
    if found is not None:
        show_profile(found, as_json=arguments.json)
    return 0


def _check_trace(file: Path | None) -> None:
    if file is None:
        return
    if not file.name.endswith((".json", ".json.gz")):
        raise ValueError(f"--trace {file}: must end in .json or .json.gz")
    if not file.parent.is_dir():
        raise ValueError(f"--trace {file}: there is no folder {file.parent}")
