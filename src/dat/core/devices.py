"""The one module that knows kinds of devices: streams, events, memory, seeds, number formats.

Everything else asks here, so that GPUs of all makers, and the fake device of the tests, take the
same path. The CPU has neither streams nor events: for it, these functions return None or do
nothing.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dat.core.lazy import torch

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

DEVICES = ("auto", "cpu", "cuda", "xpu", "mps")
"""What `comm.device` accepts. `cuda` stands for AMD's GPUs as well."""
BOUND_BY_SLURM = ("SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_GPU_BIND")
"""Set where a task may see fewer GPUs than its node has."""
CUBLAS_WORKSPACE = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
"""cuBLAS only repeats its results with a workspace of fixed size."""


def is_accelerator(device: torch.device) -> bool:
    """Whether work on the device is put on streams, and runs behind the host."""
    return device.type != "cpu"


def accelerator() -> str | None:
    """The kind of accelerator of this machine, if it has one."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None else str(found.type)


def choose(name: str, local_rank: int, local_size: int) -> torch.device:
    """The device of a worker; `local_size` workers share this node. With a number, as in `cuda:1`,
    it is that device.

    A GPU is never silently ignored: too few GPUs for the workers are an error, unless the user asks
    for the CPU.
    """
    kind = accelerator()
    asked, _, number = name.partition(":")
    if asked == "cpu" or (name == "auto" and kind is None):
        return torch.device("cpu")
    if asked not in ("auto", kind):
        wanted = asked.upper()
        has = f"only {kind.upper()}" if kind else f"no {wanted} device"
        raise ValueError(f"comm.device = {name}: this machine has {has}; use {kind or 'cpu'}")
    assert kind is not None
    count = torch.accelerator.device_count()
    if number and int(number) < count:
        return torch.device(kind, int(number))
    if count >= local_size and not number:
        return torch.device(kind, local_rank)
    if count == 1 and _is_bound(os.environ):
        return torch.device(kind, 0)  # every task sees one device, its own
    raise ValueError(
        f"comm.device = {name}: this machine has {count} {kind.upper()} device{'s' * (count != 1)} "
        f"for {local_size} workers; start at most {count}, or set comm.device=cpu"
    )


def _is_bound(environment: Mapping[str, str]) -> bool:
    """Whether the scheduler gives each task devices of its own."""
    bound = (environment.get(name, "") for name in BOUND_BY_SLURM)
    return any("gpu" in value or value.isdigit() or "per_task" in value for value in bound)


def set_up(device: torch.device, *, deterministic: bool) -> None:
    """Make it this process's device, with float32 as IEEE defines it.

    With `deterministic`, torch raises an error where it has no deterministic kernel;
    `dat.kernels.deterministic` has some of those that are missing.
    """
    if not is_accelerator(device):
        return
    if deterministic:
        os.environ.setdefault(*CUBLAS_WORKSPACE)  # read when the device is first used
    torch.accelerator.set_device_index(device.index or 0)
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(deterministic)
    determinism: Any = torch.utils.deterministic
    determinism.fill_uninitialized_memory = False  # costs time; we read no garbage
    _set_float32("ieee")


def dispatch_key(device: torch.device) -> str:
    """The dispatch key of this kind of device in torch."""
    keys = {"cpu": "CPU", "cuda": "CUDA", "xpu": "XPU", "mps": "MPS"}
    return keys.get(device.type, "PrivateUse1")


def tf32_allowed() -> bool:
    """Whether any float32 operation may use TF32."""
    return any(part.fp32_precision == "tf32" for part in _float32_settings())


def _float32_settings() -> tuple[Any, ...]:
    cudnn: Any = torch.backends.cudnn
    cuda: Any = torch.backends.cuda
    return cudnn.conv, cudnn.rnn, cuda.matmul


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Whether, inside the context, float32 convolutions and matrix products may round their inputs
    to 10 bits. torch's default is that convolutions may; ours, that nothing may."""
    before = [part.fp32_precision for part in _float32_settings()]
    _set_float32("tf32" if allowed else "ieee")
    try:
        yield
    finally:
        for part, mode in zip(_float32_settings(), before, strict=True):
            part.fp32_precision = mode


def _set_float32(mode: str) -> None:
    for part in _float32_settings():
        part.fp32_precision = mode


# Streams and events


def new_stream(device: torch.device) -> torch.Stream | None:
    """A stream for work beside that of the current stream."""
    return torch.Stream(device) if is_accelerator(device) else None


@contextmanager
def side_stream(stream: torch.Stream | None) -> Iterator[None]:
    """Put the work inside the context on this stream, after all that the current stream has."""
    if stream is None:
        yield
        return
    stream.wait_stream(torch.accelerator.current_stream(stream.device))
    with stream:
        yield


def record_event(device: torch.device, *, timed: bool = False) -> torch.Event | None:
    """An event that the current stream reaches after its work so far."""
    if not is_accelerator(device):
        return None
    event = torch.Event(device, enable_timing=timed)
    event.record()
    return event


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if is_accelerator(device):
        torch.accelerator.synchronize(device)


