"""`dat bench attack`: images a second under PGD, ours beside a plain loop and beside peers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from dat.attacks import Victim, attack_mode
from dat.bench import plain
from dat.bench.limits import describe_machine, measure_limits, time_convolutions, use_threads
from dat.bench.peers import choose, load
from dat.bench.race import Job, Race, take_turns
from dat.bench.scene import CLASSES, Scene
from dat.models import fold

CONVOLUTIONS = (
    "the network's convolutions alone, each measured by itself, channels last: what the library of "
    "convolutions leaves possible"
)
Maker = Callable[[Scene, nn.Module, Tensor, Tensor], Job]


def bench_attack(
    scene: Scene,
    against: Sequence[str] = ("plain",),
    *,
    repeats: int = 5,
    seconds: float = 0.0,
    threads: int | None = None,
) -> Race:
    """All attack the same images on the same network in eval mode."""
    use_threads(threads)
    makers = OURS | choose(against, PEERS)
    model, (x, y) = scene.network().eval(), scene.images()
    jobs = {name: make(scene, model, x, y) for name, make in makers.items()}
    machine = describe_machine(limits := measure_limits())
    least, work = time_convolutions(model, x).attack(scene.steps)
    timings = take_turns(jobs, repeats=repeats, seconds=seconds, title="attacking")
    return Race(
        bench="attack",
        timings=timings,
        machine=machine,
        images=scene.batch,
        least=dict.fromkeys(jobs, least),
        limit=f"{CONVOLUTIONS} (at the rate of a matrix product: {work / limits.flops:.3g} s)",
        flops=dict.fromkeys(jobs, work),
        settings=scene.settings(),
    )


def _ours(scene: Scene, network: nn.Module, x: Tensor, y: Tensor) -> Job:
    threat, oracle = scene.threat, scene.oracle()

    def attack() -> Tensor:
        images = x.contiguous(memory_format=torch.channels_last)
        with attack_mode(network):
            return oracle(Victim(network, y), images, threat)

    return attack


def _folded(scene: Scene, model: nn.Module, x: Tensor, y: Tensor) -> Job:
    return _ours(scene, fold(model, x).network, x, y)


def _plain(scene: Scene, model: nn.Module, x: Tensor, y: Tensor) -> Job:
    return lambda: plain.attack(model, x, y, scene)


def _torchattacks(scene: Scene, model: nn.Module, x: Tensor, y: Tensor) -> Job:
    attack = load("torchattacks").PGD(
        model, eps=scene.eps, alpha=scene.step, steps=scene.steps, random_start=True
    )
    return lambda: attack(x, y)


def _foolbox(scene: Scene, model: nn.Module, x: Tensor, y: Tensor) -> Job:
    foolbox = load("foolbox")
    bounded = load("foolbox.models.pytorch").PyTorchModel(model, bounds=(0, 1), device="cpu")
    attack = foolbox.attacks.LinfPGD(abs_stepsize=scene.step, steps=scene.steps)
    return lambda: attack(bounded, x, y, epsilons=scene.eps)


def _art(scene: Scene, model: nn.Module, x: Tensor, y: Tensor) -> Job:
    classifier = load("art.estimators.classification").PyTorchClassifier(
        model, nn.CrossEntropyLoss(), x.shape[1:], CLASSES, clip_values=(0, 1), device_type="cpu"
    )
    attack = load("art.attacks.evasion").ProjectedGradientDescentPyTorch(
        classifier,
        eps=scene.eps,
        eps_step=scene.step,
        max_iter=scene.steps,
        num_random_init=1,
        batch_size=len(x),
        verbose=False,
    )
    return lambda: attack.generate(x.numpy(), y.numpy())


OURS: dict[str, Maker] = {"ours, folded (as in evaluation)": _folded, "ours": _ours}
PEERS: dict[str, Maker] = {
    "plain": _plain,
    "torchattacks": _torchattacks,
    "foolbox": _foolbox,
    "art": _art,
}
