"""Theorem 1 in practice: DAT on a problem that meets its assumptions, compared with the bound.

A sample is x in R^d, uniform around `centre`, and with A in R^(q x d)

    phi = sum_j 1 - cos(theta_j - x_j) + <delta, A sin(theta) + c x_q> - mu / 2 |delta|^2

where x_q are the first q values of x. This is strongly concave in delta (A2), with its maximum at
(A sin(theta) + c x_q) / mu, and non-convex in theta. Psi, its gradient and all constants have
closed forms: the Lipschitz constant of the gradient (A1), the variance of a sample's gradient (A3),
and the largest gradient norm G. The weights are h layers. Each of M workers draws B samples, finds
delta by gradient ascent until the norm of the inner gradient is at most `inner`, and quantizes its
gradient (WholeVector, the paper's quantizer); LAMB takes a step with beta_1 = 0 and c_l = c_u, as
in the paper's proof.

The effect of T is visible from a start far from the minimum. The other terms would be invisible
there, as the descent dominates the mean over all steps. Their runs start at the minimum, where only
errors keep the weights away from it. For the bits and for the inner oracle, the excess over an
exact run is compared.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dat.core.files import atomic_write
from dat.core.rng import derive, generator
from dat.distributed import WholeVector
from dat.distributed.wire_format import Slot, message_layout, spans
from dat.kernels.quantize.codec import Codec
from dat.optim import LAMB
from dat.report import progress_bar
from dat.report.plots import Chart, line_charts
from dat.tools.reproduce.figures import estimate
from dat.tools.reproduce.study import THEOREM

DENSE = 32
DESCENT = 500
"""Steps of gradient descent that reach the minimum to float precision."""


@dataclass(frozen=True)
class Problem:
    """The problem to solve."""

    layers: int = 4
    width: int = 16
    attacked: int = 8
    """q, the number of values in delta."""
    strength: float = 0.3
    """The spectral norm of A."""
    shift: float = 0.2
    """c, the influence of a sample on its delta."""
    mu: float = 1.0
    centre: float = 0.7
    spread: float = 1.2
    """x is uniform in centre +- spread."""

    @property
    def size(self) -> int:
        return self.layers * self.width

    def matrix(self) -> Tensor:
        a = torch.randn((self.attacked, self.size), generator=generator(0, "theorem"))
        return a * (self.strength / float(torch.linalg.matrix_norm(a, 2)))

    def gradient(self, theta: Tensor, a: Tensor) -> Tensor:
        """The exact gradient of Psi."""
        mean = math.sin(self.spread) / self.spread
        pull = a.T @ (a @ theta.sin() + self.shift * self.centre) / self.mu
        return mean * (theta - self.centre).sin() + theta.cos() * pull

    def value(self, theta: Tensor, a: Tensor) -> float:
        """Psi, up to a constant."""
        mean = math.sin(self.spread) / self.spread
        pull = a @ theta.sin() + self.shift * self.centre
        first = (1 - mean * (theta - self.centre).cos()).sum()
        return float(first + pull.square().sum() / (2 * self.mu))

    def start(self, seed: int, *, near: bool) -> Tensor:
        """Initial weights: far from the minimum, or at the one nearest to the centre."""
        if not near:
            return 2.5 + 0.5 * torch.rand(self.size, generator=generator(seed, "theorem-start"))
        a, theta = self.matrix().double(), torch.full((self.size,), self.centre).double()
        for _ in range(DESCENT):
            theta -= 0.5 * self.gradient(theta, a)
        return theta.float()


@dataclass(frozen=True)
class Constants:
    """The constants of the problem in the theorem."""

    lipschitz: float
    """L_i, the same for all layers."""
    sigma2: list[float]
    """The variance of a sample's gradient, per coordinate."""
    largest: float
    """G, the largest gradient norm."""
    coupling: float
    """L_phi, the Lipschitz constant in delta of the gradient in theta."""
    gap: float
    """An upper bound on Psi(theta_1) - Psi*, for the worst start."""


