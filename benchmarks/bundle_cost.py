"""The size of an evidence bundle of 10,000 images of 3 x 32 x 32, and the time to check it.

    python benchmarks/bundle_cost.py [--images 10000]

Random images, and a linear classifier that every attack breaks on all of them: the most examples
that a bundle of this size can have. Its forward passes cost next to nothing, so the time is that of
the checks, on one thread; a real model adds one forward pass per image and per example.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from runs import save, table
from torch import nn

import dat
from dat.core.threat import ThreatModel

CASES = {
    "fgsm, linf 8/255": ("fgsm", ThreatModel(eps=8 / 255)),
    "pgd-2, linf 8/255": ("pgd-2", ThreatModel(eps=8 / 255)),
    "pgd-2, l2 0.5": ("pgd-2", ThreatModel(norm="l2", eps=0.5)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=10_000)
    torch.set_num_threads(1)
    model, data = subject(parser.parse_args().images)
    results = [measure(model, data, name) for name in CASES]
    rows = [
        [
            row["attack"],
            f"{row['examples']:,}",
            f"{row['megabytes']:.1f}",
            f"{8e6 * row['megabytes'] / (row['examples'] * 3072):.1f}",
            f"{row['cpu_seconds']:.1f}",
        ]
        for row in results
    ]
    headers = ["Attack", "Examples", "MB", "Bits per pixel", "dat.verify (CPU s)"]
    save(Path(__file__), results, table(headers, rows))


def measure(model: nn.Module, data: dat.ImageData, name: str) -> dict[str, Any]:
    attack, threat = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bundle"
        dat.evaluate(model, data, threat=threat, attacks=[attack], check=False, bundle=path)
        start, begun = time.process_time(), time.perf_counter()
        result = dat.verify(path, model, data)
        cpu, wall = time.process_time() - start, time.perf_counter() - begun
        assert result.passed, result.checks
        size = path.stat().st_size
    examples = sum(result.bundle.claim.suites[0].broken.values())
    figures = {"examples": examples, "megabytes": size / 1e6, "cpu_seconds": cpu, "seconds": wall}
    print(name, figures, flush=True)
    return {"attack": name, **figures}


def subject(images: int) -> tuple[nn.Module, dat.ImageData]:
    random = torch.Generator().manual_seed(0)
    x = torch.randint(256, (images, 3, 32, 32), generator=random, dtype=torch.uint8)
    model = nn.Sequential(nn.Flatten(), nn.Linear(3072, 10))
    nn.init.normal_(model[1].weight, std=0.1, generator=random)  # type: ignore[arg-type]
    with torch.no_grad():
        y = torch.cat([model(part / 255).argmax(1) for part in x.split(1000)])
    return model, dat.ImageData.of(x, y, classes=10)


if __name__ == "__main__":
    main()
