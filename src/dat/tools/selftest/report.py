"""The report of a self-test: a table on the terminal, and a JSON file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dat import __version__
from dat.core.files import atomic_write
from dat.report import print_json
from dat.tools.selftest.machine import scrub
from dat.tools.selftest.result import FAIL, INFO, PASS, SKIP
from dat.tools.selftest.runner import CheckOutcome, dump

FORMAT = 1
"""Version of the report's format."""
WIDTH = 100
STYLES = {PASS: "green", FAIL: "bold red", SKIP: "yellow", INFO: "cyan"}
STDOUT = "-"


@dataclass
class Report:
    """Collects outcomes; after each, the file is up to date, in case the process dies."""

    machine: dict[str, Any]
    names: Sequence[str]
    """The checks that are to run."""
    seed: int
    file: str | None = None
    """Where to write the JSON: a path, `-` for standard output, or nowhere."""
    outcomes: list[CheckOutcome] = field(default_factory=list)

    def add(self, outcome: CheckOutcome) -> None:
        self.outcomes.append(outcome)
        self.write()

    @property
    def failures(self) -> list[CheckOutcome]:
        return [outcome for outcome in self.outcomes if outcome.result.verdict == FAIL]

    @property
    def complete(self) -> bool:
        return len(self.outcomes) == len(self.names)

    def dump(self) -> dict[str, Any]:
        report = {
            "format": FORMAT,
            "dat": __version__,
            "date": datetime.now(UTC).date().isoformat(),
            "passed": self.complete and not self.failures,
            "next": None if self.complete else self.names[len(self.outcomes)],
            "seconds": round(sum(outcome.seconds for outcome in self.outcomes), 3),
            "seed": self.seed,
            "machine": self.machine,
            "checks": [dump(outcome) for outcome in self.outcomes],
        }
        scrubbed: dict[str, Any] = scrub(report)
        return scrubbed

    def write(self) -> None:
        if self.file not in (None, STDOUT):
            atomic_write(Path(str(self.file)), (json.dumps(self.dump(), indent=2) + "\n").encode())

    def show(self) -> None:
        """Print the table, or the JSON if that goes to standard output."""
        if self.file == STDOUT:
            print_json(self.dump())
            return
        console = Console(highlight=False)
        console.width = min(console.width, WIDTH) if console.is_terminal else WIDTH
        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column("Check", no_wrap=True)
        table.add_column("Verdict", no_wrap=True)
        table.add_column("s", justify="right", no_wrap=True)
        table.add_column("Detail", overflow="fold")
        for check, result, seconds in self.outcomes:
            verdict = Text(result.verdict, STYLES[result.verdict])
            detail = f"{result.detail}; {result.advice}" if result.advice else result.detail
            table.add_row(check.name, verdict, f"{seconds:.1f}", Text(detail))
        console.print(table)
        console.print(f"\n{self._summary()}", markup=False)

    def _summary(self) -> str:
        counts = [
            f"{number} {verdict}"
            for verdict in STYLES
            if (number := sum(outcome.result.verdict == verdict for outcome in self.outcomes))
        ]
        seconds = sum(outcome.seconds for outcome in self.outcomes)
        where = f"{self.machine['workers']} x {self.machine['device']}, {self.machine['backend']}"
        text = f"{', '.join(counts)} on {where} in {seconds:.0f} s."
        if self.file:
            text += f" Report: {self.file}"
        elif self.failures or self.machine["device"] != "cpu":
            text += " Run again with --json FILE and attach the file to an issue."
        return text
