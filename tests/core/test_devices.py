"""Which device a worker gets. The kinds of devices and their number are simulated."""

from __future__ import annotations

import pytest
import torch

from dat.core import devices


@pytest.fixture(autouse=True)
def no_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in devices.BOUND_BY_SLURM:
        monkeypatch.delenv(name, raising=False)


def machine(monkeypatch: pytest.MonkeyPatch, kind: str | None, count: int) -> None:
    monkeypatch.setattr(devices, "accelerator", lambda: kind)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)


@pytest.mark.parametrize("name", ["auto", "cpu"])
def test_without_an_accelerator_workers_run_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    machine(monkeypatch, None, 0)
    assert devices.choose(name, 1, 4) == torch.device("cpu")


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
@pytest.mark.parametrize("name", ["auto", "same"])
def test_each_worker_of_a_node_gets_its_own_device(
    monkeypatch: pytest.MonkeyPatch, kind: str, name: str
) -> None:
    machine(monkeypatch, kind, 4)
    name = kind if name == "same" else name
    assert [devices.choose(name, rank, 4) for rank in range(4)] == [
        torch.device(kind, rank) for rank in range(4)
    ]


def test_a_gpu_is_not_used_if_the_cpu_is_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, "cuda", 4)
    assert devices.choose("cpu", 0, 1) == torch.device("cpu")


@pytest.mark.parametrize("name", ["auto", "cuda"])
@pytest.mark.parametrize(("count", "workers"), [(4, 8), (1, 4)])
def test_too_few_gpus_are_an_error(
    monkeypatch: pytest.MonkeyPatch, name: str, count: int, workers: int
) -> None:
    machine(monkeypatch, "cuda", count)
    text = f"comm.device = {name}: this machine has {count} CUDA device.* for {workers} workers"
    with pytest.raises(ValueError, match=f"{text}; start at most {count}, or set comm.device=cpu"):
        devices.choose(name, 0, workers)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("SLURM_GPUS_PER_TASK", "1"),
        ("SLURM_TRES_PER_TASK", "cpu=4,gres/gpu=1"),
        ("SLURM_GPU_BIND", "per_task:1"),
    ],
)
def test_a_task_that_sees_one_gpu_uses_it(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    machine(monkeypatch, "cuda", 1)
    monkeypatch.setenv(variable, value)
    assert devices.choose("auto", 3, 4) == torch.device("cuda", 0)


def test_a_missing_kind_of_device_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, "xpu", 1)
    with pytest.raises(ValueError, match=r"comm.device = cuda: .* has only XPU; use xpu"):
        devices.choose("cuda", 0, 1)
    machine(monkeypatch, None, 0)
    with pytest.raises(ValueError, match=r"comm.device = cuda: .* has no CUDA device; use cpu"):
        devices.choose("cuda", 0, 1)


def test_tf32_is_off_inside_and_as_before_outside() -> None:
    convolutions = torch.backends.cudnn.conv  # type: ignore[attr-defined]
    before = convolutions.fp32_precision
    with devices.tf32(True):
        assert convolutions.fp32_precision == "tf32"
        with devices.tf32(False):
            assert convolutions.fp32_precision == "ieee"
        assert convolutions.fp32_precision == "tf32"
    assert convolutions.fp32_precision == before
