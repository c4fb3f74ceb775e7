"""However an image's copies are split over workers, the gradient is the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.distributed import teams_in_workers
from tests.distributed.conftest import DAT, SMALL, distance, run, train, weights
from tests.distributed.forked import run_workers
from tests.distributed.teams_in_workers import CASES

Found = dict[str, Tensor]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], dict[str, Found]]:
    """By workers and team size, what each case came to."""
    results = {}
    for workers, size in ((1, 1), (2, 2), (4, 4), (4, 2)):
        folder = tmp_path_factory.mktemp(f"team-{workers}-{size}")
        run_workers(workers, teams_in_workers.main, folder, size)
        results[workers, size] = {name: load_file(folder / f"{name}.safetensors") for name in CASES}
    return results


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("split", [(2, 2), (4, 4), (4, 2)], ids=str)
def test_the_split_changes_nothing_beyond_rounding(
    found: dict[tuple[int, int], dict[str, Found]], name: str, split: tuple[int, int]
) -> None:
    """Six copies on 1, 2 and 4 workers (two of which then have two), and on two teams of two."""
    if split == (4, 2) and CASES[name][0] != "cnn":
        pytest.skip("two teams have two batches to normalise")
    alone, together = dict(found[1, 1][name]), dict(found[split][name])
    report = alone.pop("report"), together.pop("report")  # it travels in single precision
    torch.testing.assert_close(*report, rtol=1e-6, atol=0)
    gradient = {k: v for k, v in alone.items() if v.is_floating_point()}
    assert distance({k: together[k] for k in gradient}, gradient) < 1e-8
    largest = max(float(value.abs().max()) for value in gradient.values())
    assert largest > 1e-3


@pytest.mark.parametrize("extra", [(), ("attack.carry=true", "train.epochs=2")])
def test_a_run_with_a_team_is_the_run_without(tmp_path: Path, extra: tuple[str, ...]) -> None:
    noisy = ("objective.name=smooth", "objective.copies=4", "objective.votes=2")
    words = (*SMALL, *noisy, "threat.norm=l2", "train.batch=240", *extra)
    alone = train(DAT, tmp_path, *words)
    shared = train(DAT, tmp_path, *words, "train.team=2", "--workers", "2")
    assert distance(weights(shared), weights(alone)) < 1e-4


def test_a_team_that_does_not_come_out_even_is_refused(tmp_path: Path) -> None:
    words = [*SMALL, "objective.name=smooth", "objective.copies=4", "train.team=3"]
    done = run([*DAT, "train", "digits", *words, "--workers", "2"], tmp_path)
    assert done.returncode == 2
    assert "train.team = 3: must divide the number of workers, 2" in done.stderr


def test_tensors_are_really_compared(found: dict[tuple[int, int], dict[str, Found]]) -> None:
    """Another objective has another gradient."""
    one, other = found[1, 1]["smooth"], found[1, 1]["soft"]
    assert any(not torch.allclose(one[name], other[name]) for name in one)
