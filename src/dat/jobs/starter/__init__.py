"""A template for a user's own recipe and network: `dat new NAME`."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

FILES = ("recipe.yaml", "net.py")


def create(folder: Path) -> list[Path]:
    """Create a folder with a working recipe and the network that it uses."""
    if folder.exists():
        raise ValueError(f"{folder} already exists: choose another name")
    if not folder.parent.is_dir():
        raise ValueError(f"{folder}: folder {folder.parent} does not exist")
    folder.mkdir()
    written = []
    for name in FILES:
        text = resources.files(__name__).joinpath(name).read_text()
        path = folder / name
        path.write_text(text.replace("NAME", folder.name))
        written.append(path)
    return written
