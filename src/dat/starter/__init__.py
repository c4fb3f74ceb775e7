"""Something to start one's own work from: `dat new NAME`."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

FILES = ("recipe.yaml", "net.py")


def create(folder: Path) -> list[Path]:
    """A folder with a recipe that runs as it is, and the network that it names."""
    if folder.exists():
        raise ValueError(f"{folder} is there already: choose another name")
    if not folder.parent.is_dir():
        raise ValueError(f"{folder}: there is no folder {folder.parent}")
    folder.mkdir()
    written = []
    for name in FILES:
        text = resources.files(__name__).joinpath(name).read_text()
        path = folder / name
        path.write_text(text.replace("NAME", folder.name))
        written.append(path)
    return written
