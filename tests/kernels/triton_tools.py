"""Triton without a GPU: kernels that its interpreter runs on CPU tensors, and kernels that are
compiled for a GPU but not started."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest


def copy_of(name: str) -> ModuleType:
    """A copy of its own of a module; whoever imports the module gets another one."""
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextmanager
def interpreted(kernels: str, launch: str) -> Iterator[Any]:
    """A copy of the module `launch` that calls an interpreted copy of the module `kernels`.

    Triton decides when a kernel is defined, and looks again when it runs. The flag is on in this
    context alone.
    """
    triton = pytest.importorskip("triton")
    with triton.knobs.runtime.scope(), np.errstate(all="ignore"):
        triton.knobs.runtime.interpret = True
        module: Any = copy_of(launch)
        module.kernels = copy_of(kernels)
        yield module


class FakeDriver:
    """What Triton asks the driver of a GPU before it compiles a kernel."""

    def __init__(self, backend: str, arch: int | str, warp_size: int) -> None:
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget(backend, arch, warp_size)

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Compiling:
    """Stands for a kernel: each call compiles it for its arguments, and keeps the result."""

    def __init__(self, kernel: Any, compiled: list[Any]) -> None:
        self.kernel, self.compiled = kernel, compiled

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def call(*args: Any, **options: Any) -> None:
            self.compiled.append(self.kernel.warmup(*args, grid=grid, **options))

        return call


@contextmanager
def compiling(driver: FakeDriver, kernels: str, launch: str) -> Iterator[tuple[Any, list[Any]]]:
    """A copy of the module `launch` whose kernels are compiled and not started; and the results."""
    from triton.runtime import driver as drivers
    from triton.runtime.jit import JITFunction

    compiled: list[Any] = []
    source = copy_of(kernels)
    module: Any = copy_of(launch)
    found = {name: value for name, value in vars(source).items() if isinstance(value, JITFunction)}
    wrapped = {name: Compiling(kernel, compiled) for name, kernel in found.items()}
    module.kernels = SimpleNamespace(**wrapped)
    before = drivers._active
    drivers.set_active(driver)
    try:
        yield module, compiled
    finally:
        drivers._active = before
