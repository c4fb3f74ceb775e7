"""Pictures of measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

FORMATS = (".png", ".svg", ".pdf")


def check_picture(path: Path) -> None:
    """Refuse a file that no picture can be written to, before the work begins."""
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"{path}: a plot is written to a file that ends in {', '.join(FORMATS)}")
    if not path.parent.is_dir():
        raise ValueError(f"{path}: there is no folder {path.parent}")


def bar_chart(
    path: Path,
    labels: Sequence[str],
    series: Mapping[str, Sequence[float]],
    *,
    title: str,
    axis: str,
) -> None:
    """Horizontal bars, one group a label, with the value at each bar's end."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    height = 0.8 / len(series)
    figure, axes = plt.subplots(figsize=(8, 1.2 + 0.3 * len(labels) * len(series)))
    for number, (name, values) in enumerate(series.items()):
        shift = (number - (len(series) - 1) / 2) * height
        bars = axes.barh(
            [place + shift for place in range(len(labels))], values, height, label=name
        )
        axes.bar_label(bars, fmt="%.3g", padding=3)
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set_xlabel(axis)
    axes.set_title(title)
    axes.margins(x=0.12)
    axes.spines[["top", "right"]].set_visible(False)
    if len(series) > 1:
        axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)
