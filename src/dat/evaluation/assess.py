"""Evaluate a model under suites of attacks, with checks for gradient masking."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dat.attacks import AttackTarget, attack_mode
from dat.attacks.suites import Suite, clean, suite
from dat.attacks.target import NoImageGradient, value_and_grad
from dat.core.precision import PRECISIONS, check_independent, in_precision
from dat.core.progress import Progress, reporting
from dat.core.rng import seeded
from dat.core.threat import ThreatModel
from dat.data import Data, image_data
from dat.distributed import World
from dat.evaluation import checks
from dat.evaluation.bundle import check_path, make_bundle
from dat.evaluation.progress_file import SuiteProgress, fingerprint
from dat.evaluation.runner import FIXED_BATCH, Runner, SuiteResult
from dat.evaluation.workers import world_of
from dat.models import Folded, adapted, computes_in_half, fold

FOLD_FROM = 2000
"""Forward passes from which on building a folded copy of the network pays off."""


@dataclass(frozen=True, repr=False)
class Assessment:
    """TA, and RA under each suite of attacks."""

    right: Tensor
    """Which images are classified correctly without an attack."""
    suites: dict[str, SuiteResult]
    warnings: tuple[str, ...] = ()
    """Signs of gradient masking."""
    network: str = ""
    """How the network under attack was optimized."""

    def __repr__(self) -> str:
        ra = ", ".join(f"{name} {self.ra(name):.1f} %" for name in self.suites)
        return f"Assessment({self.images} images, TA {self.ta:.1f} %, RA: {ra})"

    @property
    def images(self) -> int:
        return len(self.right)

    @property
    def ta(self) -> float:
        """Test accuracy in percent."""
        return 100.0 * int(self.right.sum()) / self.images

    def ra(self, name: str) -> float:
        """Robust accuracy under a suite, in percent."""
        return 100.0 * int(self.suites[name].robust.sum()) / self.images


@torch.inference_mode(False)  # may be called from a framework's validation
def assess(
    model: nn.Module,
    data: Data,
    attacks: Sequence[str | Suite | Callable[[int], Suite]] = ("autoattack",),
    *,
    threat: ThreatModel,
    world: World | None = None,
    batch: int = 256,
    seed: int = 0,
    precision: str = "float32",
    folder: Path | None = None,
    keep: bool = False,
    check: bool = True,
    bundle: Path | str | None = None,
    progress: Progress | bool = False,
) -> Assessment:
    """What `dat.evaluate` does with a list of attacks."""
    if precision not in PRECISIONS:
        raise ValueError(f"precision = {precision!r}: must be one of {', '.join(PRECISIONS)}")
    data, world = image_data(data), world_of(model) if world is None else world
    if bundle is not None:
        world.run_or_fail_together(lambda: check_path(Path(bundle)))
    x, y = data.batch(torch.arange(min(len(data), checks.PROBED)), world.device)
    original, model = model, adapted(model, x)
    with attack_mode(model), seeded(world.device, seed, "answers"), torch.no_grad():
        logit_warnings = world.run_or_fail_together(
            lambda: checks.check_logits(model, x, data.classes)
        )
        logits = model(x)
    classes = logits.shape[1]
    suites = [_suite(attack, classes) for attack in attacks]
    with seeded(world.device, seed, "fold"):
        folded = _fold(model, suites, x, y, len(data))
    if precision == "float16" or computes_in_half(model):
        with attack_mode(folded.network), seeded(world.device, seed, "independent"):
            world.run_or_fail_together(lambda: check_independent(folded.network, x))
    runner = Runner(
        model=model,
        network=folded.network,
        data=data,
        threat=threat,
        world=world,
        batch=batch if bundle is None else min(batch, FIXED_BATCH),
        fixed_batches=bundle is not None,
        seed=seed,
        precision=precision,
        keep=keep or bundle is not None,
    )
    signs = [*logit_warnings, *_masking_signs(runner, x, y)] if check else []
    about = fingerprint(original, data, logits) if folder else {}  # of the model without adapter
    with reporting(progress, "evaluating", show=world.first) as runner.progress:
        correct, results = _run(runner, suites, folder, about)
    if check:
        signs += [sign for result in results.values() for sign in checks.check_square(result)]
    if bundle is not None:  # all workers have the results; the first one writes
        evidence = (runner, original, correct, suites, results)
        world.run_or_fail_together(
            lambda: make_bundle(*evidence).write(Path(bundle)) if world.first else None
        )
    return Assessment(correct, results, tuple(signs), folded.note)


def _suite(attack: str | Suite | Callable[[int], Suite], classes: int) -> Suite:
    """The suite of a name, of a function of the number of classes, or as it is."""
    if isinstance(attack, str):
        return suite(attack, classes)
    return attack(classes) if callable(attack) else attack


def _run(
    runner: Runner, suites: Sequence[Suite], folder: Path | None, about: dict[str, str]
) -> tuple[Tensor, dict[str, SuiteResult]]:
    """Which images are classified correctly, and the results of all suites on these."""
    correct = runner.run(clean().rounds, torch.ones(len(runner.data), dtype=torch.bool)).robust
    for attack_suite in suites:
        runner.expect(attack_suite.rounds, int(correct.sum()))
    results = {}
    for attack_suite in suites:
        progress_file = None
        if folder and attack_suite.rounds:
            progress_file = _progress_file(folder, attack_suite, runner, about)
        result = runner.run(attack_suite.rounds, correct, progress_file)
        results[attack_suite.name] = result
        if progress_file and runner.world.first:
            progress_file.conclude(result.broken(), _figures(correct, result.robust))
    return correct, results


def _fold(model: nn.Module, suites: Sequence[Suite], x: Tensor, y: Tensor, images: int) -> Folded:
    """A faster copy of the network, if there is enough work for it to pay off."""
    passes = sum(turn.attack.cost() for members in suites for turn in members.rounds) * images
    if passes >= FOLD_FROM or _blocks_gradients(model, x, y):
        return fold(model, x)
    return Folded(model, "not folded: little to do")


def _blocks_gradients(model: nn.Module, x: Tensor, y: Tensor) -> bool:
    """Whether the model has no gradients. Its folded copy may have them, as tracing sees through
    torch.no_grad."""
    try:
        with attack_mode(model):
            value_and_grad(AttackTarget(model, y[:1]), x[:1])
    except NoImageGradient:
        return True
    except Exception:  # reported by the attacks, if any of them needs gradients
        return False
    return False


def _masking_signs(runner: Runner, x: Tensor, y: Tensor) -> list[str]:
    """Signs of gradient masking in the network as the attacks see it."""
    device, seed = runner.world.device, runner.seed
    with attack_mode(runner.network), seeded(device, seed, "checks"):
        network = in_precision(runner.network, PRECISIONS[runner.precision])
        warnings = checks.check_gradients(network, x, y)
        return warnings + checks.check_attacks(network, x, y, runner.threat)


def _figures(correct: Tensor, robust: Tensor) -> dict[str, float]:
    """TA and RA in percent, as figures.json has them."""
    percent = 100.0 / len(correct)
    return {
        "images": len(correct),
        "ta": percent * int(correct.sum()),
        "ra": percent * int(robust.sum()),
    }


def _progress_file(
    folder: Path, attack_suite: Suite, runner: Runner, subject: dict[str, str]
) -> SuiteProgress:
    about: dict[str, Any] = {
        "suite": attack_suite.name,
        "rounds": [f"{turn.name}: {turn.attack!r}" for turn in attack_suite.rounds],
        "threat": runner.threat.dump(),
        "seed": runner.seed,
        "precision": runner.precision,
        "examples": runner.keep,
    } | subject
    if runner.fixed_batches:
        about["batch"] = runner.batch
    key = hashlib.blake2b(json.dumps(about).encode(), digest_size=4).hexdigest()
    progress_file = SuiteProgress(folder / f"{attack_suite.name}-{key}", about)
    progress_file.open_shared(runner.world)
    return progress_file