def constants(problem: Problem, a: Tensor, seeds: int, *, near: bool = False) -> Constants:
    """In closed form; a maximum over theta without one is bounded by the triangle inequality."""
    starts = [problem.start(seed, near=near) for seed in range(seeds)]
    square = a.T @ a / problem.mu
    spread, size, own = problem.spread, problem.size, problem.attacked
    # cos(theta) A'A cos(theta) / mu, and the curvature of the sine
    reach = (
        square.abs().sum(1) + problem.shift * problem.centre * a.abs().sum(0) / problem.mu
    ).max()
    lipschitz = (
        abs(math.sin(spread) / spread) + float(torch.linalg.matrix_norm(square, 2)) + float(reach)
    )
    # the variance of sin(theta - x) is largest where sin(theta - centre) = 0
    plain = 0.5 * (1 - math.sin(2 * spread) / (2 * spread))
    variance = spread**2 / 3
    coupled = (problem.shift * a / problem.mu).square().sum(0) * variance
    sigma2 = (math.sqrt(plain) + coupled.sqrt()) ** 2
    far = problem.centre + problem.spread
    delta = (problem.strength * math.sqrt(size) + problem.shift * far * math.sqrt(own)) / problem.mu
    largest = math.sqrt(size) + problem.strength * delta
    floor = size * (1 - abs(math.sin(spread) / spread))
    return Constants(
        lipschitz=lipschitz,
        sigma2=sigma2.tolist(),
        largest=largest,
        coupling=problem.strength,
        gap=max(problem.value(start.double(), a) for start in starts) - floor,
    )


@dataclass(frozen=True)
class SolverSettings:
    """How the problem is solved."""

    steps: int = 1024
    workers: int = 4
    batch: int = 64
    """B, the samples per worker."""
    bits: int = DENSE
    inner: float = 0.0
    """The largest norm of the inner gradient; 0 uses the exact maximizer."""
    rate: float = 0.5
    """The learning rate is rate / sqrt(T)."""
    beta: float = 0.5
    """beta_2."""
    scale: float = 1.0
    """c_l = c_u."""
    near: bool = False
    """Start at the minimum."""

    @property
    def lr(self) -> float:
        return self.rate / math.sqrt(self.steps)


def bound(problem: Problem, settings: SolverSettings, known: Constants) -> dict[str, float]:
    """The right-hand side of Theorem A1, term by term, with lambda = 0."""
    h, d, grad = problem.layers, problem.size, known.largest
    c = 0.25 * math.sqrt(h * (1 - settings.beta) / (grad**2 * d))
    samples = settings.workers * settings.batch
    error = (known.coupling * settings.inner / problem.mu) ** 2
    levels = WholeVector(bits=settings.bits).levels if settings.bits != DENSE else math.inf
    quantized = (
        min(d / levels**2, math.sqrt(d) / levels) * grad**2 if settings.bits != DENSE else 0.0
    )
    each = [s2 / samples + error / d + quantized / d for s2 in known.sigma2]
    chi = sum(math.sqrt(variance) for variance in each)
    terms = {
        "descent": known.gap / (settings.lr * settings.scale * c * settings.steps),
        "curvature": settings.lr * settings.scale * h * known.lipschitz / (2 * c),
        "errors": 2 * (error + sum(known.sigma2) / samples) + 4 * quantized,
        "signs": math.sqrt(3) / c * chi,
    }
    return terms | {"bound": sum(terms.values())}


class _Weights(nn.Module):
    def __init__(self, problem: Problem, start: Tensor) -> None:
        super().__init__()
        rows = start.split(problem.width)
        self.layers = nn.ParameterList(nn.Parameter(row.clone()) for row in rows)


