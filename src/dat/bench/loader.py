"""`dat bench loader`: cropped and flipped batches, ours beside torch's DataLoader.

The DataLoader's set takes an image at a time: pads by 4, crops, flips by a coin, makes floats. Ours
draws from the samples' own streams, the DataLoader from torch's generator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from dat.bench.limits import describe_machine, measure_limits, use_threads
from dat.bench.peers import choose
from dat.bench.race import Job, Race, take_turns
from dat.bench.scene import Scene
from dat.data import Augmentation, Dealing, ImageData, Mix, as_floats, load, supply
from dat.rng import Draws

CPU = torch.device("cpu")
PADDING = 4
IMAGES = 10_000
"""In the set, where none is named."""
TURN = 40
"""Batches in a turn: many beside the few that processes have prepared in the others' turns."""
Batches = Iterator[tuple[Tensor, Tensor]]


def bench_loader(
    against: Sequence[str] = ("dataloader", "dataloader-2"),
    *,
    batch: int = 128,
    data: str | None = None,
    images: int = IMAGES,
    repeats: int = 5,
    seconds: float = 0.0,
    threads: int | None = None,
) -> Race:
    """Float batches with labels, from a set by its name or from random images of CIFAR's size."""
    use_threads(threads)
    makers = {"ours": ours} | choose(against, PEERS)
    source = load(data).train if data else Scene().data(images)
    jobs = {name: _turn(make(source, batch)) for name, make in makers.items()}
    machine = describe_machine(limits := measure_limits())
    timings = take_turns(jobs, repeats=repeats, seconds=seconds, title="loading")
    pixels, size = TURN * batch * torch.Size(source.shape).numel(), source.images.dtype.itemsize
    moved = float(pixels * (size + 4))
    return Race(
        bench="loader",
        timings=timings,
        machine=machine,
        images=TURN * batch,
        least=dict.fromkeys(jobs, moved / limits.bandwidth),
        limit="images read once and floats written once, as fast as a copy",
        traffic=dict.fromkeys(jobs, moved),
        settings={"batch": batch, "data": data or f"{images} random images"},
    )


def _turn(batches: Batches) -> Job:
    def run() -> None:
        for _ in range(TURN):
            next(batches)

    return run


def ours(data: ImageData, batch: int) -> Batches:
    """As a worker draws them, epoch after epoch."""
    drawn = supply(data, None, Mix(), Dealing(batch=batch, workers=1, place=0, seed=0))
    change = Augmentation(kind="crop-flip")
    for turn in count():
        epoch, step = divmod(turn, drawn.steps)
        x, y, index, _ = drawn.draw(epoch, step, CPU)
        yield as_floats(change(x, Draws.of(0, "augment", epoch, step, index=index))), y


class Plain(Dataset[tuple[Tensor, int]]):
    """What most people write."""

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


def theirs(data: ImageData, batch: int, processes: int) -> Batches:
    """torch's DataLoader, epoch after epoch, with processes that stay."""
    loader = DataLoader(
        Plain(data),
        batch,
        shuffle=True,
        drop_last=True,
        num_workers=processes,
        persistent_workers=processes > 0,
    )
    while True:
        yield from loader


PEERS: dict[str, Callable[[ImageData, int], Batches]] = {
    "dataloader": lambda data, batch: theirs(data, batch, 0),
    "dataloader-2": lambda data, batch: theirs(data, batch, 2),
}
