"""Batches from other processes: the same stream for any number of them and from any batch on."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from dat.data import Batches, ImageData, Mix, PartitionPlan, ReadOptions, load, make_batches
from dat.data.loader import Loader
from dat.data.pictures import Pictures
from tests.data import pictures as made

CPU = torch.device("cpu")


def pictures(root: Path) -> ImageData:
    made.folder(root, each=8, sizes=((40, 30), (30, 40)))
    train = load(str(root), ReadOptions(size=16, memory=0)).train
    assert isinstance(train, ImageData) and isinstance(train.images, Pictures)
    return train


def drawing(data: ImageData, loaders: int, *, crops: bool = True) -> Batches:
    dealing = PartitionPlan(batch=6, workers=1, rank=0, seed=5, loaders=loaders, random_crops=crops)
    return make_batches(data, None, Mix(), dealing)


def same(first: tuple[torch.Tensor, ...], second: tuple[torch.Tensor, ...]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_the_stream_is_the_same_for_any_number_of_processes(tmp_path: Path) -> None:
    data = pictures(tmp_path)
    alone = drawing(data, 0)
    steps = [(epoch, step) for epoch in range(2) for step in range(alone.steps)]
    expected = [alone.draw(*at, CPU) for at in steps]
    assert not torch.equal(expected[0].x, expected[4].x)
    for loaders in (1, 2, 4):
        made_by = drawing(data, loaders)
        assert all(
            same(made_by.draw(*at, CPU), batch) for at, batch in zip(steps, expected, strict=True)
        )
        made_by.close()
    for first in (3, 6):  # a resumed run begins anywhere
        resumed = drawing(data, 2)
        for at, batch in zip(steps[first:], expected[first:], strict=True):
            assert same(resumed.draw(*at, CPU), batch)
        resumed.close()


def test_a_batch_may_be_asked_for_again(tmp_path: Path) -> None:
    """Free AT replays a batch; no process is started anew for that."""
    drawn = drawing(pictures(tmp_path), 1)
    first = drawn.draw(0, 0, CPU)
    stream = drawn._loader[0]._stream
    assert same(drawn.draw(0, 0, CPU), first)
    drawn.draw(0, 1, CPU)
    assert drawn._loader[0]._stream is stream
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
    drawn = drawing(data, 4, crops=False)
    drawn.draw(0, 0, CPU)
    assert drawn._loader[0].processes == 0


def test_without_processes_it_is_the_function_itself() -> None:
    loader = Loader(lambda number: number * number)
    assert [loader(number) for number in (3, 3, 9, 0)] == [9, 9, 81, 0]


def test_loaders_draw_nothing_from_torchs_generator(tmp_path: Path) -> None:
    """Else a network with dropout would be trained otherwise by another number of loaders."""
    data, states = pictures(tmp_path), []
    for loaders in (0, 1):
        torch.manual_seed(3)
        drawn = drawing(data, loaders)
        drawn.draw(0, 0, CPU)
        drawn.close()
        states.append(torch.rand(3))
    assert torch.equal(*states)


ORPHANS = """\
import os, signal, sys, time
from pathlib import Path
import torch
sys.path.insert(0, sys.argv[2])
from tests.data.test_loader import drawing, load, ReadOptions

if __name__ == "__main__":
    data = load(sys.argv[1], ReadOptions(size=16, memory=0)).train
    drawn = drawing(data, 2)
    drawn.draw(0, 0, torch.device("cpu"))
    print("ready", flush=True)
    time.sleep(60)
"""


def test_a_killed_worker_leaves_no_loader_process(tmp_path: Path) -> None:
    made.folder(tmp_path / "set", each=8, sizes=((40, 30), (30, 40)))
    (tmp_path / "orphans.py").write_text(ORPHANS)
    root = Path(__file__).parents[2]
    words = [sys.executable, str(tmp_path / "orphans.py"), str(tmp_path / "set"), str(root)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    assert len(session(process.pid)) >= 3
    process.kill()
    process.communicate()
    end = time.monotonic() + 30
    while session(process.pid):
        assert time.monotonic() < end, "loaders are left behind"
        time.sleep(0.1)


def session(number: int) -> list[int]:
    """The processes of a session."""
    processes = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[3]) == number and fields[0] != "Z":
            processes.append(int(stat.parent.name))
    return processes
