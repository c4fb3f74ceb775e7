"""An unrelated package of the same name."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata

import pytest

from dat.core.imports import name_clash

Installed = Mapping[str, str]


@pytest.mark.parametrize(
    ("installed", "clashes"),
    [
        ({"dat-robust": "ours"}, False),
        ({"dat-robust": "ours", "dat": "ours"}, False),  # an older version of this project
        ({"dat-robust": "ours", "dat": "theirs"}, True),
        ({"dat": "theirs"}, False),  # ours runs from its sources, nothing is overwritten
    ],
)
def test_another_project_called_dat_is_recognized(
    monkeypatch: pytest.MonkeyPatch, installed: Installed, clashes: bool
) -> None:
    def read(name: str) -> Mapping[str, str]:
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return {"Summary": installed[name], "Version": "1.0"}

    monkeypatch.setattr(metadata, "metadata", read)
    message = name_clash()
    assert bool(message) == clashes
    if clashes:
        assert "pip uninstall dat, then" in message and "dat 1.0 is another project" in message
