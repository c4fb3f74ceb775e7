"""Put the measured tables into the pages that show them: README.md and docs/.

    python benchmarks/pages.py

`<!-- bits.md -->` ... `<!-- end -->` is filled with benchmarks/results/bits.md, and
`<!-- results/table1 -->` ... `<!-- end -->` with results/table1/table.md.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PLACE = re.compile(r"<!-- (?:(\w+)\.md|results/(\w+)) -->\n(.*?)<!-- end -->", re.DOTALL)


def table(place: re.Match[str]) -> Path:
    """The file that belongs there."""
    if place[1]:
        return ROOT / "benchmarks" / "results" / f"{place[1]}.md"
    return ROOT / "results" / place[2] / "table.md"


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def filled(place: re.Match[str]) -> str:
    first = place[0].partition("\n")[0]
    return f"{first}\n{table(place).read_text()}<!-- end -->"


def main() -> None:
    for page in pages():
        text = page.read_text()
        page.write_text(PLACE.sub(filled, text))


if __name__ == "__main__":
    main()
