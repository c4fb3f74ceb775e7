"""The constants of a machine that the model of an exchange needs, measured or built-in."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from dat.core import devices
from dat.core.files import atomic_write
from dat.distributed.affinity import cores

FILE = "costs.json"
JOBS = ("encode", "decode", "add", "measure")
BUILT_IN = "built in"


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds, of a single thread unless stated otherwise. The defaults are rough values for a core
    of a server of 2021 (AMD EPYC, AVX2), not a measurement."""

    kernels: Mapping[str, Mapping[int, float]] = field(
        default_factory=lambda: {
            "encode": {32: 0.35e-9, 16: 2.0e-9, 8: 0.60e-9, 4: 0.65e-9, 2: 0.65e-9},
            "decode": {32: 0.35e-9, 16: 0.35e-9, 8: 0.30e-9, 4: 0.40e-9, 2: 0.40e-9},
            "add": {32: 0.35e-9, 16: 0.35e-9, 8: 0.25e-9, 4: 0.35e-9, 2: 0.35e-9},
            "measure": {32: 0.35e-9, 16: 0.30e-9, 8: 0.30e-9, 4: 0.30e-9, 2: 0.30e-9},
        }
    )
    """Per value, by job and bits: encode; decode; add, for each message in a sum; measure, the
    first part of encoding. Memory bandwidth is shared as with one worker per core."""
    byte: float = 0.65e-9
    """CPU time to send one byte and receive another, through gloo and TCP."""
    stream: float = 0.45e-9
    """Wall time to send a byte while receiving another, if the link is not the bottleneck."""
    ring_byte: float = 0.80e-9
    """Like `byte`, in an all-reduce, which also adds."""
    ring_stream: float = 0.60e-9
    message: float = 15e-6
    """CPU time to send or receive a message."""
    latency: float = 60e-6
    """From sending a message until its receiver continues, without the latency of the link."""
    bucket: float = 150e-6
    """Handing a bucket over between threads, per stage."""
    origin: str = BUILT_IN
    """Where the values come from."""
    machine: str = ""
    """The machine that was measured."""

    def kernel(self, job: str, bits: int) -> float:
        """Seconds per value; bits that were not measured cost as much as the next larger ones."""
        by_bits = self.kernels[job]
        return by_bits[min((known for known in by_bits if known >= bits), default=max(by_bits))]

    def describe(self) -> list[tuple[str, str]]:
        """Names and values to show to a user."""
        rows = [
            (f"{job}, {bits} bits", f"{1e9 * seconds:.2f} ns per value")
            for job in ("encode", "decode", "add")
            for bits, seconds in sorted(self.kernels[job].items(), reverse=True)
            if bits in (32, 8, 4)
        ]
        for name, what in (("byte", "per byte"), ("ring_byte", "per byte of an all-reduce")):
            rows.append((f"CPU time {what}", f"{1e9 * getattr(self, name):.2f} ns"))
        for name, what in (
            ("stream", "fastest exchange"),
            ("ring_stream", "fastest all-reduce"),
        ):
            rows.append((what, f"{8e-9 / max(getattr(self, name), 1e-12):.1f} Gbit/s"))
        for name in ("message", "latency", "bucket"):
            rows.append((name, f"{1e6 * getattr(self, name):.0f} us"))
        return rows


def fingerprint() -> str:
    """Identifies a machine for which measured values hold."""
    listing = Path("/proc/cpuinfo")
    lines = listing.read_text().splitlines() if listing.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    device = devices.device_name()
    words = (names[0] if names else platform.machine(), f"{cores()} cores", device)
    return ", ".join((*words, f"torch {torch.__version__}"))


def costs_file() -> Path:
    """dat/costs.json in the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "dat" / FILE


def save(costs: Costs, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, (json.dumps(asdict(costs), indent=2) + "\n").encode())


def load(path: Path | None = None) -> Costs:
    """The values measured on this machine, or the built-in ones."""
    file = path or costs_file()
    if not file.is_file():
        return Costs()
    costs = read(file)
    return costs if costs.machine == fingerprint() else Costs()


def read(path: Path) -> Costs:
    """The values in a file, whatever machine was measured."""
    try:
        values: dict[str, Any] = json.loads(path.read_text())
        values["kernels"] = {
            job: {int(bits): float(seconds) for bits, seconds in values["kernels"][job].items()}
            for job in JOBS
        }
        known = {field.name for field in fields(Costs)}
        return Costs(**{name: value for name, value in values.items() if name in known})
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(
            f"{path}: not a calibration; create one with dat plan --calibrate"
        ) from None
