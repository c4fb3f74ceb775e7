"""Batches of CIFAR-10, cropped and flipped: ours beside torch's DataLoader, and beside training.

    dat data fetch cifar10
    python benchmarks/loader.py [--batch 128] [--repeats 7]

The DataLoader's set takes an image at a time: pads by 4, crops, flips by a coin, makes floats. Both
deliver float batches with labels; ours draws from the samples' own streams, the DataLoader from
torch's generator. They take turns, and the median counts. The last rows are what a training step
consumes, the fastest first: a clean forward and backward pass of small networks.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import torch
from runs import save, table
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from dat.data import Augmentation, Dealing, ImageData, Mix, as_floats, load, supply
from dat.models import build_model
from dat.rng import Draws

CPU = torch.device("cpu")


class Plain(Dataset[tuple[Tensor, int]]):
    """What most people write."""

    def __init__(self, data: ImageData) -> None:
        self.images, self.labels = data.tensor(), data.labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        padded = F.pad(self.images[row], (4, 4, 4, 4))
        up, left = torch.randint(0, 9, (2,)).tolist()
        image = padded[:, up : up + 32, left : left + 32]
        if torch.rand(()) < 0.5:
            image = image.flip(2)
        return image.float().div(255), int(self.labels[row])


def ours(data: ImageData, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
    drawn = supply(data, None, Mix(), Dealing(batch=batch, workers=1, place=0, seed=0))
    change = Augmentation(kind="crop-flip")
    for step in range(drawn.steps):
        x, y, index, _ = drawn.draw(0, step, CPU)
        yield as_floats(change(x, Draws.of(0, "augment", 0, step, index=index))), y


def rate(batches: Iterator[tuple[Tensor, Tensor]], seconds: float) -> float:
    """Images a second; the first batch, for which processes are started, does not count."""
    next(batches)
    count, start = 0, time.perf_counter()
    for _, y in batches:
        count += len(y)
        if time.perf_counter() - start > seconds:
            break
    return count / (time.perf_counter() - start)


def step_rate(model: torch.nn.Module, batch: int) -> float:
    """Images a second through a forward and a backward pass."""
    x, y = torch.rand(batch, 3, 32, 32), torch.zeros(batch, dtype=torch.int64)
    times = []
    for _ in range(6):
        start = time.perf_counter()
        F.cross_entropy(model(x), y).backward()
        times.append(time.perf_counter() - start)
    return batch / statistics.median(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1.5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    data, batch = load("cifar10").train, arguments.batch
    plain = Plain(data)

    def theirs(workers: int) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(DataLoader(plain, batch, shuffle=True, num_workers=workers))

    ways: dict[str, Callable[[], Iterator[tuple[Tensor, Tensor]]]] = {
        f"ours, batches of {batch}": lambda: ours(data, batch),
        "ours, batches of 1,024": lambda: ours(data, 1024),
        "DataLoader, in the process": lambda: theirs(0),
        "DataLoader, 2 processes": lambda: theirs(2),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(arguments.repeats):
        for name, make in ways.items():
            batches = islice(make(), 10_000)
            found[name].append(rate(batches, arguments.seconds))
    rates = {name: statistics.median(values) for name, values in found.items()}
    for name, width in (("cnn", 8), ("cnn", 32), ("preact-resnet18", 16)):
        model = build_model(name, 10, width=width)
        rates[f"training step, {name} of width {width}"] = step_rate(model, batch)
    own = rates[f"ours, batches of {batch}"]
    rows = [[name, f"{value:,.0f}", f"{own / value:.1f}"] for name, value in rates.items()]
    save(Path(__file__), rates, table(["Way", "Images/s", "Ours is so many times as fast"], rows))


if __name__ == "__main__":
    main()
