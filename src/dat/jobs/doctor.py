"""Checks this machine's software and hardware: `dat doctor`."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from dat.core import devices
from dat.core.imports import name_clash
from dat.distributed.world import backends, default_backend
from dat.kernels.native import load

OK, NOTE, BAD = "ok", "note", "bad"
KERNELS = {
    "dat.kernels._native": "random numbers and crops",
    "dat.kernels.quantize._kernel": "quantizers",
    "dat.kernels._optimizer": "LALR",
    "dat.kernels.convolve._kernel": "convolutions",
}
EXTRAS = {
    "pyarrow": ("Parquet files as data", "parquet"),
    "wandb": ("Weights & Biases", "wandb"),
    "mlflow": ("MLflow", "mlflow"),
    "onnx": ("export to ONNX", "onnx"),
}
SHARED_MEMORY = 256 << 20
OPEN_FILES = 1024


class Finding(NamedTuple):
    """The result of one check; `dat doctor --json` prints its fields."""

    area: str
    what: str
    found: str
    state: str = OK
    advice: str = ""


def check_machine() -> list[Finding]:
    """Run all checks that this system supports."""
    areas = (_software, _processor, _devices, _kernels, _network, _disk, _extras, _next_step)
    return [finding for area in areas for finding in area()]


def _next_step() -> Iterator[Finding]:
    advice = "dat selftest checks results on this hardware, in a minute or two"
    yield Finding("results", "correctness", "not tested here", NOTE, advice)


def _software() -> Iterator[Finding]:
    from dat import __version__

    clash = name_clash()
    yield Finding("software", "dat", __version__, BAD if clash else OK, clash)
    yield Finding("software", "Python", f"{platform.python_version()} ({sys.executable})")
    major, minor = map(int, torch.__version__.split(".")[:2])
    old = (major, minor) < (2, 13)
    advice = "DAT needs torch 2.13 or newer: install it into this environment" if old else ""
    yield Finding("software", "torch", torch.__version__, BAD if old else OK, advice)
    yield Finding("software", "system", f"{platform.system()} {platform.release()}")


def _processor() -> Iterator[Finding]:
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    usable, total = len(cores) or os.cpu_count() or 1, os.cpu_count() or 1
    limited = usable < total
    advice = "this process is pinned to a part of the cores" if limited else ""
    yield Finding("processor", "cores", f"{usable} of {total}", NOTE if limited else OK, advice)
    yield Finding("processor", "instructions", torch.backends.cpu.get_cpu_capability())
    yield Finding("processor", "torch threads", str(torch.get_num_threads()))
    memory = _memory()
    if memory:
        yield Finding("processor", "memory", f"{memory / 2**30:.1f} GiB")


def _memory() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 0


def _devices() -> Iterator[Finding]:
    if devices.accelerator() is None:
        yield Finding("devices", "GPU", "none", NOTE, devices.missing_accelerator())
    for name, description in devices.describe_devices():
        yield Finding("devices", name, description)
    yield _backends()


def _backends() -> Finding:
    available = backends()
    names = ", ".join(available)
    kind = devices.accelerator()
    needed = "gloo" if kind is None else default_backend(torch.device(kind))
    if needed not in available:
        return Finding("devices", "backends", names or "none", BAD, f"{kind} needs {needed}")
    if "gloo" not in available:
        return Finding("devices", "backends", names or "none", BAD, "CPUs need gloo")
    return Finding("devices", "backends", names)


def _kernels() -> Iterator[Finding]:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    version = _first_line(compiler, "--version") if compiler else ""
    yield Finding(
        "kernels",
        "C compiler",
        version or "none",
        OK if compiler else NOTE,
        "" if compiler else "without a compiler, DAT is installed without its C kernels",
    )
    disabled = os.environ.get("DAT_NO_KERNEL")
    for module, use in KERNELS.items():
        if disabled:
            yield Finding("kernels", use, "disabled", NOTE, "DAT_NO_KERNEL is set")
        elif importlib.util.find_spec(module) is None:
            advice = (
                "install a C compiler with OpenMP, then reinstall DAT; until then PyTorch is used"
            )
            yield Finding("kernels", use, "not built", NOTE, advice)
        else:
            yield _built(module, use)


def _built(module: str, use: str) -> Finding:
    """Whether a kernel works, for `dat doctor`."""
    if built(module):
        return Finding("kernels", use, "works")
    if (
        module == "dat.kernels.convolve._kernel"
        and torch.backends.cpu.get_cpu_capability() != "AVX2"
    ):
        return Finding("kernels", use, "not used", OK, "used only with AVX2 and without AVX-512")
    return Finding("kernels", use, "does not load", BAD, "wrong version: reinstall DAT")


def built(module: str) -> bool:
    """Whether a kernel loads, in the version that its own loader requires."""
    from dat.kernels.convolve.kernel import available as convolves
    from dat.kernels.native import VERSION
    from dat.kernels.optimizer import library as lalr
    from dat.kernels.quantize.codec import library as quantizers

    loaders: dict[str, Callable[[], object]] = {
        "dat.kernels._native": lambda: load("dat.kernels._native", VERSION),
        "dat.kernels.quantize._kernel": quantizers,
        "dat.kernels._optimizer": lalr,
        "dat.kernels.convolve._kernel": lambda: convolves() or None,
    }
    return loaders[module]() is not None


def _first_line(*command: str) -> str:
    """The first line of a program's output."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return (done.stdout or done.stderr).strip().partition("\n")[0]


