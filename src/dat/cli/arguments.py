"""What the commands share: how they are added, their common arguments, and argument types."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dat.core.files import WEIGHTS

Command = Callable[[argparse.Namespace, list[str]], int]
"""Runs a command, given the parsed arguments and the raw ones; returns the exit code."""


class Commands:
    """The commands of `dat`, or the sub-commands of a group such as `dat bench`."""

    def __init__(self, parsers: Any) -> None:
        self.parsers = parsers

    def add(
        self, name: str, run: Command, help: str, examples: str, *, json_file: str = ""
    ) -> argparse.ArgumentParser:
        """Add a command with one line of help and some examples. With `json_file`, the help of
        `--json`, that option may name a file; without one it is `-`."""
        command = describe(self._parser(name, help), f"{help[0].upper()}{help[1:]}.", examples)
        if json_file:
            command.add_argument("--json", nargs="?", const="-", metavar="FILE", help=json_file)
        else:
            command.add_argument(
                "--json", action="store_true", help="print JSON instead of a table"
            )
        command.set_defaults(run=run)
        return command

    def group(self, name: str, help: str, about: str) -> Commands:
        """Add a command that has sub-commands, and return them."""
        parser = describe(self._parser(name, help), about, "")
        return Commands(parser.add_subparsers(metavar="COMMAND", required=True))

    def _parser(self, name: str, help: str) -> argparse.ArgumentParser:
        """No abbreviated options: a new option could change what an abbreviation stands for."""
        parser: argparse.ArgumentParser = self.parsers.add_parser(
            name, help=help, allow_abbrev=False
        )
        return parser


def describe(parser: argparse.ArgumentParser, about: str, examples: str) -> argparse.ArgumentParser:
    parser.description = about
    parser.epilog = f"examples:\n{examples}" if examples else None
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    return parser


def recipe_arguments(
    parser: argparse.ArgumentParser, *, optional: bool = False, shown: bool = False
) -> None:
    """The recipe and its settings; with `shown`, also groups and settings to show."""
    text = "a built-in recipe or a .yaml file"
    parser.add_argument("recipe", metavar="RECIPE", nargs="?" if optional else None, help=text)
    parser.add_argument(
        "settings",
        nargs="*",
        default=[],
        metavar="key=value | key" if shown else "key=value",
        help="settings to override, e.g. attack.steps=5"
        + (", and settings or groups to show, e.g. attack" if shown else ""),
    )


def workers_argument(parser: argparse.ArgumentParser, default: int = 1) -> None:
    text = f"worker processes on this machine (default: {default})"
    parser.add_argument("--workers", type=positive_int, metavar="M", help=text)


def subject_arguments(parser: argparse.ArgumentParser) -> None:
    weights_argument(parser)
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="a model instead of a run: timm/NAME, torchvision/NAME, hf/NAME, or "
        "package.module:factory",
    )
    parser.add_argument(
        "--data", metavar="NAME", help="a dataset, an .npz file, or package.module:function"
    )
    trust_argument(parser)


def weights_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--weights", metavar="W", help=f"{', '.join(WEIGHTS)}, or a file (default: the run's best)"
    )


def trust_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trust",
        action="store_true",
        help="import the code (package.module:name) that a run's config names",
    )


def images_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--images",
        type=positive_int,
        metavar="N",
        help="number of test images, class-balanced (default: all)",
    )


def quiet_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quiet", action="store_true", help="hide progress")


def plot_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="save a plot as .png, .svg or .pdf"
    )


def timing_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--repeats",
        type=positive_int,
        default=5,
        metavar="N",
        help="number of repetitions (default: 5)",
    )
    parser.add_argument(
        "--threads",
        type=positive_int,
        metavar="N",
        help="CPU threads per process (default: an equal share of the cores)",
    )
    plot_argument(parser)


def str_list(text: str) -> tuple[str, ...]:
    return tuple(word for word in text.split(",") if word)


def int_list(text: str) -> tuple[int, ...]:
    return tuple(map(positive_int, str_list(text)))


def float_list(text: str) -> tuple[float, ...]:
    try:
        return tuple(map(float, str_list(text)))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: must be comma-separated numbers") from None


def positive_int(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a positive integer")
    return int(text)


def scientific_int(text: str) -> int:
    """A positive integer, also in scientific notation: 25e6."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value.is_integer() or value < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a positive integer")
    return int(value)