def solve(problem: Problem, settings: SolverSettings, seed: int) -> float:
    """The mean over the steps of the squared norm of Psi's gradient."""
    a = problem.matrix()
    weights = _Weights(problem, problem.start(seed, near=settings.near))
    oracle = LAMB(
        lr=settings.lr,
        weight_decay=0.0,
        betas=(0.0, settings.beta),
        zeta=1e-12,
        c_l=settings.scale,
        c_u=settings.scale,
    )
    optimizer = oracle(weights)
    random = generator(seed, "theorem-data")
    quantize = _quantizer(problem, settings, seed)
    total = 0.0
    for step in range(settings.steps):
        theta = torch.cat([layer.detach() for layer in weights.layers])
        total += float(problem.gradient(theta.double(), a.double()).square().sum())
        shape = (settings.workers, settings.batch, problem.size)
        x = problem.centre + problem.spread * (2 * torch.rand(shape, generator=random) - 1)
        gradients = sample_gradients(problem, settings, theta, a, x).mean(1)
        mean = torch.stack([quantize(g, step, rank) for rank, g in enumerate(gradients)]).mean(0)
        for layer, part in zip(weights.layers, mean.split(problem.width), strict=True):
            layer.grad = part.clone()
        optimizer.step()
    return total / settings.steps


def sample_gradients(
    problem: Problem, settings: SolverSettings, theta: Tensor, a: Tensor, x: Tensor
) -> Tensor:
    """The gradient in theta at the attacked point, for every sample."""
    target = a @ theta.sin() + problem.shift * x[..., : problem.attacked]
    delta = (
        target / problem.mu if settings.inner == 0 else ascend(target, problem.mu, settings.inner)
    )
    return (theta - x).sin() + theta.cos() * (delta @ a)


def ascend(target: Tensor, mu: float, inner: float) -> Tensor:
    """Gradient ascent from zero, for each sample until the norm of its gradient is small enough."""
    delta = torch.zeros_like(target)
    while True:
        gradient = target - mu * delta
        unfinished = torch.linalg.vector_norm(gradient, dim=-1, keepdim=True) > inner
        if not unfinished.any():
            return delta
        delta = delta + unfinished * (0.1 / mu) * gradient


def _quantizer(problem: Problem, settings: SolverSettings, seed: int) -> Any:
    if settings.bits == DENSE:
        return lambda gradient, step, rank: gradient
    quantizer = WholeVector(bits=settings.bits)
    layout = message_layout(spans([Slot((1, problem.size), 0)], quantizer), quantizer.bits)
    codec = Codec(quantizer, threads=1)

    def quantize(gradient: Tensor, step: int, rank: int) -> Tensor:
        message = torch.zeros(layout.size, dtype=torch.uint8)
        out = torch.empty_like(gradient)
        codec.encode(gradient.contiguous(), layout, message, derive(seed, "theorem", step, rank))
        codec.decode(message, layout, out)
        return out

    return quantize


class Sweep(NamedTuple):
    """A sweep over the values of one setting."""

    key: str
    values: tuple[Any, ...]
    base: SolverSettings
    predicted: str
    """The rate of the theorem's bound."""
    exact: Any = None
    """The value without an error, whose result is subtracted from the others."""


SWEEPS: dict[str, Sweep] = {
    "T": Sweep("steps", (64, 128, 256, 512, 1024, 2048, 4096), SolverSettings(batch=512), "T^-1/2"),
    "MB": Sweep(
        "batch",
        (1, 2, 4, 8, 16, 32, 64, 128),
        SolverSettings(steps=4096, rate=0.25, near=True),
        "(MB)^-1/2",
    ),
    "M": Sweep(
        "workers",
        (1, 2, 4, 8, 16),
        SolverSettings(steps=4096, batch=4, rate=0.25, near=True),
        "M^-1/2",
    ),
    "b": Sweep(
        "bits",
        (2, 3, 4, 5),
        SolverSettings(steps=2048, batch=64, rate=0.1, near=True),
        "2^-b to 4^-b",
        DENSE,
    ),
    "inner": Sweep(
        "inner",
        (0.8, 0.4, 0.2, 0.1),
        SolverSettings(steps=2048, batch=64, rate=0.1, near=True),
        "inner^1",
        0.0,
    ),
}