def _network() -> Iterator[Finding]:
    yield Finding("network", "host", socket.gethostname(), *_resolves())
    for _, name in socket.if_nameindex():
        folder = Path("/sys/class/net") / name
        state, speed = _read(folder / "operstate"), _read(folder / "speed")
        known = speed.isdecimal() and int(speed) > 0
        rate = f", {int(speed) / 1000:g} Gbit/s" if known else ""
        yield Finding("network", name, f"{state or 'unknown'}{rate}")
    chosen = os.environ.get("GLOO_SOCKET_IFNAME") or os.environ.get("NCCL_SOCKET_IFNAME")
    if chosen:
        names = {name for _, name in socket.if_nameindex()}
        unknown = not set(chosen.split(",")) <= names
        advice = "there is no such interface" if unknown else ""
        yield Finding("network", "chosen interface", chosen, BAD if unknown else OK, advice)


def _resolves() -> tuple[str, str]:
    """Whether the host name resolves: workers on several hosts find each other by name."""
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        return NOTE, "its name does not resolve: use an IP address for torchrun's --rdzv-endpoint"
    if address.startswith("127."):
        return OK, f"its name resolves to {address}: fine on one machine, not for several"
    return OK, ""


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _disk() -> Iterator[Finding]:
    from dat.data.cache_dir import cache_folder

    shared = Path("/dev/shm")
    if shared.is_dir():
        free = shutil.disk_usage(shared).free
        small = free < SHARED_MEMORY
        advice = "workers and loaders need it: increase the container's shared memory"
        yield Finding(
            "disk",
            "shared memory",
            f"{free / 2**30:.1f} GiB free",
            NOTE if small else OK,
            advice if small else "",
        )
    for what, folder in (("data", cache_folder()), ("here", Path.cwd())):
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        free = shutil.disk_usage(existing).free
        writable = os.access(existing, os.W_OK)
        advice = "" if writable else "no permission to write"
        text = f"{folder}, {free / 2**30:.1f} GiB free"
        yield Finding("disk", what, text, OK if writable else BAD, advice)
    try:
        import resource

        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    except ImportError:
        return
    small = 0 <= limit < OPEN_FILES
    advice = "raise the limit with ulimit -n: each worker needs dozens" if small else ""
    yield Finding("disk", "open files", str(limit), NOTE if small else OK, advice)


def _extras() -> Iterator[Finding]:
    for module, (use, extra) in EXTRAS.items():
        installed = importlib.util.find_spec(module) is not None
        advice = "" if installed else f'pip install "dat-robust[{extra}]"'
        yield Finding("extras", use, "installed" if installed else "not installed", OK, advice)
