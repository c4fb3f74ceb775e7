"""`dat doctor`: what this machine has for training."""

from __future__ import annotations

import argparse
import sys

from dat.cli.arguments import Commands


def add(commands: Commands) -> None:
    commands.add(
        "doctor",
        _doctor,
        "check what this machine has for training, and what is missing",
        "  dat doctor\n  dat doctor --json",
    )


def _doctor(arguments: argparse.Namespace, argv: list[str]) -> int:
    from dat.jobs.doctor import BAD, check_machine
    from dat.report import print_json, print_table

    findings = check_machine()
    if arguments.json:
        print_json([finding._asdict() for finding in findings])
    else:
        rows = [
            [finding.area, finding.what, finding.found, finding.state, finding.advice]
            for finding in findings
        ]
        print_table(["Area", "Check", "Found", "State", "Advice"], rows)
    errors = [finding for finding in findings if finding.state == BAD]
    for error in errors:
        print(f"error: {error.what}: {error.found}; {error.advice}", file=sys.stderr)
    return 1 if errors else 0
