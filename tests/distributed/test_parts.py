"""Data that stays on its node, and folders of pictures: real workers, as a user starts them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import NoReturn

import pytest

from dat.cli import main
from dat.data import Parts, load
from tests.data import pictures as made
from tests.distributed.conftest import DAT, SMALL, distance, run, weights
from tests.distributed.forked import Forked, run_workers

NOBODY = 65534


def shard(cwd: Path, *words: str) -> Path:
    done = run([*DAT, "data", "shard", "digits", "--out", "parts", *words], cwd)
    assert done.returncode == 0, done.stderr
    return cwd / "parts"


def train(cwd: Path, out: str, *words: str) -> subprocess.CompletedProcess[str]:
    small = [it for it in SMALL if not it.startswith("train.batch")]
    return run([*DAT, "train", "digits", *small, "train.batch=48", "--out", out, *words], cwd)


def test_uneven_parts_train_alike_on_any_workers(tmp_path: Path) -> None:
    shard(tmp_path, "--parts", "4", "--by", "dirichlet", "--alpha", "1")
    found = {}
    for workers in (1, 2, 4):
        done = train(tmp_path, f"m{workers}", "data.name=parts", "--workers", str(workers))
        assert done.returncode == 0, done.stderr
        assert "in 4 parts of" in done.stderr and "gone round" in done.stderr
        found[workers] = weights(tmp_path / f"m{workers}")
    assert distance(found[1], found[2]) < 1e-4 and distance(found[1], found[4]) < 1e-4
    results = [json.loads((tmp_path / f"m{m}" / "result.json").read_text()) for m in (1, 2, 4)]
    assert len({result["holdout_ra"] for result in results}) == 1


def watched(words: list[str]) -> None:
    """A command that leaves a note of the parts that it opened."""
    seen, leave = set(), os._exit

    def note(event: str, details: tuple[object, ...]) -> None:
        if event == "open" and "part-" in (path := str(details[0])) and path.endswith(".npy"):
            seen.add(path.split("part-")[1].split("/")[0])

    def tell(status: int) -> NoReturn:
        Path(f"opened-{os.environ['RANK']}.json").write_text(json.dumps(sorted(seen)))
        leave(status)

    os._exit = tell
    sys.addaudithook(note)
    main(words)


def test_a_worker_opens_no_other_workers_part(tmp_path: Path) -> None:
    """Watched from inside the workers, by Python's own audit hook."""
    shard(tmp_path, "--parts", "2")
    words = ["train", "digits", *SMALL, "data.name=parts", "--out", "run"]
    run_workers(2, watched, words, cwd=tmp_path)
    opened = [json.loads((tmp_path / f"opened-{rank}.json").read_text()) for rank in (0, 1)]
    assert opened == [["1-of-2"], ["2-of-2"]]


def read_as_nobody(folder: Path) -> None:
    os.setuid(NOBODY)
    parts = load(str(folder)).training
    assert isinstance(parts, Parts)
    print(len(parts.open(0)), len(parts.open(1)))
    parts.open(2)


@pytest.mark.skipif(os.getuid() != 0, reason="to become a user who may not read, one must be root")
def test_a_part_that_may_not_be_read_harms_nobody_else(tmp_path: Path) -> None:
    """Of four parts a user may not read the last two: the first two serve, the third is named."""
    with tempfile.TemporaryDirectory() as open_to_all:
        os.chmod(open_to_all, 0o755)
        parts = shard(Path(open_to_all), "--parts", "4")
        for other in (3, 4):
            os.chmod(parts / f"part-{other}-of-4" / "images.npy", 0)
        reader = Forked(partial(read_as_nobody, parts), Path(open_to_all))
        out, err = reader.communicate(timeout=60)
    assert out.split() == ["360", "359"], err
    assert "Permission denied" in err and "part-3-of-4" in err


def test_a_folder_of_jpegs_trains_by_the_imagenet_recipe(tmp_path: Path) -> None:
    """The paper's recipe at tiny size, two workers with a loader each: real JPEGs of all sizes."""
    made.folder(tmp_path / "images", each=12, sizes=((60, 80), (90, 50), (64, 64), (200, 300)))
    tiny = (
        *("data.size=32", "data.resize=36", "data.memory=0", "data.loaders=1", "data.holdout=0.2"),
        *("model.width=4", "train.batch=8", "train.epochs=2", "schedule.milestones=1"),
        *("evaluate.report=0", "evaluate.attacks=pgd-2", "train.select_steps=1", "comm.threads=1"),
    )
    words = ["train", "imagenet", "data.name=images", *tiny, "--workers", "2", "--out", "run"]
    done = run([*DAT, *words], tmp_path, timeout=180)
    assert done.returncode == 0, done.stderr
    assert "36 training and 36 test images of 3 x 32 x 32, 3 classes with 12 each" in done.stderr
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["images"] == 36 and result["steps"] == 2 * (29 // 8)
    again = run([*DAT, "evaluate", "run", "--attacks", "pgd-2", "--json"], tmp_path, timeout=180)
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["ta"] == pytest.approx(result["ta"])