def check_theorem(out: Path, *, seeds: int = 4, quiet: bool = False) -> dict[str, Any]:
    """Run all sweeps and write OUT/theorem1."""
    torch.set_num_threads(1)
    problem = Problem()
    a = problem.matrix().double()
    known = {near: constants(problem, a, seeds, near=near) for near in (False, True)}
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in SWEEPS}
    done = 0
    total = sum(len(sweep.values) + (sweep.exact is not None) for sweep in SWEEPS.values())
    with progress_bar(THEOREM, show=not quiet) as progress:
        for name, (key, values, base, _, exact) in SWEEPS.items():
            floor = [0.0] * seeds
            for value in (*(() if exact is None else (exact,)), *values):
                settings = replace(base, **{key: value})
                measured = [solve(problem, settings, seed) for seed in range(seeds)]
                done += 1
                progress(done, total)
                if exact is not None and value == exact:
                    floor = measured
                    continue
                terms = bound(problem, settings, known[base.near])
                excess = [mean - least for mean, least in zip(measured, floor, strict=True)]
                rows[name].append({"value": value, "measured": measured, "excess": excess} | terms)
    return _write(out / THEOREM, problem, known[False], rows, seeds)


def slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    """The least-squares slope of log y over log x, for y > 0: noise may exceed a small excess."""
    points = [(x, y) for x, y in zip(xs, ys, strict=True) if y > 0]
    if len(points) < 2:
        return math.nan
    lx, ly = ([math.log(value) for value in values] for values in zip(*points, strict=True))
    mx, my = sum(lx) / len(lx), sum(ly) / len(ly)
    over = sum((x - mx) * (y - my) for x, y in zip(lx, ly, strict=True))
    return over / sum((x - mx) ** 2 for x in lx)


def _write(
    folder: Path, problem: Problem, known: Constants, sweeps: dict[str, Any], seeds: int
) -> dict[str, Any]:
    table, charts, summary = [], [], {}
    for name, (_, values, _, predicted, _) in SWEEPS.items():
        rows = sweeps[name]
        means = [estimate(row["excess"]).mean for row in rows]
        bounds = [row["bound"] for row in rows]
        xs = [2.0**v for v in values] if name == "b" else [float(v) for v in values]
        if name == "MB":
            xs = [4 * x for x in xs]
        ours, theirs = slope(xs, means), slope(xs, bounds)
        least = min(row["bound"] / estimate(row["measured"]).mean for row in rows)
        summary[name] = {"slope": ours, "bound_slope": theirs, "predicted": predicted, "rows": rows}
        ends = f"{means[0]:.3g} to {means[-1]:.3g}", f"{bounds[0]:.3g} to {bounds[-1]:.3g}"
        table.append([name, f"{values[0]:g} to {values[-1]:g}", *ends, f"{ours:+.2f}",
                      f"{theirs:+.2f}", predicted, f"{least:.0f}"])  # fmt: skip
        curves = {"measured": (xs, means), "bound": (xs, bounds)}
        axis = {"b": "2^b", "inner": "norm of the inner gradient"}.get(name, name)
        spreads = {"measured": [estimate(row["excess"]).spread or 0.0 for row in rows]}
        charts.append(
            Chart(
                curves, axis, "mean squared gradient", True, False, spreads, both_logarithmic=True
            )
        )
    headers = [
        "Parameter",
        "Values",
        "Measured",
        "Bound",
        "Slope",
        "Bound's slope",
        "Theorem",
        "Bound / measured",
    ]
    note = (
        f"The mean of |grad Psi|^2 over T steps, {seeds} seeds; for b and inner, the excess over "
        "an exact run. Slopes are of log over log, for b over 2^b. The bound holds if the last "
        "column, the smallest ratio of bound to measurement, is above 1."
    )
    result = {
        "problem": asdict(problem),
        "constants": asdict(known),
        "seeds": seeds,
        "sweeps": summary,
        "headers": headers,
        "table": table,
        "note": note,
    }
    folder.mkdir(parents=True, exist_ok=True)
    atomic_write(folder / "results.json", (json.dumps(result, indent=1) + "\n").encode())
    lines = [headers, ["---"] * len(headers), *table]
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    atomic_write(folder / "table.md", f"{text}\n\n{note} `dat reproduce theorem1`\n".encode())
    for ending in (".png", ".svg"):
        line_charts(folder / f"plot{ending}", charts, title="Theorem 1")
    return result
