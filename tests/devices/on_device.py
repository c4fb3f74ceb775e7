"""Runs everything in processes of their own, whose accelerator is the simulated device: what is
computed, trained and exchanged there is compared with the CPU; the results are written as JSON."""

from __future__ import annotations

import json
import os
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore, HashStore
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from dat.attacks import PGD
from dat.distributed import World
from tests.devices import cases, commands, groups, simulated, training
from tests.devices.device_code import RECORDER

CPU = torch.device("cpu")
EXACT = ("attack", "augmentation", "batches", "noise", "quantizer", "random", "threat")
"""Cases that give the same bits; others may sum in another order."""
LOW = ("bfloat16", "float16")
Case = Callable[[Any], Any]


def run_part(part: str, folder: Path) -> None:
    """Write whether each case of a part agrees, what was entered, and other findings."""
    torch.set_num_threads(1)
    device = simulated.install()
    simulated.on_operation.append(RECORDER.follow)
    run: Any = PARTS[part]
    results = dict(run(device, folder))
    found = {"results": results, "entered": RECORDER.entered()}
    rank = os.environ.get("RANK", "0")
    (folder / f"{part}-{rank}.json").write_text(json.dumps(found))
    os._exit(0)  # nothing here has to end in order


def compare(
    table: Iterable[tuple[str, Case]], on_cpu: Any, on_device: Any
) -> Iterator[tuple[str, str]]:
    """What is wrong with each case; nothing, if it agrees."""
    for name, case in table:
        try:
            with _disable_current_modes():
                expected = tree_leaves(case(on_cpu))
            with RECORDER.recording():
                actual = tree_leaves(case(on_device))
            assert len(actual) == len(expected)
            for mine, other in zip(actual, expected, strict=True):
                check(name, mine, other)
            yield name, ""
        except Exception:
            yield name, traceback.format_exc()


def check(name: str, actual: Any, expected: Any) -> None:
    if isinstance(expected, str):
        assert actual == expected
        return
    if not isinstance(expected, Tensor):
        low = any(dtype in name for dtype in LOW)
        distance = abs(actual - expected) if isinstance(expected, float) else actual != expected
        assert distance <= (0.1 if low else 1e-4) * max(abs(expected), 1.0), (
            f"{actual} instead of {expected}"
        )
        return
    assert actual.device.type == simulated.KIND, "the result is not on the device"
    assert actual.dtype == expected.dtype
    values, expected = actual.detach().cpu(), expected.detach()
    if name.startswith(EXACT):
        assert torch.equal(values, expected)
        return
    tolerance = 0.05 if any(dtype in name for dtype in LOW) else 1e-4
    largest = max(float(expected.abs().max()), 1e-30) if expected.numel() else 1.0
    torch.testing.assert_close(values, expected, rtol=0, atol=tolerance * largest)


def components(device: torch.device, folder: Path) -> Iterator[tuple[str, Any]]:
    yield from compare(cases.cases(), CPU, device)


def models(device: torch.device, folder: Path) -> Iterator[tuple[str, Any]]:
    yield from compare(cases.model_cases(), CPU, device)


def train(device: torch.device, folder: Path) -> Iterator[tuple[str, Any]]:
    """What one worker trains, or several do, exchanging by gloo."""
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    store = FileStore(str(folder / "store"), size) if size > 1 else HashStore()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    worlds = [
        World(rank, size, of, "gloo", False, 60.0, local_rank=rank, local_size=size)
        for of in (CPU, device)
    ]
    yield from compare(training.runs(size), *worlds)
    yield "waits", waits_of_a_step(worlds[1])


def waits_of_a_step(world: World) -> dict[str, Counter[str]]:
    """How often the host waits in one step, by the number of the attack's steps."""

    def waits(batch: int, steps: int) -> Counter[str]:
        simulated.waits.clear()
        training.train({"batch": batch, "attack": PGD(steps=steps)}, world)
        return Counter(simulated.waits)

    found = {}
    for steps in (1, 5):  # four steps of training, less two
        difference = waits(6, steps)
        difference.subtract(waits(12, steps))
        found[str(steps)] = Counter({name: n // 2 for name, n in difference.items() if n})
    return found


PARTS = {
    "components": components,
    "models": models,
    "training": train,
    "workers": train,
    "groups": lambda device, folder: groups.run(device),
    "commands": lambda device, folder: commands.run(folder),
}
