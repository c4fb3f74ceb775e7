"""DAT's models in other libraries' evaluations, and other models in DAT's. By RobustBench's
convention, a model takes images in [0, 1] and normalizes them itself.

    pip install foolbox
    python examples/robustbench_style.py            # trains a small model first
    python examples/robustbench_style.py FOLDER     # uses a model that `dat export` wrote

Takes half a minute on one CPU core. First our model is attacked by Foolbox (or any other library
that takes a torch module and bounds), then another model by our AutoAttack.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from foolbox.attacks import LinfPGD
from foolbox.models.pytorch import PyTorchModel
from foolbox.utils import accuracy
from torch import Tensor, nn

import dat

EPS = 0.15


def exported(folder: Path) -> Path:
    """Train and export a model with the command line, as for a benchmark."""
    run = folder / "run"
    quick = ("model.width=8", "train.epochs=6", "attack.steps=5", "evaluate.report=0")
    for words in (("train", "digits", *quick, "--quiet", "--out", str(run)), ("export", str(run))):
        subprocess.run([sys.executable, "-m", "dat", *words], check=True, stdout=subprocess.DEVNULL)
    return run / "export" / "best"


def their_evaluation(model: nn.Module, x: Tensor, y: Tensor) -> tuple[float, float]:
    """Clean and robust accuracy, measured by Foolbox alone."""
    theirs = PyTorchModel(model, bounds=(0, 1), device="cpu")
    clean = accuracy(theirs, x, y)
    attack = LinfPGD(steps=20, rel_stepsize=0.1)
    _, _, fooled = attack(theirs, x, y, epsilons=EPS)
    return 100 * clean, 100 * (1 - fooled.float().mean().item())


class Theirs(nn.Module):
    """Another model: standard training, normalization in its forward pass, logits out."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.net((x - 0.3) / 0.4)  # type: ignore[no-any-return]

    def fit(self, x: Tensor, y: Tensor) -> Theirs:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        for _ in range(60):
            optimizer.zero_grad()
            nn.functional.cross_entropy(self(x), y).backward()
            optimizer.step()
        return self.eval()


def main() -> None:
    from dat.data import load

    data = load("digits")
    cpu = torch.device("cpu")
    x, y = data.test.batch(torch.arange(20), cpu)
    with tempfile.TemporaryDirectory() as made:
        folder = sys.argv[1] if len(sys.argv) > 1 else exported(Path(made))
        ours = dat.load(folder)
    clean, robust = their_evaluation(ours, x, y)
    print(f"our model, their attack (Foolbox, PGD-20): TA {clean:.1f} %, RA {robust:.1f} %")
    found = dat.autoattack(ours, x, y, eps=EPS)
    print(f"our model, our AutoAttack: TA {found.ta:.1f} %, RA {found.ra:.1f} %")

    torch.manual_seed(0)
    theirs = Theirs().fit(*data.train.batch(torch.arange(len(data.train)), cpu))
    found = dat.autoattack(theirs, x, y, eps=EPS)
    print(f"their model, our AutoAttack: TA {found.ta:.1f} %, RA {found.ra:.1f} %")


if __name__ == "__main__":
    main()
