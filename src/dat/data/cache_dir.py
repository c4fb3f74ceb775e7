"""The directory that downloaded datasets are cached in."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """$DAT_DATA, or dat/data in the user's cache directory."""
    if chosen := os.environ.get("DAT_DATA"):
        return Path(chosen)
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "dat" / "data"
