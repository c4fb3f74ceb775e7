"""The gradient does not depend on how the noisy copies of an image are divided."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.workers import subgroups_in_workers
from tests.workers.conftest import DAT, SMALL, distance, run
from tests.workers.forked import run_workers
from tests.workers.subgroups_in_workers import CASES

Results = dict[tuple[int, int], dict[str, dict[str, Tensor]]]
"""By number of workers and subgroup size, then by case: gradients, buffers, loss and accuracy."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    results = {}
    for workers, size in ((1, 1), (2, 2), (4, 4), (4, 2)):
        folder = tmp_path_factory.mktemp(f"subgroup-{workers}-{size}")
        run_workers(workers, subgroups_in_workers.main, folder, size)
        results[workers, size] = {name: load_file(folder / f"{name}.safetensors") for name in CASES}
    return results


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("split", [(2, 2), (4, 4), (4, 2)], ids=str)
def test_the_split_changes_nothing_beyond_rounding(
    results: Results, name: str, split: tuple[int, int]
) -> None:
    """Six copies on 1, 2 and 4 workers (two of which get two), and on two subgroups of two."""
    if split == (4, 2) and CASES[name][0] != "cnn":
        pytest.skip("two subgroups normalize two batches")
    single, divided = dict(results[1, 1][name]), dict(results[split][name])
    reports = single.pop("report"), divided.pop("report")  # sent in single precision
    torch.testing.assert_close(*reports, rtol=1e-6, atol=0)
    gradient = {k: v for k, v in single.items() if v.is_floating_point()}
    assert distance({k: divided[k] for k in gradient}, gradient) < 1e-8
    largest = max(float(value.abs().max()) for value in gradient.values())
    assert largest > 1e-3


def test_a_subgroup_size_that_does_not_divide_the_workers_is_rejected(tmp_path: Path) -> None:
    words = [*SMALL, "objective.name=smooth", "objective.copies=4", "train.team=3"]
    result = run([*DAT, "train", "digits", *words, "--workers", "2"], tmp_path)
    assert result.returncode == 2
    assert "train.team = 3: must divide the number of workers, 2" in result.stderr


def test_objectives_have_different_gradients(results: Results) -> None:
    """Otherwise the comparison above would prove nothing."""
    smooth, soft = results[1, 1]["smooth"], results[1, 1]["soft"]
    assert any(not torch.allclose(smooth[name], soft[name]) for name in smooth)
