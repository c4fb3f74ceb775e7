"""Images a second under PGD-10, beside torchattacks, foolbox and ART, in turns.

    pip install foolbox adversarial-robustness-toolbox; pip install --no-deps torchattacks
    python benchmarks/pgd_speed.py [--tuned]

torchattacks asks for torchvision when it is imported, and for nothing of it in PGD: where there is
none, an empty module stands in. --tuned makes glibc keep large tensors, for all alike.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path

import torch
from autoattack_speed import ALLOCATOR
from runs import save, table
from torch import Tensor, nn

import dat

EPS, STEP, STEPS = 8 / 255, 2 / 255, 10
CASES = {"width 16, batch 128": (16, 128), "width 64, batch 64": (64, 64)}
Attack = Callable[[Tensor, Tensor], object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tuned", action="store_true")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    if arguments.tuned and ALLOCATOR.items() - os.environ.items():
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | ALLOCATOR)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    speeds = {case: measure(*size, arguments.repeats) for case, size in CASES.items()}
    names = list(next(iter(speeds.values())))
    rows = []
    for name in names:
        row = [name]
        for case in CASES:
            speed = speeds[case]
            row += [f"{speed[name]:.1f}", f"{speed[name] / speed['torchattacks']:.2f}"]
        rows.append(row)
    headers = ["PGD-10", *(word for case in CASES for word in (f"{case} (img/s)", "x"))]
    script = Path(__file__)
    save(script.with_stem(script.stem + "_tuned" * arguments.tuned), speeds, table(headers, rows))


def measure(width: int, batch: int, repeats: int) -> dict[str, float]:
    """The median speed of each, in turns."""
    model = dat.build_model("preact-resnet18", 10, width=width, seed=0)
    model = dat.normalized(model, (0.49, 0.48, 0.45), (0.25, 0.24, 0.26)).eval()
    random = torch.Generator().manual_seed(0)
    x = torch.rand(batch, 3, 32, 32, generator=random)
    y = torch.randint(10, (batch,), generator=random)
    attacks = contestants(model, x)
    seconds: dict[str, list[float]] = {name: [] for name in attacks}
    for turn in range(repeats + 1):
        for name, attack in attacks.items():
            start = time.perf_counter()
            attack(x, y)
            if turn:  # the first warms up
                seconds[name].append(time.perf_counter() - start)
        print(turn, {name: f"{took[-1]:.2f}" for name, took in seconds.items() if took}, flush=True)
    return {name: batch / statistics.median(took) for name, took in seconds.items()}


def contestants(model: nn.Module, x: Tensor) -> dict[str, Attack]:
    sys.modules.setdefault("torchvision", types.ModuleType("torchvision"))
    sys.modules.setdefault("torchvision.transforms", types.ModuleType("torchvision.transforms"))
    import foolbox
    import torchattacks
    from art.attacks.evasion import ProjectedGradientDescentPyTorch
    from art.estimators.classification import PyTorchClassifier
    from foolbox.models.pytorch import PyTorchModel

    theirs = torchattacks.PGD(model, eps=EPS, alpha=STEP, steps=STEPS, random_start=True)
    bounded = PyTorchModel(model, bounds=(0, 1), device="cpu")
    linf = foolbox.attacks.LinfPGD(abs_stepsize=STEP, steps=STEPS)
    classifier = PyTorchClassifier(
        model, nn.CrossEntropyLoss(), x.shape[1:], 10, clip_values=(0, 1), device_type="cpu"
    )
    art = ProjectedGradientDescentPyTorch(
        classifier, eps=EPS, eps_step=STEP, max_iter=STEPS, batch_size=len(x), verbose=False
    )
    threat, ours = dat.ThreatModel(eps=EPS), dat.PGD(steps=STEPS, step_size=STEP)
    folded = dat.fold(model, x).network

    def attack(network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        x = x.contiguous(memory_format=torch.channels_last)
        with dat.attack_mode(network):
            return ours(dat.Victim(network, y), x, threat)

    return {
        "torchattacks": lambda x, y: theirs(x, y),
        "foolbox": lambda x, y: linf(bounded, x, y, epsilons=EPS),
        "ART": lambda x, y: art.generate(x.numpy(), y.numpy()),
        "ours": lambda x, y: attack(model, x, y),
        "ours, as in evaluation (folded)": lambda x, y: attack(folded, x, y),
    }


if __name__ == "__main__":
    main()
