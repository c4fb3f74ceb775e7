"""The datasets known by name, and which of them are available."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dat.core.mistakes import closest, did_you_mean
from dat.data.catalog import CATALOG
from dat.data.decode import NAMES
from dat.data.fetch import cached

BUILT_IN: dict[str, dict[str, Any]] = {
    "digits": {
        "images": "1,437 + 360",
        "classes": 10,
        "about": "scikit-learn's handwritten digits, 8 x 8",
    },
}
"""What `dat data list` shows of `sources.SOURCES` without loading them."""
PICKLES = (".pkl", ".pickle", ".pt", ".pth", ".joblib")


def standard_sets() -> list[dict[str, Any]]:
    """The datasets that can be used by name."""
    rows = [{"name": name, "here": "built in"} | about for name, about in BUILT_IN.items()]
    for name, published in CATALOG.items():
        folder = cached(name)
        rows.append(
            {
                "name": name,
                "images": f"{sum(published.train):,} + {sum(published.test):,}",
                "classes": len(published.classes),
                "here": str(folder) if folder else "-",
                "about": published.about,
            }
        )
    return rows


def is_known(name: str) -> bool:
    """Whether this is the name of a dataset, even if a file of that name exists."""
    return name in BUILT_IN or name in CATALOG


def known_spelling(name: str) -> str | None:
    """The dataset of this name but for case and punctuation: that of CIFAR-10 is cifar10."""
    return closest(name, (*BUILT_IN, *CATALOG), cutoff=1)


def check_name(name: str) -> None:
    """Raise if this is neither an available dataset nor a file, a folder or a function."""
    path = Path(name)
    if name in CATALOG and cached(name) is None:
        raise ValueError(f"data.name = {name}: not downloaded yet; run: dat data fetch {name}")
    if is_known(name) or path.is_dir() or (name.startswith("hf/") and len(name) > 3):
        return
    if path.suffix in PICKLES:
        raise ValueError(
            f"data.name = {name}: pickles are never read, as they can run arbitrary code; save "
            f"the arrays {', '.join(NAMES)} with numpy.savez"
        )
    if name.endswith(".npz") or path.suffix == ".parquet" or ":" in name:
        return
    if path.is_absolute() or "/" in name:
        raise ValueError(f"data.name = {name}: no such file or folder")
    raise ValueError(
        f"data.name = {name!r}: unknown{did_you_mean(name, (*BUILT_IN, *CATALOG))} "
        "(or an .npz file, a folder of pictures, or package.module:function)"
    )
