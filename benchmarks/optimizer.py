"""A step of LALR over the weights of a ResNet-50, beside the paper's LAMB, timm's and AdamW.

    python benchmarks/optimizer.py [--official lamb.py] [--timm timm/optim] [--repeats 15]

`lamb.py` is a file of github.com/dat-2022/dat, `timm/optim` a folder of timm's source; without them
their rows are left out. All take turns in one process, in another order every time, and the median
counts. Every optimizer has weights, gradients and state of its own, so none finds them in a cache.
`copy` is a memcpy of as many bytes as the weights have, the unit of what the memory can do.
"""

from __future__ import annotations

import argparse
import importlib
import random
import statistics
import sys
import time
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from runs import table
from torch import nn

from dat.kernels import optimizer as kernel
from dat.models import build_model
from dat.optim import LAMB, LARS, OptimizerSettings

Make = Callable[[nn.Module], torch.optim.Optimizer]


def peer(folder: Path, module: str) -> Any:
    """A module of someone else's package, without the package around it."""
    package = types.ModuleType("peer_" + folder.name.replace("-", "_"))
    package.__path__ = [str(folder)]
    sys.modules[package.__name__] = package
    return importlib.import_module(f"{package.__name__}.{module}")


def others(official: Path | None, timm: Path | None) -> dict[str, Make]:
    found: dict[str, Make] = {}
    if official:
        sys.modules.setdefault("tensorboardX", types.ModuleType("tensorboardX")).__dict__.update(
            SummaryWriter=object
        )
        theirs = peer(official.parent, official.stem).Lamb
        found["the paper's LAMB"] = lambda model: theirs(model.parameters(), weight_decay=1e-4)
    if timm:
        lamb = peer(timm, "lamb").Lamb
        found["timm's LAMB"] = lambda model: lamb(model.parameters(), weight_decay=1e-4)
    return found


def state_of(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of state."""
    values = (value for state in optimizer.state.values() for value in state.values())
    return sum(value.nbytes for value in values if isinstance(value, torch.Tensor))


def without_kernel(step: Callable[[], object]) -> Callable[[], object]:
    def stepped() -> None:
        library, kernel.library = kernel.library, lambda: None
        step()
        kernel.library = library

    return stepped


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--official", type=Path, metavar="lamb.py")
    parser.add_argument("--timm", type=Path, metavar="timm/optim")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")  # the paper's code calls torch as one did in 2019
    torch.set_num_threads(arguments.threads)

    oracles: dict[str, OptimizerSettings] = {
        "LAMB": LAMB(),
        "LAMB, by torch's foreach": LAMB(),
        "LARS": LARS(),
        "LARS, classic": LARS(preset="classic"),
    }
    ways: dict[str, Make] = dict(oracles)
    ways["torch's AdamW, fused"] = lambda model: torch.optim.AdamW(model.parameters(), fused=True)
    ways |= others(arguments.official, arguments.timm)
    steps: dict[str, Callable[[], object]] = {}
    states: dict[str, int] = {}
    values = 0
    for name, make in ways.items():
        model = build_model("resnet50", 1000)
        values = sum(param.numel() for param in model.parameters())
        for param in model.parameters():
            param.grad = torch.randn_like(param)
        optimizer = make(model)
        steps[name] = without_kernel(optimizer.step) if "foreach" in name else optimizer.step
        steps[name]()
        states[name] = state_of(optimizer)
    here, there = torch.randn(values), torch.randn(values)
    steps["copy of the weights"] = lambda: here.copy_(there)

    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(arguments.repeats):
        for name in random.sample(list(steps), len(steps)):
            start = time.perf_counter()
            steps[name]()
            times[name].append(1e3 * (time.perf_counter() - start))
    medians = {name: statistics.median(values) for name, values in times.items()}
    rows = [
        [
            name,
            f"{median:.1f}",
            f"{min(times[name]):.1f}",
            f"{median / medians['LAMB']:.2f}",
            f"{states.get(name, 0) / 4 / values:.2f}",
        ]
        for name, median in medians.items()
    ]
    columns = ["One step", "ms, median", "ms, least", "times LAMB", "state, times the weights"]
    print(table(columns, rows))


if __name__ == "__main__":
    main()
