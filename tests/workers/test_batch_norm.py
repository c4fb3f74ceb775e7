"""train.bn=sync equals torch's batch norm over the global batch, with any number of workers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.workers import batch_norm_in_workers
from tests.workers.batch_norm_in_workers import (
    CASES,
    SHARES,
    derivatives,
    inputs_and_weights,
    norm,
)
from tests.workers.conftest import distance
from tests.workers.forked import run_workers


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """By number of workers, the folder with the results of each worker."""
    folders = {workers: tmp_path_factory.mktemp(f"norms-{workers}") for workers in SHARES}
    for workers, folder in folders.items():
        run_workers(workers, batch_norm_in_workers.main, folder)
    return folders


def load_all(folder: Path, name: str, workers: int) -> list[dict[str, Tensor]]:
    """The tensors of each worker."""
    return [load_file(folder / f"{name}-{rank}.safetensors") for rank in range(workers)]


@pytest.mark.parametrize("workers", SHARES)
@pytest.mark.parametrize(("name", "momentum"), [("usual", 0.1), ("cumulative", None)])
def test_sync_equals_torchs_batch_norm_over_the_global_batch(
    folders: dict[int, Path], workers: int, name: str, momentum: float | None
) -> None:
    """Outputs, gradients and second derivatives, with uneven and empty shares."""
    layer, (x, weight) = norm(momentum), inputs_and_weights()
    expected = derivatives(layer, x, weight)
    results = load_all(folders[workers], name, workers)
    for key, value in expected.items():
        batch = torch.cat([result[key] for result in results])
        torch.testing.assert_close(batch, value, rtol=1e-9, atol=1e-11)
    for key, parameter in layer.named_parameters():
        total = torch.stack([result[key] for result in results]).sum(0)
        torch.testing.assert_close(total, parameter.grad, rtol=1e-9, atol=1e-9)
    for key, value in layer.named_buffers():
        assert all(torch.equal(result[key], results[0][key]) for result in results)
        torch.testing.assert_close(results[0][key], value, rtol=1e-12, atol=0)


@pytest.mark.parametrize("workers", SHARES)
def test_the_ledger_counts_the_bytes_of_batch_norm(folders: dict[int, Path], workers: int) -> None:
    """A row has 3 means, 3 variances and a count, 8 bytes each, and is all-gathered in each of two
    forward passes. The gradients of all rows are all-reduced in four backward passes: the first
    one, two for the second derivative (of the sum and of the gathered rows), and the last one."""
    row = 7 * 8
    sums = 2 * workers * row * (workers - 1) // workers
    result = load_file(folders[workers] / "usual-0.safetensors")
    assert int(result["sent"]) == 2 * row * (workers - 1) + 4 * sums


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("workers", [2, 3])
def test_the_number_of_workers_changes_nothing_beyond_rounding(
    folders: dict[int, Path], workers: int, name: str
) -> None:
    first, *others = load_all(folders[workers], name, workers)
    for other in others:
        assert all(torch.equal(other[key], value) for key, value in first.items())
    if not CASES[name].get("pieces"):
        assert distance(first, load_file(folders[1] / f"{name}-0.safetensors")) < 1e-8
    assert max(float(value.abs().max()) for value in first.values()) > 1e-3


def test_recomputation_changes_nothing(folders: dict[int, Path]) -> None:
    names = "clean and attacked", "recomputed"
    stored, recomputed = (load_file(folders[3] / f"{name}-0.safetensors") for name in names)
    assert distance(recomputed, stored) < 1e-12


def test_ghost_groups_of_one_worker_equal_the_shares_of_several(folders: dict[int, Path]) -> None:
    """For clean and attacked images, in the attack and in the update, with running statistics."""
    ghosts, shares = (
        load_file(folders[workers] / f"{scope}.safetensors")
        for workers, scope in ((1, "ghost"), (3, "local"))
    )
    assert distance(ghosts, shares) < 1e-6  # statistics are sent in single precision
    batch = load_file(folders[1] / "local.safetensors")
    assert distance(ghosts, batch) > 1e-3
