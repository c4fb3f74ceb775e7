"""The site is built without a broken link, and loads nothing from elsewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

pytestmark = pytest.mark.slow
LOADED = re.compile(r"<(?:script|link|img|iframe)[^>]+?(?:src|href)=[\"']((?:https?:)?//[^\"']+)")


def test_the_site_is_whole_and_by_itself(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for page in tmp_path.rglob("*.html"):
        assert LOADED.findall(page.read_text()) == [], page.name
    reference = (tmp_path / "reference.html").read_text()
    assert "Ascent steps k (at least 1)." in reference
    assert "setting(" not in reference
