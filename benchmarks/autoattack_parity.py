"""AutoAttack beside the reference implementation: each attack alone, and the whole suite.

    git clone https://github.com/fra31/auto-attack; git clone .../locuslab/convex_adversarial
    python benchmarks/first_images.py mnist mnist.npz          # and cifar15k.npz, runs/cifar,
    python benchmarks/autoattack_parity.py --reference auto-attack --wong convex_adversarial \
        --robust runs/cifar --standard runs/cifar-standard --mnist mnist.npz

Same images, same budgets. An attack alone goes against all images that are right without it. What
results/ holds already is not measured again, unless --fresh.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from runs import RESULTS, save, table
from subjects import Counting, ModelSpec, of_run, of_wong, reference

import dat
from dat.evaluation import assess

ALONE = ("apgd-ce", "apgd-t", "fab-t", "square")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("reference", "wong", "robust", "standard", "mnist"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="no suite on the robust network")
    parser.add_argument("--fresh", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    make = reference(arguments.reference)
    images, mnist = arguments.images, str(arguments.mnist)
    wong = arguments.wong / "models" / "mnist.pth"
    subjects = [
        of_wong("Wong et al., MNIST", wong, mnist, images, "linf", 0.12),
        of_wong("Wong et al., MNIST", wong, mnist, images, "l2", 1.5),
        of_run("ours, robust, CIFAR-10", arguments.robust, images // 2, "linf", 8 / 255),
        of_run("ours, robust, CIFAR-10", arguments.robust, images // 4, "l2", 0.5),
        of_run("ours, standard, CIFAR-10", arguments.standard, images, "linf", 1 / 255),
    ]
    file = RESULTS / f"{Path(__file__).stem}.json"
    rows = json.loads(file.read_text()) if file.exists() and not arguments.fresh else []
    with dat.World.join(device="cpu", threads=arguments.threads) as world:
        for subject in subjects:
            whole = () if arguments.quick and "robust" in subject.name else ("autoattack",)
            for name in (*ALONE, *whole):
                key = {"model": subject.name, "ball": ball(subject), "attack": name}
                if not any(key.items() <= row.items() for row in rows):
                    rows.append(key | compare(subject, name, make, world))
                    save(Path(__file__), rows, table(HEADERS, [_line(row) for row in rows]))


def ball(subject: ModelSpec) -> str:
    return f"{subject.norm} {subject.eps:.3g}"


def compare(subject: ModelSpec, name: str, make: Any, world: dat.World) -> dict[str, Any]:
    """The reference's verdicts and ours."""
    data = dat.ImageData.of(subject.x, subject.y)
    threat = dat.ThreatModel(norm=subject.norm, eps=subject.eps)
    start, counted = time.perf_counter(), Counting(subject.model)
    theirs = make(subject, counted)
    if name != "autoattack":
        theirs.attacks_to_run = [name]
    x_adv = theirs.run_standard_evaluation(subject.x, subject.y, bs=len(subject.y))
    took = time.perf_counter() - start
    with torch.no_grad():
        stands = subject.model(x_adv).argmax(1) == subject.y
    start = time.perf_counter()
    found = assess(subject.model, data, [name], threat=threat, world=world, check=False)
    ours = found.suites[name]
    return {
        "images": len(data),
        "ta": found.ta,
        "reference": 100.0 * float(stands.float().mean()),
        "ours": found.ra(name),
        "only_reference": int((~stands & ours.robust).sum()),
        "only_ours": int((stands & ~ours.robust & found.right).sum()),
        "reference_seconds": took,
        "seconds": time.perf_counter() - start,
        "reference_forwards": counted.forwards,
        "reference_backwards": counted.backwards,
        "forwards": sum(cost.forwards for cost in ours.costs.values()),
        "backwards": sum(cost.backwards for cost in ours.costs.values()),
    }


HEADERS = (
    "Model",
    "Ball",
    "Attack",
    "Images",
    "TA (%)",
    "Reference (%)",
    "Ours (%)",
    "Only reference",
    "Only ours",
)


def _line(row: dict[str, Any]) -> list[str]:
    """Figures as a table shows them; the last two: images that only one of the two broke."""
    rates = (f"{row[key]:.1f}" for key in ("ta", "reference", "ours"))
    counts = (str(row[key]) for key in ("only_reference", "only_ours"))
    return [row["model"], row["ball"], row["attack"], str(row["images"]), *rates, *counts]


if __name__ == "__main__":
    main()
