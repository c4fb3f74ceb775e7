"""With train.bn=sync the number of workers changes nothing, and torch's own is what it comes to."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.distributed import norms_in_workers
from tests.distributed.conftest import DAT, SMALL, distance, train, weights
from tests.distributed.forked import run_workers
from tests.distributed.norms_in_workers import CASES, SHARES, derived, norm, numbers

Found = dict[str, Tensor]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """By workers, what each of them found."""
    made = {workers: tmp_path_factory.mktemp(f"norms-{workers}") for workers in SHARES}
    for workers, folder in made.items():
        run_workers(workers, norms_in_workers.main, folder)
    return made


@pytest.mark.parametrize("workers", SHARES)
@pytest.mark.parametrize(("name", "momentum"), [("usual", 0.1), ("cumulative", None)])
def test_it_is_torchs_batch_norm_of_the_whole_batch(
    folders: dict[int, Path], workers: int, name: str, momentum: float | None
) -> None:
    """Whatever the shares are, an empty one among them: outputs, gradients, second derivatives."""
    layer, (x, weight) = norm(momentum), numbers()
    expected = derived(layer, x, weight)
    found = [load_file(folders[workers] / f"{name}-{it}.safetensors") for it in range(workers)]
    for key, value in expected.items():
        together = torch.cat([it[key] for it in found])
        torch.testing.assert_close(together, value, rtol=1e-9, atol=1e-11)
    for key, parameter in layer.named_parameters():
        total = torch.stack([it[key] for it in found]).sum(0)
        torch.testing.assert_close(total, parameter.grad, rtol=1e-9, atol=1e-9)
    for key, value in layer.named_buffers():
        assert all(torch.equal(it[key], found[0][key]) for it in found)
        torch.testing.assert_close(found[0][key], value, rtol=1e-12, atol=0)


@pytest.mark.parametrize("workers", SHARES)
def test_what_they_tell_each_other_is_in_the_ledger(folders: dict[int, Path], workers: int) -> None:
    """A row is 3 means, 3 variances and a number, 8 bytes each: gathered once in each of two
    forward passes. In a backward pass the gradients of all rows are summed: in the first one, in
    the two that the second derivative takes (of the sum, and of what was gathered), in the last."""
    row = 7 * 8
    sums = 2 * workers * row * (workers - 1) // workers
    found = load_file(folders[workers] / "usual-0.safetensors")
    assert int(found["sent"]) == 2 * row * (workers - 1) + 4 * sums


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("workers", [2, 3])
def test_the_number_of_workers_changes_nothing_beyond_rounding(
    folders: dict[int, Path], workers: int, name: str
) -> None:
    found = [load_file(folders[workers] / f"{name}-{it}.safetensors") for it in range(workers)]
    for other in found[1:]:
        assert all(torch.equal(other[key], value) for key, value in found[0].items())
    if not CASES[name].get("pieces"):
        assert distance(found[0], load_file(folders[1] / f"{name}-0.safetensors")) < 1e-8
    assert max(float(it.abs().max()) for it in found[0].values()) > 1e-3


def test_computed_again_is_as_computed_once(folders: dict[int, Path]) -> None:
    names = "clean and attacked", "computed again"
    once, again = (load_file(folders[3] / f"{it}-0.safetensors") for it in names)
    assert distance(again, once) < 1e-12


def test_groups_of_one_worker_are_the_shares_of_several(folders: dict[int, Path]) -> None:
    """Clean and attacked, in the attack and in the update; the running statistics too."""
    ghosts, shares = (
        load_file(folders[workers] / f"{kind}.safetensors")
        for workers, kind in ((1, "ghost"), (3, "local"))
    )
    assert distance(ghosts, shares) < 1e-6  # statistics travel in single precision
    whole = load_file(folders[1] / "local.safetensors")
    assert distance(ghosts, whole) > 1e-3


def test_a_run_whose_batch_grows_is_the_same_on_two_workers(tmp_path: Path) -> None:
    words = (*SMALL, "train.epochs=2", "train.grow=1", "train.grow_by=3", "train.bn=sync")
    alone = train(DAT, tmp_path, *words)
    shared = train(DAT, tmp_path, *words, "--workers", "2")
    assert distance(weights(shared), weights(alone)) < 1e-4
