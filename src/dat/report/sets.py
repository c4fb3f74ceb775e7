"""Datasets as tables and images."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
from rich.progress import Progress as Bar

from dat.report.tables import print_table

if TYPE_CHECKING:
    from torch import Tensor

SHOWN = 20
"""Maximum number of classes listed one by one."""


@contextmanager
def bytes_bar(title: str, *, show: bool) -> Iterator[Callable[[int, int | None], None]]:
    """A progress bar for a download; yields a callback that takes the bytes received and total."""
    console = Console(stderr=True, quiet=not show)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    speed = TransferSpeedColumn()
    with Bar(*columns, speed, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def show_data(dataset: dict[str, Any]) -> None:
    """A dataset, class by class."""
    channels, height, width = dataset["shape"]
    print(
        f"{dataset['name']}: {dataset['train']:,} training and {dataset['test']:,} test images of "
        f"{height} x {width} pixels, {channels} channel{'s' * (channels > 1)}, "
        f"{dataset['classes']} classes ({dataset['stored']})"
    )
    print(f"mean {_row(dataset['mean'])}, standard deviation {_row(dataset['std'])}, per channel\n")
    rows = [[row["class"], f"{row['train']:,}", f"{row['test']:,}"] for row in dataset["counts"]]
    hidden = rows[SHOWN:]
    print_table(["Class", "Training", "Test"], rows[:SHOWN])
    if hidden:
        print(f"... and {len(hidden)} more classes")
    if dataset["parts"]:
        print(f"\nparts of {', '.join(f'{size:,}' for size in dataset['parts'])} images")
    for reason in dataset["broken"]:
        print(f"broken: {reason}")
    if dataset["checked"] and not dataset["broken"]:
        print("\nno errors: all files are readable and valid")


def _row(values: list[float]) -> str:
    return " ".join(f"{value:.3f}" for value in values)


def show_parts(report: dict[str, Any]) -> None:
    """The images in each partition."""
    classes = len(report["parts"][0]["counts"])
    rows = []
    for partition in report["parts"]:
        counts = partition["counts"]
        cells = [f"{count:,}" for count in counts] if classes <= SHOWN else []
        filled = str(sum(count > 0 for count in counts))
        rows.append([partition["folder"], f"{partition['images']:,}", filled, *cells])
    headers = ["Part", "Images", "Classes", *(map(str, range(classes)) if classes <= SHOWN else ())]
    print_table(headers, rows)
    print(f"\n{report['out']}: copy each part, together with the folder test, to its node")


def save_picture(image: Tensor, file: Path) -> None:
    """Save an image with pixels in [0, 1]; other than three channels are averaged."""
    from PIL import Image

    pixels = (image.clamp(0, 1) * 255).round().byte()
    if len(pixels) == 3:
        Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(file)
    else:
        Image.fromarray(pixels.float().mean(0).byte().numpy()).save(file)


def image_grid(file: Path, rows: Mapping[str, Tensor]) -> None:
    """A grid of images, in named rows."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = max(map(len, rows.values()))
    figure, axes = pyplot.subplots(
        len(rows), columns, figsize=(columns * 0.8 + 1.2, len(rows) * 0.8), squeeze=False
    )
    for line, (name, images) in zip(axes, rows.items(), strict=True):
        for axis in line:
            axis.axis("off")
        for axis, image in zip(line, images, strict=False):
            axis.imshow(image.permute(1, 2, 0).squeeze(2).numpy(), cmap="gray", vmin=0, vmax=1)
        line[0].text(-0.15, 0.5, name, transform=line[0].transAxes, ha="right", va="center")
    figure.savefig(file, bbox_inches="tight", dpi=120)
    pyplot.close(figure)
