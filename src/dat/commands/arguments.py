"""What commands have in common: how they are added, the arguments that several take, and kinds."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dat.files import WEIGHTS

Run = Callable[[argparse.Namespace, list[str]], int]
"""A command: its arguments, and the words as they were typed; gives the exit code."""


class Commands:
    """Where commands are added."""

    def __init__(self, parsers: Any) -> None:
        self.parsers = parsers

    def add(self, name: str, run: Run, help: str, examples: str) -> argparse.ArgumentParser:
        """A command, what it is for, and lines to learn from."""
        command = teach(self._parser(name, help), f"{help}.", examples)
        command.add_argument("--json", action="store_true", help="print JSON instead of a table")
        command.set_defaults(run=run)
        return command

    def _parser(self, name: str, help: str) -> argparse.ArgumentParser:
        """Options are typed out: a short form would change its meaning when an option is added."""
        parser: argparse.ArgumentParser = self.parsers.add_parser(
            name, help=help, allow_abbrev=False
        )
        return parser

    def group(self, name: str, help: str, about: str) -> Commands:
        """Commands of two words."""
        parser = teach(self._parser(name, help), about, "")
        return Commands(parser.add_subparsers(metavar="WHAT", required=True))


def teach(parser: argparse.ArgumentParser, about: str, examples: str) -> argparse.ArgumentParser:
    parser.description = about
    parser.epilog = f"examples:\n{examples}" if examples else None
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    return parser


def recipe_arguments(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    text = "a built-in name or a .yaml file"
    parser.add_argument("recipe", metavar="RECIPE", nargs="?" if optional else None, help=text)
    settings_argument(parser)


def settings_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "settings", nargs="*", default=[], metavar="key=value", help="settings, e.g. attack.steps=5"
    )


def workers_argument(parser: argparse.ArgumentParser, usual: int = 1) -> None:
    text = f"worker processes on this machine ({usual})"
    parser.add_argument("--workers", type=positive, metavar="M", help=text)


def subject_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--weights", metavar="W", help=f"{', '.join(WEIGHTS)}, or a file (a run's best)"
    )
    parser.add_argument("--model", metavar="M:F", help="instead of a run: package.module:factory")
    parser.add_argument("--data", metavar="NAME", help="a set, an .npz file, or package.module:f")


def images_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--images", type=positive, metavar="N", help="N test images, alike of every class (all)"
    )


def quiet_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quiet", action="store_true", help="show no progress")


def plot_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw it: .png, .svg or .pdf")


def measuring_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=positive, default=5, metavar="N", help="(5)")
    parser.add_argument("--threads", type=positive, metavar="N", help="CPU threads a process")
    plot_argument(parser)


def words_of(text: str) -> tuple[str, ...]:
    return tuple(word for word in text.split(",") if word)


def counts(text: str) -> tuple[int, ...]:
    return tuple(map(positive, words_of(text)))


def numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(map(float, words_of(text)))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: must be numbers, with commas") from None


def count(text: str) -> int:
    """A whole number that may be large: 25e6."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value.is_integer() or value < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number, at least 1")
    return int(value)


def positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number, at least 1")
    return int(text)
