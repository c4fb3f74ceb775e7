"""`dat bench attack`: images per second under PGD, against a plain loop and other packages."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from dat.attacks import AttackTarget, attack_mode
from dat.models import fold
from dat.tools.bench import plain
from dat.tools.bench.baselines import import_package, load_baselines
from dat.tools.bench.limits import describe_machine, measure_limits, time_convolutions, use_threads
from dat.tools.bench.timing import Comparison, Turn, take_turns
from dat.tools.bench.workload import CLASSES, Workload

CONVOLUTIONS = (
    "the network's convolutions alone, each timed by itself, channels last: the best that the "
    "convolution library allows"
)
MakeTurn = Callable[[Workload, nn.Module, Tensor, Tensor], Turn]


def bench_attack(
    workload: Workload,
    against: Sequence[str] = ("plain",),
    *,
    repeats: int = 5,
    seconds: float = 0.0,
    threads: int | None = None,
) -> Comparison:
    """All implementations attack the same images and the same network in eval mode."""
    use_threads(threads)
    implementations: dict[str, MakeTurn] = OURS | load_baselines("attack", against)
    model, (x, y) = workload.network().eval(), workload.images()
    turns = {name: make(workload, model, x, y) for name, make in implementations.items()}
    machine = describe_machine(limits := measure_limits())
    least, work = time_convolutions(model, x).attack(workload.steps)
    timings = take_turns(turns, repeats=repeats, seconds=seconds, title="attacking")
    return Comparison(
        bench="attack",
        timings=timings,
        machine=machine,
        images=workload.batch,
        least=dict.fromkeys(turns, least),
        limit=f"{CONVOLUTIONS} (at the rate of a matrix product: {work / limits.flops:.3g} s)",
        flops=dict.fromkeys(turns, work),
        settings=workload.settings(),
    )


def _ours(workload: Workload, network: nn.Module, x: Tensor, y: Tensor) -> Turn:
    threat, oracle = workload.threat, workload.make_attack()

    def attack() -> Tensor:
        images = x.contiguous(memory_format=torch.channels_last)
        with attack_mode(network):
            return oracle(AttackTarget(network, y), images, threat)

    return attack


def _folded(workload: Workload, model: nn.Module, x: Tensor, y: Tensor) -> Turn:
    return _ours(workload, fold(model, x).network, x, y)


OURS: dict[str, MakeTurn] = {"ours, folded (as in evaluation)": _folded, "ours": _ours}


def plain_loop(workload: Workload, model: nn.Module, x: Tensor, y: Tensor) -> Turn:
    return lambda: plain.attack(model, x, y, workload)


def torchattacks_pgd(workload: Workload, model: nn.Module, x: Tensor, y: Tensor) -> Turn:
    attack = import_package("torchattacks").PGD(
        model, eps=workload.eps, alpha=workload.step_size, steps=workload.steps, random_start=True
    )
    return lambda: attack(x, y)


def foolbox_pgd(workload: Workload, model: nn.Module, x: Tensor, y: Tensor) -> Turn:
    foolbox, models = import_package("foolbox"), import_package("foolbox.models.pytorch")
    bounded = models.PyTorchModel(model, bounds=(0, 1), device="cpu")
    attack = foolbox.attacks.LinfPGD(abs_stepsize=workload.step_size, steps=workload.steps)
    return lambda: attack(bounded, x, y, epsilons=workload.eps)


def art_pgd(workload: Workload, model: nn.Module, x: Tensor, y: Tensor) -> Turn:
    classifier = import_package("art.estimators.classification").PyTorchClassifier(
        model, nn.CrossEntropyLoss(), x.shape[1:], CLASSES, clip_values=(0, 1), device_type="cpu"
    )
    attack = import_package("art.attacks.evasion").ProjectedGradientDescentPyTorch(
        classifier,
        eps=workload.eps,
        eps_step=workload.step_size,
        max_iter=workload.steps,
        num_random_init=1,
        batch_size=len(x),
        verbose=False,
    )
    return lambda: attack.generate(x.numpy(), y.numpy())
