"""Data that stays on its node, and folders of pictures, with real workers."""

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
from dat.data import Partitions, load
from tests.data import pictures
from tests.workers.conftest import DAT, SMALL, distance, run, weights
from tests.workers.forked import Forked, run_workers

NOBODY = 65534


def shard(cwd: Path, *words: str) -> Path:
    result = run([*DAT, "data", "shard", "digits", "--out", "parts", *words], cwd)
    assert result.returncode == 0, result.stderr
    return cwd / "parts"


def train(cwd: Path, out: str, *words: str) -> subprocess.CompletedProcess[str]:
    small = [word for word in SMALL if not word.startswith("train.batch")]
    return run([*DAT, "train", "digits", *small, "train.batch=48", "--out", out, *words], cwd)


def test_training_on_uneven_parts_does_not_depend_on_the_workers(tmp_path: Path) -> None:
    shard(tmp_path, "--parts", "4", "--by", "dirichlet", "--alpha", "1")
    trained = {}
    for workers in (1, 2, 4):
        result = train(tmp_path, f"m{workers}", "data.name=parts", "--workers", str(workers))
        assert result.returncode == 0, result.stderr
        assert "in 4 parts of" in result.stderr and "passes over the smallest" in result.stderr
        trained[workers] = weights(tmp_path / f"m{workers}")
    assert distance(trained[1], trained[2]) < 1e-4 and distance(trained[1], trained[4]) < 1e-4
    results = [json.loads((tmp_path / f"m{m}" / "result.json").read_text()) for m in (1, 2, 4)]
    assert len({result["holdout_ra"] for result in results}) == 1


def record_opened_parts(words: list[str]) -> None:
    """Run a command, and write a list of the parts that it opened."""
    opened, exit_process = set(), os._exit

    def record(event: str, details: tuple[object, ...]) -> None:
        if event == "open" and "part-" in (path := str(details[0])) and path.endswith(".npy"):
            opened.add(path.split("part-")[1].split("/")[0])

    def write_and_exit(status: int) -> NoReturn:
        Path(f"opened-{os.environ['RANK']}.json").write_text(json.dumps(sorted(opened)))
        exit_process(status)

    os._exit = write_and_exit
    sys.addaudithook(record)
    main(words)


def test_a_worker_opens_only_its_own_part(tmp_path: Path) -> None:
    """Checked inside the workers, with a Python audit hook."""
    shard(tmp_path, "--parts", "2")
    words = ["train", "digits", *SMALL, "data.name=parts", "--out", "run"]
    run_workers(2, record_opened_parts, words, cwd=tmp_path)
    opened = [json.loads((tmp_path / f"opened-{rank}.json").read_text()) for rank in (0, 1)]
    assert opened == [["1-of-2"], ["2-of-2"]]


def read_as_nobody(folder: Path) -> None:
    os.setuid(NOBODY)
    parts = load(str(folder)).training
    assert isinstance(parts, Partitions)
    print(len(parts.open(0)), len(parts.open(1)))
    parts.open(2)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to switch users")
def test_an_unreadable_part_does_not_affect_others(tmp_path: Path) -> None:
    """With the last two of four parts unreadable, the first two work, and the error names the
    third."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        parts = shard(Path(folder), "--parts", "4")
        for unreadable in (3, 4):
            os.chmod(parts / f"part-{unreadable}-of-4" / "images.npy", 0)
        reader = Forked(partial(read_as_nobody, parts), Path(folder))
        stdout, stderr = reader.communicate(timeout=60)
    assert stdout.split() == ["360", "359"], stderr
    assert "Permission denied" in stderr and "part-3-of-4" in stderr


def test_the_imagenet_recipe_trains_on_a_folder_of_jpegs(tmp_path: Path) -> None:
    """The paper's recipe at tiny size, with two workers and a loader each; JPEGs of all sizes."""
    pictures.folder(tmp_path / "images", each=12, sizes=((60, 80), (90, 50), (64, 64), (200, 300)))
    tiny = (
        *("data.size=32", "data.resize=36", "data.memory=0", "data.loaders=1", "data.holdout=0.2"),
        *("model.width=4", "train.batch=8", "train.epochs=2", "schedule.milestones=1"),
        *("evaluate.report=0", "evaluate.attacks=pgd-2", "train.select_steps=1", "comm.threads=1"),
    )
    words = ["train", "imagenet", "data.name=images", *tiny, "--workers", "2", "--out", "run"]
    training = run([*DAT, *words], tmp_path, timeout=180)
    assert training.returncode == 0, training.stderr
    data = "36 training and 36 test images of 3 x 32 x 32, 3 classes with 12 each"
    assert data in training.stderr
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["images"] == 36 and result["steps"] == 2 * (29 // 8)
    evaluate = [*DAT, "evaluate", "run", "--attacks", "pgd-2", "--json"]
    evaluation = run(evaluate, tmp_path, timeout=180)
    assert evaluation.returncode == 0, evaluation.stderr
    assert json.loads(evaluation.stdout)["ta"] == pytest.approx(result["ta"])
