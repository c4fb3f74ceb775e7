"""The comment above a recipe: its command, hardware, cost, result and source."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields

FIELD = re.compile(r"# ([A-Z]\w+) +(\S.*)")
FIGURE = re.compile(r"\b(TA|RA|AA|CA)(?: \([^)]+\))? (\d+\.\d+)")
"""An accuracy in percent, such as `RA (PGD-10) 53.11`."""
NOT_RUN = "not run"


@dataclass(frozen=True, kw_only=True)
class Header:
    """What a recipe states about itself. The cost and the result begin with what tables show."""

    command: str
    hardware: str
    cost: str
    result: str
    source: str = ""
    """Where the settings and published figures come from; empty: our own."""
    differs: str = ""
    """What differs from the source, and what cannot be set."""

    @classmethod
    def parse(cls, text: str) -> Header:
        """Read the comment at the start of a recipe."""
        values = {field.name: "" for field in fields(cls)}
        name = ""
        for line in text.splitlines():
            if not line.startswith("#"):
                break
            match = FIELD.fullmatch(line)
            name, value = (match[1].lower(), match[2]) if match else (name, line[1:].strip())
            if name not in values:
                raise ValueError(f"header: {line!r} belongs to no field")
            separator = "\n" if name == "command" else " "
            values[name] += (separator if values[name] else "") + value
        return cls(**values)

    @property
    def figures(self) -> Mapping[str, float]:
        """The accuracies at the start of the result, by name: ta, ra, aa, ca."""
        first = self.result.partition(";")[0]
        if first.startswith(NOT_RUN):
            return {}
        return {name.lower(): float(value) for name, value in FIGURE.findall(first)}

    @property
    def is_own(self) -> bool:
        """Whether the figures are our measurement; otherwise they are published ones."""
        return NOT_RUN not in self.result

    @property
    def brief_cost(self) -> str:
        """The total: `10 GPU h`, `40 seconds`, or `-` if nobody has stated one."""
        total = re.split("[,;] ", self.cost, maxsplit=1)[0]
        return total if total[:1].isdigit() else "-"
