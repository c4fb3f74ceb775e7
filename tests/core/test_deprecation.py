"""Old public names still work, and each names the new one."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

import dat
from dat.core.rng import Streams
from dat.evaluation import SuiteResult

MODULES = {
    "dat.AutoAttacked": "AutoAttackResult",
    "dat.Victim": "AttackTarget",
    "dat.attacks.Victim": "AttackTarget",
    "dat.core.rng.Draws": "Streams",
    "dat.data.Dealing": "PartitionPlan",
    "dat.data.Drawn": "RawBatch",
    "dat.data.Parts": "Partitions",
    "dat.data.Plan": "PartitionSampler",
    "dat.data.Reading": "ReadOptions",
    "dat.data.Rounds": "LocalPartitionSampler",
    "dat.data.Source": "BatchSource",
    "dat.data.Split": "RandomPartitionSampler",
    "dat.data.Stored": "LazyImages",
    "dat.data.Supply": "Batches",
    "dat.data.Windows": "CropWindows",
    "dat.data.default_parts": "default_partitions",
    "dat.data.some_images": "class_balanced_subset",
    "dat.data.supply": "make_batches",
    "dat.distributed.GATHER": "GATHER_CHOICES",
    "dat.distributed.NORMS": "BATCH_NORM_SCOPES",
    "dat.distributed.Norms": "ScopedBatchNorm",
    "dat.distributed.Part": "TensorShard",
    "dat.distributed.Team": "WorkerSubgroup",
    "dat.distributed.check_team": "check_subgroup",
    "dat.distributed.local_of": "local_tensor",
    "dat.distributed.part_of": "shard_of",
    "dat.evaluation.AutoAttacked": "AutoAttackResult",
    "dat.evaluation.Verdicts": "SuiteResult",
    "dat.jobs.clusters.Job": "ClusterJob",
    "dat.kernels.convolve.Convolution": "NativeConv2d",
    "dat.kernels.convolve.Ways": "NativePasses",
    "dat.kernels.convolve.faster": "native_convolutions",
    "dat.kernels.convolve.quicken": "use_native_convolutions",
    "dat.kernels.convolve.ways": "native_passes",
    "dat.objectives.Team": "SubgroupLike",
    "dat.report.gauge": "progress_bar",
    "dat.report.show_measured": "show_evaluation",
    "dat.tools.bench.Race": "Comparison",
    "dat.tools.bench.Scene": "Workload",
    "dat.tools.bench.StepScene": "StepWorkload",
    "dat.tools.bench.show_race": "show_comparison",
    "dat.tools.planning.Compute": "ComputeTimes",
    "dat.tools.planning.Link": "NetworkLink",
    "dat.tools.reproduce.Plan": "StudyPlan",
    "dat.tools.reproduce.Row": "StudyRow",
    "dat.tools.reproduce.prove": "check_theorem",
    "dat.optim.OuterOracle": "OptimizerSettings",
    "dat.train.Listener": "Callback",
    "dat.train.Resumption": "Checkpoint",
    "dat.train.Saver": "Checkpointer",
    "dat.train.loggers.base.Run": "RunInfo",
}
ATTRIBUTES: dict[tuple[type, str], str] = {
    (dat.AttackTarget, "pick"): "select",
    (dat.AttackTarget, "see"): "forward",
    (dat.AttackTarget, "wrong"): "misclassified",
    (dat.Batch, "pick"): "select",
    (dat.Exchange, "share"): "all_gather_stats",
    (dat.Objective, "check_team"): "check_subgroup",
    (dat.PGD, "pace"): "effective_step_size",
    (dat.Smoothed, "settled"): "with_fixed_noise",
    (dat.ThreatModel, "random_edge"): "random_boundary_start",
    (dat.ThreatModel, "reach"): "step_to_hyperplane",
    (dat.World, "meet"): "barrier",
    (SuiteResult, "fallen"): "broken",
    (SuiteResult, "standing"): "robust",
}
FIELDS = [
    (SuiteResult(("pgd",), torch.tensor([0, 1])), "fell", "broken_by"),
    (
        dat.Batch(torch.zeros(1), torch.zeros(1), Streams.of(0, "test", index=torch.arange(1))),
        "team",
        "subgroup",
    ),
]


@pytest.mark.parametrize("old", MODULES)
def test_an_old_name_of_a_module_is_the_new_one(old: str) -> None:
    module, _, name = old.rpartition(".")
    home: Any = importlib.import_module(module)
    with pytest.warns(DeprecationWarning, match=rf"{old} is deprecated, use {module}.\w+"):
        value = getattr(home, name)
    assert value is getattr(home, MODULES[old])
    assert name not in getattr(home, "__all__", ())


@pytest.mark.parametrize(("owner", "old"), ATTRIBUTES)
def test_an_old_method_is_the_new_one(owner: type, old: str) -> None:
    new = ATTRIBUTES[owner, old]
    with pytest.warns(DeprecationWarning, match=rf"{old} is deprecated, use \w+\.{new}"):
        value = getattr(owner, old)
    assert value == getattr(owner, new)


@pytest.mark.parametrize(("instance", "old", "new"), FIELDS, ids=lambda value: str(value)[:20])
def test_an_old_field_is_the_new_one(instance: object, old: str, new: str) -> None:
    with pytest.warns(DeprecationWarning, match=rf"{old} is deprecated, use \w+\.{new}"):
        assert getattr(instance, old) is getattr(instance, new)
