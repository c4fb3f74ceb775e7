"""Everything that handles devices, on an accelerator that needs no hardware (`simulated.py`).

Each part runs in processes of its own. They compare with the CPU, and record which functions of
ours they enter: a function that handles devices and that none of them enters is listed here.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from tests.devices import cases, commands, groups, training
from tests.devices.device_code import device_functions
from tests.devices.not_entered import NOT_ENTERED
from tests.devices.on_device import PARTS, run_part
from tests.workers.forked import ROOT, run_workers

WORKERS = {"workers": 3}
NAMES = {
    "components": [name for name, _ in cases.cases()],
    "models": [name for name, _ in cases.model_cases()],
    "training": [name for name, _ in training.runs(1)],
    "workers": [name for name, _ in training.runs(3)],
    "groups": groups.names(),
    "commands": list(commands.COMMANDS),
}
CASES = [(part, name) for part, names in NAMES.items() for name in names]
WAITS = {
    "distributed/base.py:BaseExchange.all_gather_stats.<locals>.receive": 1,
    "train/step.py:_check_gradient": 1,
}
"""Where the host waits for the device in a step: once the backward pass is enqueued, to learn
whether the loss and the gradient are finite. What reads the clock is not in here."""
CLOCK = "distributed/traffic.py:EventClock.seconds"


SLOW = ("models", "groups", "training", "workers", "commands")
TIMEOUT = 900


@pytest.fixture(scope="module")
def results_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """What the processes of a part have written, which run once; for several workers, the last
    one's."""
    folder = tmp_path_factory.mktemp("devices")

    @cache
    def run(part: str) -> dict[str, Any]:
        own, workers = folder / part, WORKERS.get(part, 1)
        own.mkdir()
        run_workers(workers, run_part, part, own, timeout=TIMEOUT)
        found: dict[str, Any] = json.loads((own / f"{part}-{workers - 1}.json").read_text())
        return found

    return run


def marked(part: str, *names: str) -> Any:
    return pytest.param(part, *names, marks=[pytest.mark.slow] if part in SLOW else [])


@pytest.mark.parametrize(("part", "name"), [marked(*case) for case in CASES])
def test_the_device_computes_what_the_cpu_does(
    results_of: Callable[[str], dict[str, Any]], part: str, name: str
) -> None:
    problem = results_of(part)["results"][name]
    assert problem == "", problem


@pytest.mark.parametrize("part", [marked(part) for part in PARTS])
def test_every_case_is_a_test(results_of: Callable[[str], dict[str, Any]], part: str) -> None:
    assert set(results_of(part)["results"]) - {"waits"} == set(NAMES[part])


@pytest.mark.slow
def test_a_step_waits_for_the_device_twice(results_of: Callable[[str], dict[str, Any]]) -> None:
    """However many steps the attack takes."""
    for waits in results_of("training")["results"]["waits"].values():
        assert {name: count for name, count in waits.items() if name != CLOCK} == WAITS


@pytest.mark.slow
def test_every_function_that_handles_devices_is_entered(
    results_of: Callable[[str], dict[str, Any]],
) -> None:
    """Or is listed with a reason. A listed one that is entered, or does not exist, is an error."""
    entered = {name for part in PARTS for name in results_of(part)["entered"]}
    handling = device_functions()
    print(f"{len(handling)} functions, {len(handling & entered)} entered")
    missing, listed = handling - entered, set(NOT_ENTERED)
    assert (sorted(missing - listed), sorted(listed - missing)) == ([], [])


def test_torch_mixes_devices_by_the_same_rules() -> None:
    """Compared with torch's own fake tensors, which know the rules and have no values."""
    program = "from tests.devices.mixing import compare; compare()"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_nothing_of_it_is_in_this_process() -> None:
    import torch

    assert torch._C._get_privateuse1_backend_name() == "privateuseone"
    assert not hasattr(torch, "simulated")
