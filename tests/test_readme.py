"""What the README and the pages show is true: tables are the measured ones, the tree is the disk's.

That their code and commands work is seen to in tests/docs.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_tables_are_the_measured_ones() -> None:
    """`python benchmarks/pages.py` puts them there."""
    pages = README + "".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
    found = dict(re.findall(r"<!-- (\w+)\.md -->\n(.*?)<!-- end -->", pages, flags=re.DOTALL))
    results = ROOT / "benchmarks" / "results"
    assert found.keys() == {path.stem for path in results.glob("*.md")}
    for name, block in found.items():
        assert block == (results / f"{name}.md").read_text()
    studies = re.findall(r"<!-- results/(\w+) -->\n(.*?)<!-- end -->", pages, flags=re.DOTALL)
    assert dict(studies).keys() == {path.parent.name for path in ROOT.glob("results/*/table.md")}
    for name, block in studies:
        assert block == (ROOT / "results" / name / "table.md").read_text()


def test_the_costs_on_the_choosing_page_are_the_measured_ones() -> None:
    page = (ROOT / "docs" / "choosing.md").read_text()
    measured = (ROOT / "benchmarks" / "results" / "methods.md").read_text()
    rows = re.findall(
        r"^\| .+? \| (\d+) \| \d+ \| (\d+) \| .+? \| ([\d.]+) ± .*\|$", measured, re.M
    )
    told = re.findall(r"^\| .+? \| (\d+) \| (\d+) \| ([\d.]+) \|$", page, flags=re.MULTILINE)
    assert len(told) == 7
    known = {(gradients, seconds, float(ra)) for gradients, seconds, ra in rows}
    assert {(gradients, seconds, float(ra)) for gradients, seconds, ra in told} <= known


def test_the_tree_is_the_disk() -> None:
    (tree,) = re.findall(r"```\n(src/dat/\n.*?)```", README, flags=re.DOTALL)
    told = set(re.findall(r"^  ([\w.]+)/?  ", tree, flags=re.MULTILINE))
    there = {
        path.name
        for path in (ROOT / "src" / "dat").iterdir()
        if not path.name.startswith("__") and path.suffix in ("", ".py")
    }
    assert told == there
    (listed,) = re.findall(r"^docs/ +(.*?)\Z", tree, flags=re.MULTILINE | re.DOTALL)
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")} - {"index"}
    assert pages <= set(re.findall(r"\w+", listed))
