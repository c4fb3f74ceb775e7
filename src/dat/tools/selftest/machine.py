"""The software and hardware that a report describes; neither names of hosts nor paths."""

from __future__ import annotations

import os
import platform
import re
import socket
from pathlib import Path
from typing import Any

import torch

from dat.core import devices
from dat.distributed import World
from dat.distributed.affinity import cores
from dat.jobs.doctor import KERNELS, built

PREFIXES = ("NCCL_", "RCCL_", "TORCH_NCCL_", "GLOO_", "OMP_", "MKL_", "TRITON_")
VARIABLES = (
    *("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"),
    *("CUDA_LAUNCH_BLOCKING", "CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE"),
    *("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"),
    *("DAT_NO_KERNEL", "TORCHINDUCTOR_CACHE_DIR"),
)
"""Environment variables that can explain a result; no others are reported."""
ADDRESSES = ("NCCL_COMM_ID", "NCCL_HOSTID")
"""Variables that would name a host."""
FOLDERS = re.compile(r"(?<![\w/.])(?:~|[A-Za-z]:)?(?:[/\\][^\s/\\:'\",;()\[\]]+)+[/\\]")
ADDRESS = re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b")


def describe(world: World) -> dict[str, Any]:
    """Software, hardware and relevant settings, as JSON types."""
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "processor": _processor(),
        "cores": cores(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "device": world.device.type,
        "devices": [description for _, description in devices.describe_devices()],
        "runtime": devices.runtime_version(),
        "driver": devices.driver_version(),
        "backend": world.backend,
        "nccl": devices.nccl_version(),
        "workers": world.size,
        "workers_per_node": world.local_size,
        "kernels": {use: built(module) for module, use in KERNELS.items()},
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "tf32": devices.is_accelerator(world.device) and devices.tf32_allowed(),
        "variables": variables(),
    }


def variables() -> dict[str, str]:
    """The relevant environment variables that are set."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if (name in VARIABLES or name.startswith(PREFIXES)) and name not in ADDRESSES
    }


def scrub(value: Any) -> Any:
    """A JSON value without the names of folders, of this host, or network addresses in its
    texts."""
    if isinstance(value, dict):
        return {key: scrub(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [scrub(item) for item in value]
    if not isinstance(value, str):
        return value
    text = ADDRESS.sub("ADDRESS", FOLDERS.sub(".../", value))
    host = socket.gethostname()
    return re.sub(rf"\b{re.escape(host)}\b", "HOST", text) if len(host) > 2 else text


def _processor() -> str:
    """The processor's name."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    found = re.search(r"^model name\s*:\s*(.+)$", text, flags=re.MULTILINE)
    return found[1].strip() if found else platform.machine()
