"""What this machine has for training, and what is missing: `dat doctor`."""

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

from dat.comm import backends
from dat.native import load

OK, NOTE, BAD = "ok", "note", "bad"
KERNELS = {
    "dat._native": "random numbers and crops",
    "dat.comm._kernel": "quantizers",
    "dat.optim._kernel": "LALR",
    "dat.convolve._kernel": "convolutions",
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
    """One thing that was looked at."""

    area: str
    what: str
    found: str
    state: str = OK
    advice: str = ""


def examine_machine() -> list[Finding]:
    """Everything, in the order in which people would ask; what cannot be asked here is left out."""
    areas = (_software, _processor, _devices, _kernels, _network, _disk, _extras)
    return [finding for area in areas for finding in area()]


def _software() -> Iterator[Finding]:
    from dat import __version__

    yield Finding("software", "dat", __version__)
    yield Finding("software", "Python", f"{platform.python_version()} ({sys.executable})")
    major, minor = map(int, torch.__version__.split(".")[:2])
    old = (major, minor) < (2, 13)
    advice = "DAT needs torch 2.13 or newer: install it into this environment" if old else ""
    yield Finding("software", "torch", torch.__version__, BAD if old else OK, advice)
    yield Finding("software", "system", f"{platform.system()} {platform.release()}")


def _processor() -> Iterator[Finding]:
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    usable, whole = len(cores) or os.cpu_count() or 1, os.cpu_count() or 1
    limited = usable < whole
    advice = "this process is bound to some of them" if limited else ""
    yield Finding("processor", "cores", f"{usable} of {whole}", NOTE if limited else OK, advice)
    yield Finding("processor", "instructions", torch.backends.cpu.get_cpu_capability())
    yield Finding("processor", "torch threads", str(torch.get_num_threads()))
    total = _memory()
    if total:
        yield Finding("processor", "memory", f"{total / 2**30:.1f} GiB")


def _memory() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 0


def _devices() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        built = torch.version.cuda is not None
        advice = (
            "torch was built for CUDA and finds no device: check the driver (nvidia-smi)"
            if built
            else "training runs on the CPU; for GPUs install a torch that is built for CUDA"
        )
        yield Finding("devices", "CUDA", "none", NOTE, advice)
    for number in range(torch.cuda.device_count()):
        it = torch.cuda.get_device_properties(number)
        bf16 = ", bf16" if torch.cuda.is_bf16_supported() else ""
        found = f"{it.name}, {it.total_memory / 2**30:.0f} GiB, {it.major}.{it.minor}{bf16}"
        yield Finding("devices", f"cuda:{number}", found)
    yield _backends()


def _backends() -> Finding:
    there = backends()
    if torch.cuda.is_available() and "nccl" not in there:
        return Finding("devices", "backends", ", ".join(there), BAD, "GPUs need nccl")
    if "gloo" not in there:
        return Finding("devices", "backends", ", ".join(there) or "none", BAD, "CPUs need gloo")
    return Finding("devices", "backends", ", ".join(there))


def _kernels() -> Iterator[Finding]:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    version = _said(compiler, "--version") if compiler else ""
    yield Finding(
        "kernels",
        "C compiler",
        version or "none",
        OK if compiler else NOTE,
        "" if compiler else "without one DAT installs, but its C kernels are left out",
    )
    avoided = os.environ.get("DAT_NO_KERNEL")
    for module, use in KERNELS.items():
        if avoided:
            yield Finding("kernels", use, "switched off", NOTE, "DAT_NO_KERNEL is set")
        elif importlib.util.find_spec(module) is None:
            advice = (
                "install a C compiler with OpenMP, then install DAT again; torch does it so far"
            )
            yield Finding("kernels", use, "not built", NOTE, advice)
        else:
            yield _built(module, use)


def _built(module: str, use: str) -> Finding:
    """Whether it loads; each is asked for the version that its own loader wants."""
    from dat.comm.kernel import library as quantizers
    from dat.convolve.kernel import available as convolves
    from dat.native import VERSION
    from dat.optim.kernel import library as lalr

    asks: dict[str, Callable[[], object]] = {
        "dat._native": lambda: load("dat._native", VERSION),
        "dat.comm._kernel": quantizers,
        "dat.optim._kernel": lalr,
        "dat.convolve._kernel": lambda: convolves() or None,
    }
    if asks[module]() is not None:
        return Finding("kernels", use, "works")
    if module == "dat.convolve._kernel" and torch.backends.cpu.get_cpu_capability() != "AVX2":
        return Finding("kernels", use, "not used", OK, "they are for processors with AVX2 at most")
    return Finding("kernels", use, "does not load", BAD, "it is of another version: install again")


def _said(*command: str) -> str:
    """The first line of what a program says."""
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
        odd = not set(chosen.split(",")) <= names
        advice = "there is no such interface" if odd else ""
        yield Finding("network", "chosen interface", chosen, BAD if odd else OK, advice)


def _resolves() -> tuple[str, str]:
    """Workers on several hosts find each other by name."""
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        return NOTE, "its own name has no address: give torchrun's --rdzv-endpoint an address"
    if address.startswith("127."):
        return OK, f"its name is {address}: fine on one machine; for several, an address of its own"
    return OK, ""


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _disk() -> Iterator[Finding]:
    from dat.data.place import cache_folder

    shared = Path("/dev/shm")
    if shared.is_dir():
        free = shutil.disk_usage(shared).free
        few = free < SHARED_MEMORY
        advice = "workers and loaders share memory there: give the container more" if few else ""
        yield Finding(
            "disk", "shared memory", f"{free / 2**30:.1f} GiB free", NOTE if few else OK, advice
        )
    for what, place in (("data", cache_folder()), ("here", Path.cwd())):
        there = next(it for it in (place, *place.parents) if it.exists())
        free = shutil.disk_usage(there).free
        writable = os.access(there, os.W_OK)
        advice = "" if writable else "it cannot be written to"
        found = f"{place}, {free / 2**30:.1f} GiB free"
        yield Finding("disk", what, found, OK if writable else BAD, advice)
    try:
        import resource

        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    except ImportError:
        return
    few = 0 <= most < OPEN_FILES
    advice = "raise it with ulimit -n: each worker takes some dozens" if few else ""
    yield Finding("disk", "open files", str(most), NOTE if few else OK, advice)


def _extras() -> Iterator[Finding]:
    for module, (use, extra) in EXTRAS.items():
        there = importlib.util.find_spec(module) is not None
        advice = "" if there else f'pip install "dat[{extra}]"'
        yield Finding("extras", use, "installed" if there else "not installed", OK, advice)
