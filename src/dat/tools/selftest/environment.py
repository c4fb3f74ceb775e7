"""Checks of the software's state: versions, deterministic settings, precision of float32."""

from __future__ import annotations

import torch

from dat.core import devices
from dat.distributed import backends
from dat.tools.selftest.result import Context, Result, failed, passed

OLDEST = (2, 13)
IEEE_ERROR, TF32_ERROR = 1e-5, 5e-3
"""Largest relative errors of a product of 512 terms; measured on a CPU: 4e-7. Inputs rounded to
10 bits, as in TF32, give 3e-4."""


def environment(context: Context) -> Result:
    """The versions that DAT needs, and the deterministic settings that it makes."""
    device = context.device
    version = tuple(map(int, torch.__version__.split(".")[:2]))
    if version < OLDEST:
        return failed(f"torch {torch.__version__} is too old", "install torch 2.13 or newer")
    if context.world.backend not in backends():
        return failed(f"torch has no backend {context.world.backend}", "install another torch")
    if devices.is_accelerator(device) and not torch.are_deterministic_algorithms_enabled():
        return failed("deterministic algorithms are off, although World.join enables them")
    parts = [f"torch {torch.__version__}", devices.device_name(device), context.world.backend]
    for name, value in (
        ("runtime", devices.runtime_version()),
        ("driver", devices.driver_version()),
    ):
        parts += [f"{name} {value}"] if value and devices.is_accelerator(device) else []
    parts.append("TF32 on" if context.tf32 else "IEEE float32")
    return passed(", ".join(parts), device=devices.device_name(device), tf32=context.tf32)


def float32(context: Context) -> Result:
    """Matrix products have the precision that the settings promise."""
    generator = context.generator("float32")
    a, b = (torch.randn(512, 512, generator=generator, dtype=torch.float64) for _ in range(2))
    a, b = a.float(), b.float()  # the same values on all devices
    exact = a.double() @ b.double()
    product = (a.to(context.device) @ b.to(context.device)).cpu().double()
    error = float((product - exact).abs().max() / exact.abs().max())
    limit = context.tolerance(IEEE_ERROR, TF32_ERROR)
    mode = "TF32" if context.tf32 else "IEEE"
    if not error <= limit:
        return failed(
            f"relative error {error:.1e} of a matrix product, above {limit:.0e} ({mode})",
            "unset NVIDIA_TF32_OVERRIDE and TORCH_ALLOW_TF32_CUBLAS_OVERRIDE; if that does not "
            "help, report it",
            error=error,
        )
    return passed(f"relative error {error:.1e} of a matrix product ({mode})", error=error)
