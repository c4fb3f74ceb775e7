"""Training of a sharded model gives the same weights as training of replicas."""

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
from dat.core.settings import SettingError
from dat.distributed import Buckets, Gather, PerTensor, Ring, WholeVector, World
from dat.objectives import GradAlign
from dat.optim import LALR, LAMB, Muon, MuonDirection
from dat.train.engine import Compute
from tests.trainers import make_trainer
from tests.workers import sharded_in_workers
from tests.workers.conftest import DAT, SMALL, distance, run, train, weights
from tests.workers.forked import run_workers
from tests.workers.sharded_in_workers import CASES, COMMON, STEPS, TIMES, images

Results = list[dict[str, Any]]
ResultsOf = Callable[[int, int], tuple[Path, Results]]
SIZES = ((2, 2), (3, 3), (4, 2))
"""The number of workers, and of those that one model is sharded over."""
every_size = pytest.mark.parametrize("size", SIZES, ids=str)


@pytest.fixture(scope="module")
def results_of(tmp_path_factory: pytest.TempPathFactory) -> ResultsOf:
    """The folder with the files of M workers, and the results of each."""

    @cache
    def results(workers: int, size: int) -> tuple[Path, Results]:
        folder = tmp_path_factory.mktemp(f"sharded{workers}-{size}")
        interrupt = ("interrupt",) if workers == 2 else ()
        checks = ("compare", "quantized", *interrupt)
        run_workers(workers, sharded_in_workers.main, folder, size, *checks)
        files = [folder / f"{rank}.json" for rank in range(workers)]
        return folder, [json.loads(file.read_text()) for file in files]

    return results


MOST = [(size, case) for size in SIZES for case in CASES if size[0] == 2 or case in COMMON]
LAYERWISE = [(size, case) for size, case in MOST if case not in ("sgd", "adamw")]


