"""What Triton compiles our kernels to, for GPUs of two makers, without a GPU: instructions that
round as IEEE 754 says. Nothing is started."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from dat.distributed.quantizers import Buckets
from dat.kernels.optimizer import ADAM, CLASSIC, MOMENTUM, Moments
from tests.distributed.cases import layout_of, normal
from tests.kernels.triton_tools import FakeDriver, compiling

pytestmark = pytest.mark.slow
QUANTIZER = ("dat.kernels.quantize.triton_kernels", "dat.kernels.quantize.triton_launch")
OPTIMIZER = ("dat.kernels.optimizer_triton", "dat.kernels.optimizer_triton_launch")
INEXACT = re.compile(r"\b(fma|mad)\.\w+\.f|\bdiv\.(full|approx)|\b(rcp|sqrt)\.approx|\.ftz\b")
"""PTX: fused, approximate, or taking subnormals for zero."""


@pytest.fixture(params=["cuda", "hip"])
def driver(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> FakeDriver:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    targets: dict[str, tuple[int | str, int]] = {"cuda": (80, 32), "hip": ("gfx942", 64)}
    return FakeDriver(request.param, *targets[request.param])


def check(compiled: list[Any], names: set[str]) -> None:
    assert {kernel.name for kernel in compiled} == names
    for kernel in compiled:
        assert kernel.metadata.enable_fp_fusion is False
        if "ptx" in kernel.asm:
            assert not INEXACT.search(kernel.asm["ptx"]), kernel.name
        else:  # divisions and roots are sequences of fused operations; LLVM may not make others
            assert " contract " not in kernel.asm["llir"]


@pytest.mark.parametrize("bits", [2, 7, 16])
def test_the_quantizer(driver: FakeDriver, bits: int) -> None:
    with compiling(driver, *QUANTIZER) as (launch, compiled):
        for norm, random, mode in (("max", True, "set"), ("l2", False, "subtract")):
            quantizer = Buckets(bits=bits, size=64, norm=norm)
            layout, x = layout_of(quantizer, (33, 5), (9,)), normal(174)
            message = torch.zeros(layout.size, dtype=torch.uint8)
            options = {"bits": bits, "levels": quantizer.levels, "norm": norm, "random": random}
            launch.encode(x, layout, **options, key=7, message=message)
            launch.decode(message[None], layout, bits=bits, mode=mode, out=x)
    names = {"measure_tiles", "write_steps", "write_floats", "write_codes"}
    check(compiled, names | {"read_codes", "read_floats"})


@pytest.mark.parametrize("kind", [ADAM, MOMENTUM, CLASSIC])
def test_the_optimizers(driver: FakeDriver, kind: int) -> None:
    with compiling(driver, *OPTIMIZER) as (launch, compiled):
        layers = [[torch.ones(9) for _ in range(3 + (kind == ADAM))]]
        moments = Moments(kind=kind, first=0.1, keep=0.9, second=0.1, denominators=[(1.0, 1e-6)])
        options: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.1, "c_l": 0.0, "c_u": 10.0}
        launch.update(moments, layers, torch.ones(1), adapt=True, **options)
    check(compiled, {"first_pass", "add_lanes", "write_ratios", "second_pass"})
