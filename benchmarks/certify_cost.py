"""Certification beside the implementation of Cohen et al. 2019: verdicts, samples, speed.

    git clone ... smoothing      (github.com/locuslab/smoothing, its folder code/)
    python benchmarks/certify_cost.py runs/smooth --reference smoothing/code [--images 100]

Three questions, each on the same network and images:
1. agree: radii of the reference and of ours, both from n samples of their own;
2. cost: the samples until 'R >= r' is settled, against n for every image, and whether the verdict
   is that of n samples; all radii in one pass;
3. speed: samples a second of the noise-and-forward loop, in turns, both with all cores: the
   reference at its default batch of 1,000 and at its best, ours at the batch that it chooses.

The reference asks for cuda by name and for two functions that newer scipy and no statsmodels have:
they are given to it here. Nothing else about it is changed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
import types
from pathlib import Path
from typing import Any

import torch
from runs import save, table
from scipy import stats
from subjects import of_run

import dat
from dat.data import ImageData
from dat.distributed import World
from dat.evaluation.certification.bounds import lower_bound, radius
from dat.evaluation.certification.certify import prepare
from dat.evaluation.certification.sampler import SampleRange

RADII = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5)
ALPHA, N0, N = 0.001, 100, 100_000
BATCHES = (50, 100, 200, 400, 1000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--reference", type=Path, required=True)
    parser.add_argument("--speed-run", type=Path, help="another network to measure the speed on")
    parser.add_argument("--sigma", type=float, default=0.12)
    parser.add_argument("--images", type=int, default=100)
    parser.add_argument("--agree", type=int, default=20, help="images for the reference")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", choices=("agree", "cost", "speed"), nargs="+")
    arguments = parser.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    smooth = reference(arguments.reference)
    wanted = arguments.only or ("agree", "cost", "speed")
    with World.join(device="cpu") as world:
        if "agree" in wanted or "cost" in wanted:
            fixed = _fixed(arguments, world)
        if "agree" in wanted:
            agree(arguments, smooth, fixed)
        if "cost" in wanted:
            cost(arguments, world, fixed)
        if "speed" in wanted:
            speed(arguments, world, smooth)


def reference(folder: Path) -> Any:
    """The class Smooth of the reference."""
    proportion = types.ModuleType("statsmodels.stats.proportion")

    def proportion_confint(count: int, nobs: int, alpha: float, method: str) -> tuple[float, float]:
        interval = stats.binomtest(int(count), int(nobs)).proportion_ci(1 - alpha, method="exact")
        return interval.low, interval.high

    proportion.proportion_confint = proportion_confint  # type: ignore[attr-defined]
    for name in ("statsmodels", "statsmodels.stats"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules[proportion.__name__] = proportion
    stats.binom_test = lambda k, n, p: stats.binomtest(int(k), int(n), p).pvalue
    randn_like = torch.randn_like
    torch.randn_like = lambda x, device=None: randn_like(x)  # type: ignore[assignment]
    sys.path.insert(0, str(folder))
    from core import Smooth

    return Smooth


def _data(run: Path, images: int) -> tuple[torch.nn.Module, ImageData]:
    subject = of_run("", run, images, "l2", 0.0)
    return subject.model, ImageData.of(subject.x, subject.y)


def _fixed(arguments: argparse.Namespace, world: World) -> dat.Certified:
    model, data = _data(arguments.run, arguments.images)
    settings: dict[str, Any] = {"n0": N0, "n": N, "alpha": ALPHA, "world": world}
    folder = Path(arguments.run) / "certificates"
    return dat.certify(model, data, sigma=arguments.sigma, **settings, folder=folder)


def agree(arguments: argparse.Namespace, smooth: Any, fixed: dat.Certified) -> None:
    """The reference's radii beside ours. Hits are binomial: two counts of the same p differ by less
    than 4 of their standard deviations, and so do the radii."""
    model, data = _data(arguments.run, arguments.agree)
    theirs = smooth(model, 10, arguments.sigma)
    same, within, gaps = 0, 0, []
    for number in range(arguments.agree):
        x, _ = data.batch(torch.tensor([number]), torch.device("cpu"))
        predicted, reach = theirs.certify(x[0], N0, N, ALPHA, 200)
        ours = int(fixed.predicted[number]), float(fixed.radius[number])
        same += int(predicted == ours[0])
        gaps.append(abs(float(reach) - ours[1]))
        p = float(stats.norm.cdf(max(reach, ours[1]) / arguments.sigma))
        spread = 4 * (2 * p * (1 - p) / N) ** 0.5
        low = float(radius(lower_bound((p - spread) * N, N, ALPHA), arguments.sigma))
        within += int(min(reach, ours[1]) >= low - 1e-6)
        print(number, predicted, f"{reach:.4f}", ours, flush=True)
    row = [str(arguments.agree), str(same), str(within), f"{max(gaps):.4f}"]
    row.append(f"{statistics.mean(gaps):.4f}")
    headers = ["Images", "Same class", "Radii within 4 sd", "Largest gap", "Mean gap"]
    script = Path(__file__).with_stem("certify_agree")
    save(script, {"gaps": gaps, "same": same, "within": within}, table(headers, [row]))


def cost(arguments: argparse.Namespace, world: World, fixed: dat.Certified) -> None:
    """The adaptive pass beside n samples for every image."""
    model, data = _data(arguments.run, arguments.images)
    found = dat.certify(
        model, data, sigma=arguments.sigma, radii=RADII, n=N, alpha=ALPHA, world=world
    )
    rows, results = [], {}
    for place, r in enumerate(RADII):
        samples = float(found.asked[:, place].double().mean())
        ours, theirs = ((it.correct & (it.radius >= r)) for it in (found, fixed))
        row = {
            "ca": found.accuracy(r),
            "ca_fixed": fixed.accuracy(r),
            "agree": int((ours == theirs).sum()),
            "samples": samples,
            "fewer": (N + N0) / samples,
        }
        results[f"{r:g}"] = row
        shares = [f"{row['ca']:.1f}", f"{row['ca_fixed']:.1f}"]
        counts = [f"{row['agree']} of {len(ours)}", f"{samples:,.0f}", f"{row['fewer']:.0f}x"]
        rows.append([f"{r:g}", *shares, *counts])
    whole = float(found.samples.double().mean())
    rows.append(["all, one pass", "", "", "", f"{whole:,.0f}", f"{(N + N0) / whole:.0f}x"])
    headers = ["R >= r", "CA adaptive (%)", "CA fixed (%)", "Agree", "Samples per image", "Fewer"]
    save(Path(__file__), results, table(headers, rows))


def speed(arguments: argparse.Namespace, world: World, smooth: Any) -> None:
    """Samples a second, in turns."""
    model, data = _data(arguments.speed_run or arguments.run, 8)
    sampler, note = prepare(model, data, world, sigma=arguments.sigma, alpha=ALPHA, n=N)
    theirs = smooth(model, 10, arguments.sigma)
    x, _ = data.batch(torch.tensor([0]), torch.device("cpu"))
    model.eval()
    seconds: dict[str, list[float]] = {}
    count = 2000
    for turn in range(arguments.repeats + 1):
        for batch in BATCHES:
            start = time.perf_counter()
            theirs._sample_noise(x[0], count, batch)
            seconds.setdefault(f"reference, batch {batch}", []).append(time.perf_counter() - start)
        start = time.perf_counter()
        sampler.count("speed", [SampleRange(0, turn * count, turn * count + count)])
        name = f"ours, batch {sampler.batch} (chosen)"
        seconds.setdefault(name, []).append(time.perf_counter() - start)
    speeds = {name: count / statistics.median(found[1:]) for name, found in seconds.items()}
    base = speeds["reference, batch 1000"]
    best = max(value for name, value in speeds.items() if name.startswith("reference"))
    rows = [
        [name, f"{value:,.0f}", f"{value / base:.2f}", f"{value / best:.2f}"]
        for name, value in speeds.items()
    ]
    headers = ["", "Samples/s", "x its default", "x its best"]
    save(Path(__file__).with_stem("certify_speed"), speeds | {"note": note}, table(headers, rows))


if __name__ == "__main__":
    main()
