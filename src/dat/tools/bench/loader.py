"""`dat bench loader`: cropped and flipped batches, compared with torch's DataLoader.

The dataset of the DataLoader takes one image at a time: pads it by 4, crops, flips at random,
converts it to floats. Ours draws from the random streams of the samples, the DataLoader from
torch's generator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from dat.core.rng import Streams
from dat.data import Augmentation, ImageData, Mix, PartitionPlan, as_floats, load, make_batches
from dat.tools.bench.baselines import load_baselines
from dat.tools.bench.limits import describe_machine, measure_limits, use_threads
from dat.tools.bench.timing import Comparison, Turn, take_turns
from dat.tools.bench.workload import Workload

CPU = torch.device("cpu")
PADDING = 4
IMAGES = 10_000
"""Random images, if no dataset is named."""
BATCHES = 40
"""Batches per turn: many more than worker processes prefetch while the others have their turns."""
Batches = Iterator[tuple[Tensor, Tensor]]
MakeBatches = Callable[[ImageData, int], Batches]


def bench_loader(
    against: Sequence[str] = ("dataloader", "dataloader-2"),
    *,
    batch: int = 128,
    data: str | None = None,
    images: int = IMAGES,
    repeats: int = 5,
    seconds: float = 0.0,
    threads: int | None = None,
) -> Comparison:
    """Float batches with labels, from a dataset or from random images of CIFAR's size."""
    use_threads(threads)
    implementations: dict[str, MakeBatches] = OURS | load_baselines("loader", against)
    source = load(data).train if data else Workload().data(images)
    turns = {name: _turn(make(source, batch)) for name, make in implementations.items()}
    machine = describe_machine(limits := measure_limits())
    timings = take_turns(turns, repeats=repeats, seconds=seconds, title="loading")
    pixels, size = BATCHES * batch * torch.Size(source.shape).numel(), source.images.dtype.itemsize
    moved = float(pixels * (size + 4))
    return Comparison(
        bench="loader",
        timings=timings,
        machine=machine,
        images=BATCHES * batch,
        least=dict.fromkeys(turns, moved / limits.bandwidth),
        limit="images are read once and floats written once, as fast as a copy",
        traffic=dict.fromkeys(turns, moved),
        settings={"batch": batch, "data": data or f"{images} random images"},
    )


def _turn(batches: Batches) -> Turn:
    def run() -> None:
        for _ in range(BATCHES):
            next(batches)

    return run


def _ours(data: ImageData, batch: int) -> Batches:
    """Batches as a worker draws them, epoch after epoch."""
    batches = make_batches(data, None, Mix(), PartitionPlan(batch=batch, workers=1, rank=0, seed=0))
    augment = Augmentation(kind="crop-flip")
    for number in count():
        epoch, step = divmod(number, batches.steps)
        x, y, index, _ = batches.draw(epoch, step, CPU)
        yield as_floats(augment(x, Streams.of(0, "augment", epoch, step, index=index))), y


OURS: dict[str, MakeBatches] = {"ours": _ours}


class PlainDataset(Dataset[tuple[Tensor, int]]):
    """A typical hand-written dataset."""

    def __init__(self, data: ImageData) -> None:
        self.images, self.labels = data.tensor(), data.labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        image = self.images[row]
        _, height, width = image.shape
        padded = F.pad(image, (PADDING,) * 4)
        up, left = torch.randint(0, 2 * PADDING + 1, (2,)).tolist()
        image = padded[:, up : up + height, left : left + width]
        if torch.rand(()) < 0.5:
            image = image.flip(2)
        return image.float().div(255), int(self.labels[row])


def dataloader(data: ImageData, batch: int, processes: int = 0) -> Batches:
    """torch's DataLoader, epoch after epoch, with persistent worker processes."""
    loader = DataLoader(
        PlainDataset(data),
        batch,
        shuffle=True,
        drop_last=True,
        num_workers=processes,
        persistent_workers=processes > 0,
    )
    while True:
        yield from loader


def dataloader_processes(data: ImageData, batch: int) -> Batches:
    return dataloader(data, batch, processes=2)
