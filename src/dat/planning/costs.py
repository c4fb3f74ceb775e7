"""The constants of a machine that the model of an exchange needs, measured or built in."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from dat.comm.world import cores
from dat.files import write_whole

FILE = "costs.json"
JOBS = ("encode", "decode", "add", "measure")
BUILT_IN = "built in"


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds, of one thread where nothing else is said. The defaults are rough figures for a
    core of a server of 2021 (AMD EPYC, AVX2), not a measurement."""

    kernels: Mapping[str, Mapping[int, float]] = field(
        default_factory=lambda: {
            "encode": {32: 0.35e-9, 16: 2.0e-9, 8: 0.60e-9, 4: 0.65e-9, 2: 0.65e-9},
            "decode": {32: 0.35e-9, 16: 0.35e-9, 8: 0.30e-9, 4: 0.40e-9, 2: 0.40e-9},
            "add": {32: 0.35e-9, 16: 0.35e-9, 8: 0.25e-9, 4: 0.35e-9, 2: 0.35e-9},
            "measure": {32: 0.35e-9, 16: 0.30e-9, 8: 0.30e-9, 4: 0.30e-9, 2: 0.30e-9},
        }
    )
    """By job and bits, a value: encode; decode; add, for each message that is added up; measure,
    the first part of an encoding. Memory is as busy as with one worker a core."""
    byte: float = 0.65e-9
    """Cores' time for a byte that is sent and a byte that is got, through gloo and TCP."""
    stream: float = 0.45e-9
    """A byte that a worker sends and gets at once, where the link is no limit."""
    ring_byte: float = 0.80e-9
    """As `byte`, in an all-reduce, which adds up."""
    ring_stream: float = 0.60e-9
    message: float = 15e-6
    """Cores' time to send a message or to get one."""
    latency: float = 60e-6
    """From a worker that sends to one that has waited and goes on, besides the link's."""
    bucket: float = 150e-6
    """A bucket's hand-over from thread to thread, for each stage."""
    origin: str = BUILT_IN
    """Where the figures come from."""
    machine: str = ""
    """The machine that they were measured on."""

    def kernel(self, job: str, bits: int) -> float:
        """Seconds a value; bits that were not measured cost what the next larger ones do."""
        known = self.kernels[job]
        return known[min((it for it in known if it >= bits), default=max(known))]

    def describe(self) -> list[tuple[str, str]]:
        """Names and figures, for people."""
        rows = [
            (f"{job}, {bits} bits", f"{1e9 * seconds:.2f} ns a value")
            for job in ("encode", "decode", "add")
            for bits, seconds in sorted(self.kernels[job].items(), reverse=True)
            if bits in (32, 8, 4)
        ]
        for name, what in (("byte", "a byte"), ("ring_byte", "a byte in an all-reduce")):
            rows.append((f"cores, {what}", f"{1e9 * getattr(self, name):.2f} ns"))
        for name, what in (
            ("stream", "fastest exchange"),
            ("ring_stream", "fastest all-reduce"),
        ):
            rows.append((what, f"{8e-9 / max(getattr(self, name), 1e-12):.1f} Gbit/s"))
        for name in ("message", "latency", "bucket"):
            rows.append((name, f"{1e6 * getattr(self, name):.0f} us"))
        return rows


def fingerprint() -> str:
    """What has to be the same for measured figures to hold."""
    listing = Path("/proc/cpuinfo")
    lines = listing.read_text().splitlines() if listing.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    words = (names[0] if names else platform.machine(), f"{cores()} cores", device)
    return ", ".join((*words, f"torch {torch.__version__}"))


def costs_file() -> Path:
    """dat/costs.json in the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "dat" / FILE


def save(costs: Costs, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, (json.dumps(asdict(costs), indent=2) + "\n").encode())


def load(path: Path | None = None) -> Costs:
    """What was measured on this machine, or what is built in."""
    file = path or costs_file()
    if not file.is_file():
        return Costs()
    found = read(file)
    return found if found.machine == fingerprint() else Costs()


def read(path: Path) -> Costs:
    """The figures in a file, wherever they were measured."""
    try:
        values: dict[str, Any] = json.loads(path.read_text())
        values["kernels"] = {
            job: {int(bits): float(seconds) for bits, seconds in values["kernels"][job].items()}
            for job in JOBS
        }
        known = {it.name for it in fields(Costs)}
        return Costs(**{name: value for name, value in values.items() if name in known})
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(
            f"{path}: not the costs of a machine; measure them with dat plan --calibrate"
        ) from None
