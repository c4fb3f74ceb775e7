"""The examples run, with the real packages, and give robust models."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.slow
NEEDS = {
    "lightning_module.py": "lightning",
    "accelerate_loop.py": "accelerate",
    "robustbench_style.py": "foolbox",
    "ray_train.py": "ray",
}


def run(*words: str) -> str:
    """One thread, so that examples behave beside other tests."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def accuracies(text: str) -> list[tuple[float, float]]:
    found = re.findall(r"TA ([\d.]+) %, RA ([\d.]+) %", text)
    return [(float(ta), float(ra)) for ta, ra in found]


def example(name: str) -> str:
    if importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"needs pip install {NEEDS[name]}")
    return f"examples/{name}"


def test_every_example_is_tested() -> None:
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == NEEDS.keys()


@pytest.mark.parametrize("name", ["lightning_module.py", "accelerate_loop.py"])
def test_training_in_the_loop_of_others_gives_a_robust_model(name: str) -> None:
    ((ta, ra),) = accuracies(run(example(name)))
    assert ta > 80
    assert ra > 50


def test_accelerate_with_two_processes() -> None:
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    text = run(*launch, example("accelerate_loop.py"))
    ((ta, ra),) = accuracies(text)
    assert "processes: 2" in text
    assert ta > 80
    assert ra > 50


def test_ray_starts_the_workers() -> None:
    text = run(example("ray_train.py"))
    ((ta, ra),) = accuracies(text)
    assert "workers: 2, different replicas: 1" in text
    assert ta > 80
    assert ra > 50


def test_models_and_evaluations_of_different_houses() -> None:
    theirs, ours, plain = accuracies(run(example("robustbench_style.py")))
    assert theirs[0] == ours[0]
    assert theirs[1] >= ours[1] > 20  # AutoAttack finds what PGD-20 finds, and more
    assert plain[0] > 80
    assert plain[1] < ours[1]
