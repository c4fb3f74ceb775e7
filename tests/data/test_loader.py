"""Batches from other processes: the same stream for any number of them and from any batch on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.data import pictures as made

from dat.data import Dealing, ImageData, Mix, Reading, Supply, load, supply
from dat.data.loader import Loader
from dat.data.pictures import Pictures

CPU = torch.device("cpu")


def pictures(root: Path) -> ImageData:
    made.folder(root, each=8, sizes=((40, 30), (30, 40)))
    train = load(str(root), Reading(size=16, memory=0)).train
    assert isinstance(train, ImageData) and isinstance(train.images, Pictures)
    return train


def drawing(data: ImageData, loaders: int) -> Supply:
    dealing = Dealing(batch=6, workers=1, place=0, seed=5, loaders=loaders, random_crops=True)
    return supply(data, None, Mix(), dealing)


def same(first: tuple[torch.Tensor, ...], second: tuple[torch.Tensor, ...]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_the_stream_is_the_same_for_any_number_of_processes(tmp_path: Path) -> None:
    data = pictures(tmp_path)
    alone = drawing(data, 0)
    turns = [(epoch, step) for epoch in range(2) for step in range(alone.steps)]
    expected = [alone.draw(*turn, CPU) for turn in turns]
    assert not torch.equal(expected[0].x, expected[4].x)
    for loaders in (1, 2, 4):
        made_by = drawing(data, loaders)
        assert all(
            same(made_by.draw(*turn, CPU), it) for turn, it in zip(turns, expected, strict=True)
        )
        made_by.close()
    for first in (3, 6):  # a resumed run begins anywhere
        resumed = drawing(data, 2)
        for turn, it in zip(turns[first:], expected[first:], strict=True):
            assert same(resumed.draw(*turn, CPU), it)
        resumed.close()


def test_a_batch_may_be_asked_for_again(tmp_path: Path) -> None:
    """Free AT replays a batch; no process is started anew for that."""
    drawn = drawing(pictures(tmp_path), 1)
    first = drawn.draw(0, 0, CPU)
    coming = drawn._loader[0]._coming
    assert same(drawn.draw(0, 0, CPU), first)
    drawn.draw(0, 1, CPU)
    assert drawn._loader[0]._coming is coming
    drawn.close()


def test_a_broken_picture_in_another_process_is_named(tmp_path: Path) -> None:
    data = pictures(tmp_path)
    for file in (tmp_path / "train" / "bee").iterdir():
        file.write_bytes(file.read_bytes()[:100])
    drawn = drawing(data, 2)
    with pytest.raises(ValueError, match=r"bee/\d\.jpg: cannot be read") as error:
        [drawn.draw(0, step, CPU) for step in range(drawn.steps)]
    assert "Traceback" not in str(error.value)
    drawn.close()


def test_no_process_stays(tmp_path: Path) -> None:
    import multiprocessing

    drawn = drawing(pictures(tmp_path), 2)
    drawn.draw(0, 0, CPU)
    assert multiprocessing.active_children()
    drawn.close()
    del drawn
    assert not multiprocessing.active_children()


def test_images_in_memory_need_no_processes() -> None:
    data = ImageData.of(torch.rand(30, 1, 4, 4), torch.arange(30) % 3)
    drawn = drawing(data, 4)
    drawn.draw(0, 0, CPU)
    assert drawn._loader[0].processes == 0


def test_without_processes_it_is_the_function_itself() -> None:
    loader = Loader(lambda number: number * number)
    assert [loader(number) for number in (3, 3, 9, 0)] == [9, 9, 81, 0]
