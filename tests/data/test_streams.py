"""Streams: what an iterable-style dataset promises, and what it does not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from dat.attacks import PGD
from dat.core.settings import SettingError
from dat.data import Stream
from dat.data.streams import StreamSource
from dat.distributed import World
from dat.models import build_model
from dat.train import Trainer


@pytest.fixture
def world() -> Iterator[World]:
    with World.join(device="cpu", threads=1) as joined:
        yield joined


PIXELS = torch.rand(50, 1, 8, 8, generator=torch.Generator().manual_seed(0))


class Pairs(IterableDataset[Any]):
    """Fifty images; the label is the position modulo ten."""

    def __iter__(self) -> Iterator[tuple[Any, int]]:
        return ((image, row % 10) for row, image in enumerate(PIXELS))


def sources(workers: int, batch: int = 8, stream: Stream | None = None) -> list[StreamSource]:
    stream = stream or Stream(Pairs(), images=40, classes=10)
    places = range(workers)
    return [StreamSource.of_stream(stream, batch, workers=workers, rank=place) for place in places]


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_together_the_workers_read_the_stream_in_order(workers: int) -> None:
    made = sources(workers)
    assert made[0].sampler.steps == 5
    for number in range(9):  # beyond the end, where it starts again
        shares = [source.read(number) for source in made]
        x = torch.cat([share.x for share in shares])
        rows = torch.arange(number * 8, number * 8 + 8)
        expected = {bytes(image.numpy()) for image in PIXELS[rows % len(PIXELS)]}
        if number * 8 + 8 <= 48 or workers == 1:  # each worker's share starts again by itself
            assert {bytes(image.numpy()) for image in x} == expected
        assert torch.equal(torch.cat([share.numbers for share in shares]), rows)


def test_a_batch_depends_on_its_number_alone() -> None:
    first, later = sources(2), sources(2)
    for number in range(6):
        batch = first[1].read(number)
    resumed = later[1].read(5)
    assert torch.equal(batch.x, resumed.x) and torch.equal(batch.y, resumed.y)
    again = later[1].read(2)
    assert torch.equal(again.x, sources(2)[1].read(2).x)


def test_a_function_gives_each_worker_its_own_files() -> None:
    def own(place: int, workers: int) -> Iterator[tuple[Any, int]]:
        return ((PIXELS[row], row % 10) for row in range(place * 25, 25 + place * 25))

    x = sources(2, stream=Stream(own, images=40, classes=10))[1].read(0).x
    assert torch.equal(x, PIXELS[25:29])


def trainer(world: World, **options: Any) -> Trainer:
    return Trainer(
        model=build_model("cnn", 10, channels=1, width=4),
        data=Stream(Pairs(), images=40, classes=10),
        attack=options.pop("attack", PGD(steps=2)),
        epochs=2,
        batch=8,
        world=world,
        **options,
    )


def test_training_on_a_stream(world: World) -> None:
    records = trainer(world).fit()
    assert len(records) == 2 and records[1].loss < records[0].loss


def test_options_that_need_indexed_images_are_refused(world: World) -> None:
    with pytest.raises(SettingError, match=r"a stream does not identify its images"):
        trainer(world, attack=PGD(steps=1, carry=True)).fit()


BAD: dict[str, tuple[Any, str]] = {
    "empty": ((), "the stream is empty"),
    "labels": ([(PIXELS[0], 10)] * 20, "labels from 10 to 10: must be from 0 to 9"),
    "pixels": ([(PIXELS[0] + 1, 1)] * 20, r"image 0 has pixels .* must be in \[0, 1\]"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_streams_are_refused_in_one_line(case: str) -> None:
    pairs, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        sources(1, stream=Stream(pairs, images=20, classes=10))
