"""`dat selftest`: check that DAT computes correctly on this hardware."""

from __future__ import annotations

import argparse

from dat.cli.arguments import Commands, positive_int, str_list, workers_argument
from dat.cli.workers import starts_workers
from dat.core.devices import DEVICES
from dat.jobs.launch import launch


def add(commands: Commands) -> None:
    command = commands.add(
        "selftest",
        _selftest,
        "check that kernels, exchanges, attacks and resumed runs are correct on this hardware",
        "  dat selftest\n"
        "  dat selftest --device cuda --workers 4 --json selftest.json     for an issue\n"
        "  dat selftest --list\n"
        "  dat selftest --only protocols,order --workers 2\n"
        "  torchrun --nnodes 2 --nproc-per-node 8 ... -m dat selftest --json selftest.json",
        json_file="write the report as JSON to FILE, or print it instead of the table",
    )
    workers_argument(command)
    command.add_argument(
        "--device", choices=DEVICES, default="auto", help="where to compute (default: auto)"
    )
    command.add_argument(
        "--only", type=str_list, metavar="NAME[,NAME]", help="run only these checks"
    )
    command.add_argument("--list", action="store_true", help="list the checks")
    command.add_argument(
        "--timeout",
        type=positive_int,
        default=60,
        metavar="S",
        help="timeout of a collective in seconds; that of a check is twice as long (default: 60)",
    )


def _selftest(arguments: argparse.Namespace, argv: list[str]) -> int:
    from dat.tools.selftest.registry import select

    checks = select(arguments.only)
    if arguments.list:
        from dat.report import print_json, print_table

        rows = [[check.name, check.what] for check in checks]
        if arguments.json:
            print_json([{"name": name, "what": what} for name, what in rows])
        else:
            print_table(["Check", "What it tests"], rows)
        return 0
    _check_file(arguments.json)
    if starts_workers(arguments):
        return launch(arguments.workers, argv)
    from dat.tools.selftest.job import selftest

    succeeded = selftest(
        checks, device=arguments.device, timeout=arguments.timeout, file=arguments.json
    )
    return 0 if succeeded else 1


def _check_file(file: str | None) -> None:
    """Refuse a file that cannot be written, before the minutes that it takes."""
    from pathlib import Path

    if file not in (None, "-") and not Path(str(file)).parent.is_dir():
        raise ValueError(f"--json {file}: folder {Path(str(file)).parent} does not exist")
