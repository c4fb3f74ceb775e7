"""What is packed is what there is: a file that is left out would be missed only by users."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.slow
LEFT_OUT = {".pyc", ".so", ".o"}


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The names in a source distribution, made from a copy."""
    folder = tmp_path_factory.mktemp("packing")
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("*.egg-info"))
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, folder)
    make = "from setuptools.build_meta import build_sdist; print(build_sdist('dist'))"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", make], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    with tarfile.open(folder / "dist" / done.stdout.split()[-1]) as archive:
        return {name.partition("/")[2] for name in archive.getnames()}


def test_all_of_the_source_is_packed(packed: set[str]) -> None:
    """Without a header the kernels would not be built, and torch would quietly do their work."""
    source = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "src" / "dat").rglob("*")
        if path.is_file() and path.suffix not in LEFT_OUT
    }
    assert {"src/dat/py.typed", "src/dat/kernels/convolve/common.h"} <= source
    assert source <= packed


def test_licence_and_citation_are_packed(packed: set[str]) -> None:
    assert {"LICENSE", "CITATION.cff", "CHANGELOG.md", "README.md", "pyproject.toml"} <= packed
