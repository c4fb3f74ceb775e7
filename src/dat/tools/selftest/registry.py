"""The checks of `dat selftest`, in their order. One line here and a function in its module adds
one; nothing here imports torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from dat.core.settings import did_you_mean

if TYPE_CHECKING:
    from dat.tools.selftest.result import Context, Result


class Check(NamedTuple):
    """A check by name: the function of that name, in a module of this package."""

    name: str
    module: str
    what: str

    def load(self) -> Callable[[Context], Result]:
        """The function; all workers call it, as it may use collectives."""
        module = importlib.import_module(f"dat.tools.selftest.{self.module}")
        function: Callable[[Context], Result] = getattr(module, self.name)
        return function


CHECKS = (
    Check("environment", "environment", "versions, devices, deterministic settings"),
    Check("float32", "environment", "precision of float32 products, in the configured TF32 mode"),
    Check("rng", "kernels", "random numbers on this device and on the CPU, bit for bit"),
    Check("quantizer", "kernels", "codes of all bit widths against the reference, bit for bit"),
    Check("optimizer", "kernels", "LALR and SGD steps against float64 on the CPU"),
    Check("convolution", "kernels", "convolutions and their gradients against float64 on the CPU"),
    Check("folding", "folding", "the folded network that attacks use against the model"),
    Check("protocols", "protocols", "each protocol's sum of gradients against float64"),
    Check("replicas", "replicas", "weights of all workers are equal after quantized steps"),
    Check("order", "order", "workers wait for the sum if backward or exchange is slow"),
    Check("determinism", "determinism", "repeated and resumed runs give the same bits"),
    Check("float16", "precision", "RA under attack in float16 against float32"),
    Check("bfloat16", "precision", "RA under attack in bfloat16 against float32"),
    Check("link", "link", "bandwidth between workers (informational)"),
    Check("overlap", "link", "communication that training waits for (informational)"),
)


def select(names: Sequence[str] | None) -> tuple[Check, ...]:
    """The checks of these names in the registry's order; all of them by default."""
    known = {check.name: check for check in CHECKS}
    for name in names or ():
        if name not in known:
            raise ValueError(f"--only {name}: unknown{did_you_mean(name, known)} (see --list)")
    return tuple(check for check in CHECKS if names is None or check.name in names)