def future_devices(device: torch.device) -> list[Any]:
    """The devices that a `torch.futures.Future` has to know: waiting for it then orders the current
    stream after the work on the tensors in its value, and after nothing else."""
    return [device] if is_accelerator(device) else []


# Memory


def pins_memory(device: torch.device) -> bool:
    """Whether page-locked host memory makes copies to the device faster."""
    return is_accelerator(device) and device.type != "mps"


def free_memory(device: torch.device) -> int | None:
    """Free bytes of the device; None for the CPU, which shares its memory with everything else."""
    return int(torch.accelerator.get_memory_info(device)[0]) if is_accelerator(device) else None


def allocated_memory(device: torch.device) -> int:
    """Bytes in tensors on an accelerator."""
    return int(torch.accelerator.memory_allocated(device))


def peak_memory(device: torch.device) -> int:
    """The most bytes in tensors on an accelerator since `reset_peak_memory`."""
    return int(torch.accelerator.max_memory_allocated(device))


def reset_peak_memory(device: torch.device) -> None:
    torch.accelerator.reset_peak_memory_stats(device)


def release_cached_memory(device: torch.device) -> None:
    """Give back cached memory after an allocation has failed."""
    if is_accelerator(device):
        torch.accelerator.empty_cache()


# Random numbers


@contextmanager
def seeded_generators(device: torch.device, key: int) -> Iterator[None]:
    """Seed torch's global generators of the CPU and of this device alone, and restore them."""
    accelerated = is_accelerator(device)
    with torch.random.fork_rng(
        [device] if accelerated else [], device_type=device.type if accelerated else "cuda"
    ):
        torch.default_generator.manual_seed(key)
        if accelerated:
            torch.get_device_module(device).manual_seed(key)
        yield


# What this machine has


def device_name(device: torch.device | None = None) -> str:
    """The name of the current accelerator; `cpu` without one."""
    kind = accelerator() if device is None else device.type
    if kind in (None, "cpu"):
        return "cpu"
    module = torch.get_device_module(kind)
    return str(module.get_device_name()) if hasattr(module, "get_device_name") else str(kind)


def profiler_activities(device: torch.device) -> list[Any]:
    """What torch's profiler records."""
    from torch.profiler import ProfilerActivity, supported_activities

    own = {"cuda": ProfilerActivity.CUDA, "xpu": ProfilerActivity.XPU}.get(device.type)
    return [ProfilerActivity.CPU, *({own} & supported_activities() if own else ())]


def describe_devices() -> Iterator[tuple[str, str]]:
    """The name and a description of each accelerator."""
    kind = accelerator()
    for number in range(torch.accelerator.device_count() if kind else 0):
        device = torch.device(str(kind), number)
        module = torch.get_device_module(kind)
        words = [str(kind)]
        if hasattr(module, "get_device_properties"):
            found = module.get_device_properties(number)
            words = [found.name, f"{found.total_memory / 2**30:.0f} GiB"]
            if hasattr(found, "major"):
                words.append(f"compute capability {found.major}.{found.minor}")
        if getattr(module, "is_bf16_supported", lambda: False)():
            words.append("bf16")
        yield str(device), ", ".join(words)


def missing_accelerator() -> str:
    """Why there is no accelerator, and what to do."""
    if torch.version.cuda is not None or torch.version.hip is not None:
        return "torch is built for GPUs but finds none: check the driver (nvidia-smi, rocm-smi)"
    return "training runs on the CPU; for GPUs, install a build of torch with CUDA, ROCm or XPU"


def runtime_version() -> str | None:
    """The version of CUDA or ROCm that torch is built for."""
    return torch.version.cuda or torch.version.hip


def driver_version() -> str | None:
    """The version of NVIDIA's or AMD's driver, if this machine has one and says so."""
    with suppress(OSError):
        return Path("/sys/module/amdgpu/version").read_text().strip()
    command = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().partition("\n")[0]


def nccl_version() -> str | None:
    """The version of NCCL, or of RCCL, that torch is built with."""
    if not hasattr(torch._C, "_nccl_version"):
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))


def by_device(device: torch.device, *, cpu: int, accelerator: int) -> int:
    """A size that is tuned separately for CPUs and accelerators."""
    return accelerator if is_accelerator(device) else cpu


def has_float64(device: torch.device) -> bool:
    return device.type != "mps"


def compiles_by_default(device: torch.device) -> bool:
    """Whether `torch.compile` gains much: on CPUs it gains nothing beyond folding."""
    return is_accelerator(device) and device.type != "mps"


def supports_triton(device: torch.device) -> bool:
    """Whether our Triton kernels are compiled for this device; Triton itself may be missing."""
    if device.type != "cuda":
        return False
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (7, 0)


def autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[Any]:
    """Mixed precision on this device."""
    return nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype)