@pytest.mark.parametrize(("size", "case"), MOST, ids=str)
def test_losses_and_weights_are_those_of_unsharded_models(
    results_of: ResultsOf, size: tuple[int, int], case: str
) -> None:
    folder, (first, *_) = results_of(*size)
    sharded, whole = (first["compare"][f"{case} {kind}"] for kind in ("sharded", "whole"))
    assert len(whole["losses"]) == (STEPS if case in ("lamb", "free") else STEPS // 2)
    assert len(set(whole["losses"])) == len(whole["losses"])
    # losses are exchanged in single precision
    torch.testing.assert_close(sharded["losses"], whole["losses"], rtol=1e-6, atol=0)
    files = [folder / f"{case} {kind}.safetensors" for kind in ("sharded", "whole")]
    assert distance(*map(load_file, files)) < 1e-9


@pytest.mark.parametrize(("size", "case"), LAYERWISE, ids=str)
def test_trust_ratios_are_those_of_unsharded_layers(
    results_of: ResultsOf, size: tuple[int, int], case: str
) -> None:
    _, results = results_of(*size)
    whole = results[0]["compare"][f"{case} whole"]["ratios"]
    assert len(whole[0]) > 10
    for worker in results:  # each has other shards, but the same ratios
        sharded = worker["compare"][f"{case} sharded"]["ratios"]
        for ratios, expected in zip(sharded, whole, strict=True):
            assert ratios.keys() == expected.keys()
            values = torch.tensor([list(ratios.values()), list(expected.values())])
            torch.testing.assert_close(values[0], values[1], rtol=1e-6, atol=0)


@every_size
def test_a_worker_keeps_only_its_shards(results_of: ResultsOf, size: tuple[int, int]) -> None:
    """Weights and two moments; if rows do not divide evenly, the first worker has slightly more."""
    _, results = results_of(*size)
    whole = results[0]["compare"]["lamb whole"]
    assert whole["moments"] == 2 * whole["parameters"]
    shards = [worker["compare"]["lamb sharded"] for worker in results[: size[1]]]
    assert sum(shard["parameters"] for shard in shards) == whole["parameters"]
    assert sum(shard["moments"] for shard in shards) == whole["moments"]
    assert max(shard["parameters"] for shard in shards) < 1.3 * whole["parameters"] / size[1]


def test_gathering_once_sends_less(results_of: ResultsOf) -> None:
    """An attack of two steps and an update gather each block twice per pass, or once overall."""
    _, results = results_of(2, 2)
    kept, freed = (results[0]["compare"][f"{case} sharded"]["sent"] for case in ("lamb", "block"))
    assert kept < freed / 2


@every_size
def test_quantized_gradients_are_unbiased(results_of: ResultsOf, size: tuple[int, int]) -> None:
    """The mean of TIMES quantizations to 4 bits has 1 / TIMES of the noise."""
    _, results = results_of(*size)
    for worker in results:
        result = worker["quantized"]
        assert 1e-3 < result["relative"] < 0.1
        assert 0.5 < TIMES * result["of the mean"] < 2
        assert result["vectors"] < 1e-4  # sent as float32
        assert result["again"]
        assert result["sent"] < result["dense"]


def test_a_resumed_run_ends_with_the_same_bits(results_of: ResultsOf) -> None:
    _, results = results_of(2, 2)
    for worker in results:
        assert worker["interrupt"]["equal"]
    names = ["manifest.json", "state.safetensors", "worker-0.safetensors", "worker-1.safetensors"]
    assert results[0]["interrupt"]["files"] == names


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("written", ["sharded", "whole"])
def test_any_number_of_workers_can_read_a_checkpoint(
    results_of: ResultsOf, tmp_path: Path, workers: int, written: str
) -> None:
    """A checkpoint of two workers. Written with sharding, it is read with sharding by three workers
    and without by one and two; written without, it is read with sharding by two and three."""
    folder, _ = results_of(2, 2)
    shard = workers if workers == 3 or (workers == 2 and written == "whole") else None
    run_workers(workers, sharded_in_workers.resume, tmp_path, shard, folder / f"stopped-{written}")
    resumed = load_file(tmp_path / "resumed.safetensors")
    assert distance(resumed, load_file(folder / "never.safetensors")) < 1e-9


@pytest.fixture
def one_of_four() -> World:
    """One of four workers, without a process group."""
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
        ({"attack": APGD()}, "attack APGD may call"),
        ({"attack": YOPO()}, "attack YOPO may call"),
        ({"attack": PGD(patience=1)}, "patience none"),
        ({"attack": PGD(restarts=2)}, "restarts 1"),
        ({"objective": GradAlign()}, "second derivatives"),
        ({"optimizer": Muon()}, "Muon orthogonalizes whole matrices"),
        ({"awp": 0.01}, "train.awp 0"),
        ({"compute": Compute(pieces=2)}, "compute.pieces 1"),
        ({"compute": Compute(layout="channels-last")}, "compute.layout auto"),
        ({"compute": Compute(compile="on")}, "compute.compile auto"),
    ],
    ids=str,
)
def test_unsupported_options_are_rejected(
    one_of_four: World, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(SettingError, match=reason):
        make_trainer(model=small(), data=images(), world=one_of_four, **{"shard": 2, **options})


def test_unknown_attacks_are_rejected(one_of_four: World) -> None:
    class Mine(Attack):
        def perturb(self, *details: Any) -> Any:
            raise NotImplementedError

    with pytest.raises(SettingError, match="attack Mine may call"):
        make_trainer(model=small(), data=images(), world=one_of_four, shard=4, attack=Mine())


def test_an_optimizer_without_its_shard_group_raises() -> None:
    """As with `fully_shard` in a user's own training loop."""
    net = nn.Linear(2, 2)
    net.weight.placements = ()  # type: ignore[attr-defined]
    net(torch.ones(1, 2)).sum().backward()
    with pytest.raises(ValueError, match="LAMB: the parameters are sharded"):
        LAMB()(net).step()
    with pytest.raises(ValueError, match="Muon: the parameters are sharded"):
        Muon(net.parameters()).step()


def test_a_direction_that_needs_whole_layers_is_refused() -> None:
    optimizer = LALR(small().parameters(), MuonDirection(), lr=0.1)
    optimizer.shards = object()  # type: ignore[assignment]
    with pytest.raises(ValueError, match="LALR: the parameters are sharded, and its direction"):
        optimizer.step()


def test_an_optimizer_of_unsharded_parameters_is_refused(one_of_four: World) -> None:
    net = small()
    optimizer = LAMB(net.parameters())
    with pytest.raises(SettingError, match="has the parameters of the unsharded model"):
        make_trainer(model=net, data=images(), world=one_of_four, shard=4, optimizer=optimizer)


def test_a_run_from_start_to_finish(tmp_path: Path) -> None:
    """On two workers, with averaged weights, also in 8 bits; compared with a run without sharding,
    and evaluated again."""
    words = (*SMALL, "--workers", "2", "train.ema=0.9", "model.name=vit-4", "model.width=16")
    whole = train(DAT, tmp_path, *words)
    sharded = train(DAT, tmp_path, *words, "comm.shard=2")
    quantized = train(DAT, tmp_path, *words, "comm.shard=2", "quantizer.bits=8")
    for name in ("best", "last", "ema-last"):
        # 27 steps in single precision may flip the sign of a gradient
        assert distance(weights(sharded, name), weights(whole, name)) < 0.1
        assert distance(weights(quantized, name), weights(sharded, name)) > 0
    result = json.loads((sharded / "result.json").read_text())
    evaluation = run([*DAT, "evaluate", str(sharded), "--json"], tmp_path)
    assert evaluation.returncode == 0, evaluation.stderr
    assert json.loads(evaluation.stdout)["ra"] == result["ra"]


def test_a_shard_size_that_does_not_divide_the_workers_is_rejected(tmp_path: Path) -> None:
    result = run([*DAT, "train", "digits", *SMALL, "comm.shard=3", "--workers", "2"], tmp_path)
    assert result.returncode == 2
    assert "comm.shard = 3: must divide the number of workers, 2" in result.stderr
