"""What MkDocs needs to be told: pages, pictures and programs that lie outside of docs/.

Links in the pages are written for whoever reads them as files (`../benchmarks/results/x.png`); the
site has these files at the same names beside its pages.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
PAGES = {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}
"""A page's name in the site, and the file at the root that it is."""
BESIDE = (
    *("benchmarks/results/*.png", "results/*/plot.png", "results/*/plot.svg"),
    "examples/*.py",
)
"""Pictures and programs that pages link to."""
BENCHMARKS = "benchmarks/README.md"


def on_files(files: Files, config: Any) -> Files:
    outside = dict(PAGES) | {BENCHMARKS: BENCHMARKS}
    for pattern in BESIDE:
        found = (path.relative_to(ROOT).as_posix() for path in ROOT.glob(pattern))
        outside |= {path: path for path in found}
    for name, path in outside.items():
        files.append(File.generated(config, name, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    name = page.file.src_uri
    if name in PAGES:  # at the root a link to a page goes through docs/
        text = re.sub(r"\]\(docs/", "](", markdown)
        for site, path in PAGES.items():
            text = text.replace(f"]({path})", f"]({site})")
        return text
    if name == BENCHMARKS:
        return re.sub(r"\]\(\.\./docs/", "](../", markdown)
    return re.sub(r"\]\(\.\./", "](", markdown)
