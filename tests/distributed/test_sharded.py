"""A model that is spread over the workers learns what a whole one does."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from dat.attacks import APGD, PGD, YOPO, Attack
from dat.comm import Buckets, Gather, PerTensor, Ring, WholeVector, World
from dat.compute import Compute
from dat.fields import SettingError
from dat.objectives import GradAlign
from dat.optim import LAMB
from dat.train import Trainer
from dat.train.perturbation import WeightAttack
from tests.distributed import sharded_in_workers
from tests.distributed.conftest import DAT, SMALL, distance, run, train, weights
from tests.distributed.forked import run_workers
from tests.distributed.sharded_in_workers import CASES, COMMON, STEPS, TIMES, images

Seen = list[dict[str, Any]]
Watch = Callable[[int, int], tuple[Path, Seen]]
SIZES = ((2, 2), (3, 3), (4, 2))
"""Workers, and over how many of them a model is sharded."""
every_size = pytest.mark.parametrize("size", SIZES, ids=str)


@pytest.fixture(scope="module")
def watch(tmp_path_factory: pytest.TempPathFactory) -> Watch:
    """Where M workers left their files, and what each saw."""

    @cache
    def seen(workers: int, size: int) -> tuple[Path, Seen]:
        folder = tmp_path_factory.mktemp(f"sharded{workers}-{size}")
        more = ("interrupt",) if workers == 2 else ()
        checks = ("compare", "quantized", *more)
        run_workers(workers, sharded_in_workers.main, folder, size, *checks)
        return folder, [json.loads((folder / f"{it}.json").read_text()) for it in range(workers)]

    return seen


MOST = [(size, case) for size in SIZES for case in CASES if size[0] == 2 or case in COMMON]


@pytest.mark.parametrize(("size", "case"), MOST, ids=str)
def test_losses_and_weights_are_those_of_whole_models(
    watch: Watch, size: tuple[int, int], case: str
) -> None:
    folder, (first, *_) = watch(*size)
    sharded, whole = (first["compare"][f"{case} {how}"] for how in ("sharded", "whole"))
    assert len(whole["losses"]) == (STEPS if case in ("lamb", "free") else STEPS // 2)
    assert len(set(whole["losses"])) == len(whole["losses"])
    # losses travel in single precision
    torch.testing.assert_close(sharded["losses"], whole["losses"], rtol=1e-6, atol=0)
    found = [load_file(folder / f"{case} {how}.safetensors") for how in ("sharded", "whole")]
    assert distance(*found) < 1e-9


@pytest.mark.parametrize(("size", "case"), [it for it in MOST if it[1] != "sgd"], ids=str)
def test_trust_ratios_are_those_of_whole_layers(
    watch: Watch, size: tuple[int, int], case: str
) -> None:
    _, seen = watch(*size)
    whole = seen[0]["compare"][f"{case} whole"]["ratios"]
    assert len(whole[0]) > 10
    for worker in seen:  # each has other parts, and knows the same ratios
        for found, wanted in zip(
            worker["compare"][f"{case} sharded"]["ratios"], whole, strict=True
        ):
            assert found.keys() == wanted.keys()
            values = torch.tensor([list(found.values()), list(wanted.values())])
            torch.testing.assert_close(values[0], values[1], rtol=1e-6, atol=0)


@every_size
def test_a_worker_keeps_its_part_only(watch: Watch, size: tuple[int, int]) -> None:
    """Weights and two moments; rows may not come out even, which leaves the first a little more."""
    _, seen = watch(*size)
    whole = seen[0]["compare"]["lamb whole"]
    assert whole["moments"] == 2 * whole["parameters"]
    group = [worker["compare"]["lamb sharded"] for worker in seen[: size[1]]]
    assert sum(it["parameters"] for it in group) == whole["parameters"]
    assert sum(it["moments"] for it in group) == whole["moments"]
    assert max(it["parameters"] for it in group) < 1.3 * whole["parameters"] / size[1]


def test_gathering_once_sends_less(watch: Watch) -> None:
    """Two steps of an attack and an update gather all blocks twice each, or once in all."""
    _, seen = watch(2, 2)
    kept, freed = (seen[0]["compare"][f"{case} sharded"]["sent"] for case in ("lamb", "block"))
    assert kept < freed / 2


@every_size
def test_quantized_gradients_are_right_on_average(watch: Watch, size: tuple[int, int]) -> None:
    """So many times the same gradient in 4 bits: the noise of the mean is as many times less."""
    _, seen = watch(*size)
    for worker in seen:
        found = worker["quantized"]
        assert 1e-3 < found["relative"] < 0.1
        assert 0.5 < TIMES * found["of the mean"] < 2
        assert found["vectors"] < 1e-4  # sent as floats
        assert found["again"]
        assert found["sent"] < found["dense"]


def test_a_resumed_run_ends_with_the_same_bits(watch: Watch) -> None:
    _, seen = watch(2, 2)
    for worker in seen:
        assert worker["interrupt"]["alike"]
    names = ["manifest.json", "state.safetensors", "worker-0.safetensors", "worker-1.safetensors"]
    assert seen[0]["interrupt"]["files"] == names


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("was", ["sharded", "whole"])
def test_a_checkpoint_is_read_by_any_number_of_workers(
    watch: Watch, tmp_path: Path, workers: int, was: str
) -> None:
    """Written by two: with shards read by three with shards, and by one and two without; written
    without shards read by two and three with them."""
    folder, _ = watch(2, 2)
    shard = workers if workers == 3 or (workers == 2 and was == "whole") else None
    run_workers(workers, sharded_in_workers.resume, tmp_path, shard, folder / f"stopped-{was}")
    found = load_file(tmp_path / "resumed.safetensors")
    assert distance(found, load_file(folder / "never.safetensors")) < 1e-9


@pytest.fixture
def few() -> World:
    """One of four workers, before it has met the others."""
    return World(0, 4, torch.device("cpu"), "gloo", False)


def small() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 4))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"shard": 3}, "comm.shard = 3: must divide the number of workers, 4"),
        ({"quantizer": WholeVector(bits=8)}, "quantizer.name bucket"),
        ({"quantizer": PerTensor(bits=8)}, "quantizer.name bucket"),
        ({"quantizer": Buckets(bits=8, error_feedback=True)}, "quantizer.error_feedback false"),
        ({"quantizer": Buckets(bits=8), "protocol": Ring()}, "protocol.name default"),
        ({"quantizer": Buckets(bits=8), "protocol": Gather()}, "protocol.name default"),
        ({"attack": APGD()}, "attack APGD may ask"),
        ({"attack": YOPO()}, "attack YOPO may ask"),
        ({"attack": PGD(patience=1)}, "patience none"),
        ({"attack": PGD(restarts=2)}, "restarts 1"),
        ({"objective": GradAlign()}, "second derivatives"),
        ({"weight_attack": WeightAttack(0.01)}, "train.awp 0"),
        ({"compute": Compute(pieces=2)}, "compute.pieces 1"),
        ({"compute": Compute(layout="channels-last")}, "compute.layout auto"),
        ({"compute": Compute(compile="on")}, "compute.compile auto"),
    ],
    ids=str,
)
def test_what_does_not_work_is_refused(few: World, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(SettingError, match=reason):
        Trainer(model=small(), data=images(), world=few, **{"shard": 2, **options})


def test_any_attack_is_refused_that_is_not_known_to_be_steady(few: World) -> None:
    class Mine(Attack):
        def perturb(self, *details: Any) -> Any:
            raise NotImplementedError

    with pytest.raises(SettingError, match="attack Mine may ask"):
        Trainer(model=small(), data=images(), world=few, shard=4, attack=Mine())


def test_an_optimizer_that_knows_no_other_parts_says_so() -> None:
    """As with fully_shard in a user's own loop."""
    net = nn.Linear(2, 2)
    net.weight.placements = ()  # type: ignore[attr-defined]
    net(torch.ones(1, 2)).sum().backward()
    with pytest.raises(ValueError, match="LALR: the parameters are sharded"):
        LAMB()(net).step()


def test_a_run_from_start_to_finish(tmp_path: Path) -> None:
    """On two workers, with averages, in 8 bits; evaluated anew; and beside one without shards."""
    words = (*SMALL, "--workers", "2", "train.ema=0.9", "model.name=vit-4", "model.width=16")
    whole = train(DAT, tmp_path, *words)
    sharded = train(DAT, tmp_path, *words, "comm.shard=2")
    coarse = train(DAT, tmp_path, *words, "comm.shard=2", "quantizer.bits=8")
    for name in ("best", "last", "ema-last"):
        # 27 steps in single precision may flip the sign of a gradient
        assert distance(weights(sharded, name), weights(whole, name)) < 0.1
        assert distance(weights(coarse, name), weights(sharded, name)) > 0
    result = json.loads((sharded / "result.json").read_text())
    done = run([*DAT, "evaluate", str(sharded), "--json"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ra"] == result["ra"]


def test_a_shard_that_does_not_come_out_even_is_refused(tmp_path: Path) -> None:
    done = run([*DAT, "train", "digits", *SMALL, "comm.shard=3", "--workers", "2"], tmp_path)
    assert done.returncode == 2
    assert "comm.shard = 3: must divide the number of workers, 2" in done.stderr
