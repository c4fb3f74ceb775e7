"""What data sets look like."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
from rich.progress import Progress as Bar
from torch import Tensor

from dat.report.tables import print_table

SHOWN = 20
"""Classes that get a line of their own."""


@contextmanager
def bytes_bar(title: str, *, show: bool) -> Iterator[Callable[[int, int | None], None]]:
    """A bar over a download: call what is given with the bytes that came and those there are."""
    console = Console(stderr=True, quiet=not show)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    speed = TransferSpeedColumn()
    with Bar(*columns, speed, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def show_data(found: dict[str, Any]) -> None:
    """A set, class by class."""
    channels, height, width = found["shape"]
    print(
        f"{found['name']}: {found['train']:,} training and {found['test']:,} test images of "
        f"{height} x {width} pixels, {channels} channel{'s' * (channels > 1)}, "
        f"{found['classes']} classes ({found['stored']})"
    )
    print(f"mean {_row(found['mean'])}, standard deviation {_row(found['std'])}, by channel\n")
    rows = [[it["class"], f"{it['train']:,}", f"{it['test']:,}"] for it in found["counts"]]
    hidden = rows[SHOWN:]
    print_table(["Class", "Training", "Test"], rows[:SHOWN])
    if hidden:
        print(f"... and {len(hidden)} classes more")
    if found["parts"]:
        print(f"\nparts of {', '.join(f'{size:,}' for size in found['parts'])} images")
    for reason in found["broken"]:
        print(f"broken: {reason}")
    if found["checked"] and not found["broken"]:
        print("\nall of it can be read and is what it should be")


def _row(values: list[float]) -> str:
    return " ".join(f"{value:.3f}" for value in values)


def show_parts(found: dict[str, Any]) -> None:
    """What each part got."""
    classes = len(found["parts"][0]["counts"])
    rows = []
    for it in found["parts"]:
        counts = it["counts"]
        cells = [f"{count:,}" for count in counts] if classes <= SHOWN else []
        filled = str(sum(count > 0 for count in counts))
        rows.append([it["folder"], f"{it['images']:,}", filled, *cells])
    headers = ["Part", "Images", "Classes", *(map(str, range(classes)) if classes <= SHOWN else ())]
    print_table(headers, rows)
    print(f"\n{found['out']}: copy each part, and the folder test, to its node")


def save_picture(image: Tensor, file: Path) -> None:
    """An image with pixels in [0, 1]; of other than one or three channels, their mean."""
    from PIL import Image

    pixels = (image.clamp(0, 1) * 255).round().byte()
    if len(pixels) == 3:
        Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(file)
    else:
        Image.fromarray(pixels.float().mean(0).byte().numpy()).save(file)


def image_grid(file: Path, rows: Mapping[str, Tensor]) -> None:
    """Images in rows with names, as a picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    across = max(map(len, rows.values()))
    figure, axes = pyplot.subplots(
        len(rows), across, figsize=(across * 0.8 + 1.2, len(rows) * 0.8), squeeze=False
    )
    for line, (name, images) in zip(axes, rows.items(), strict=True):
        for axis in line:
            axis.axis("off")
        for axis, image in zip(line, images, strict=False):
            axis.imshow(image.permute(1, 2, 0).squeeze(2).numpy(), cmap="gray", vmin=0, vmax=1)
        line[0].text(-0.15, 0.5, name, transform=line[0].transAxes, ha="right", va="center")
    figure.savefig(file, bbox_inches="tight", dpi=120)
    pyplot.close(figure)
