"""`dat bench step`: a whole step of adversarial training, images a second and memory.

The loops are given a batch that is ready; ours draws its own, and exchanges, checks and reports as
in a run. `bare` does ours' arithmetic without the framework: the difference is what that costs. All
take torch's SGD, as `dat bench optimizer` compares those.
"""

from __future__ import annotations

import multiprocessing
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from dat.attacks import attack_mode
from dat.bench import memory, plain
from dat.bench.attack import CONVOLUTIONS
from dat.bench.limits import describe_machine, measure_limits, time_convolutions, use_threads
from dat.bench.peers import choose
from dat.bench.race import Job, Race, take_turns
from dat.bench.scene import Scene
from dat.comm import Exchange, Norms, Team, World
from dat.compute import Compute, Engine
from dat.data import Dealing, Mix, supply
from dat.objectives import Adversarial
from dat.optim import SGD
from dat.train.step import Worker, dat_step

RATE = 0.001
STEPS = 2
"""After which memory has reached its peak."""
WEIGHINGS = 5
"""Of which the median counts: where the allocator leaves gaps is chance, a tenth of the peak."""


@dataclass(frozen=True, kw_only=True)
class StepScene(Scene):
    """With a network that learns."""

    clean: bool = False
    """Train on the clean images too (lambda = 1), as the paper does with PGD."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return SGD(lr=RATE)(model)


Maker = Callable[[StepScene, ExitStack], Job]


def bench_step(
    scene: StepScene,
    against: Sequence[str] = ("bare", "plain", "paper"),
    *,
    repeats: int = 5,
    seconds: float = 0.0,
    threads: int | None = None,
    weigh: bool = True,
) -> Race:
    """Speed in turns in this process; memory, to `weigh`, in processes of their own, in turns."""
    use_threads(threads)
    makers = OURS | choose(against, PEERS)
    threads = torch.get_num_threads()
    extras: dict[str, dict[str, float]] = {name: {} for name in makers}
    if weigh:
        rounds = [[peak_of(scene, name, threads) for name in makers] for _ in range(WEIGHINGS)]
        for extra, peaks in zip(extras.values(), zip(*rounds, strict=True), strict=True):
            extra["peak_bytes"] = statistics.median(peaks)
    with ExitStack() as stack:
        jobs = {name: make(scene, stack) for name, make in makers.items()}
        machine = describe_machine(limits := measure_limits())
        least, work = _least(scene)
        timings = take_turns(jobs, repeats=repeats, seconds=seconds, title="stepping")
    notes: tuple[str, ...] = ()
    if "bare" in timings:
        over, low, high = (100 * (it - 1) for it in timings["ours"].over(timings["bare"]))
        extras["ours"] |= {"overhead": over, "overhead_low": low, "overhead_high": high}
        notes = (
            f"the framework's overhead over the bare loop, round by round: {over:+.1f} % "
            f"({low:+.1f} to {high:+.1f})",
        )
    return Race(
        bench="step",
        timings=timings,
        machine=machine,
        images=scene.batch,
        least=dict.fromkeys(jobs, least),
        limit=f"{CONVOLUTIONS} (at the rate of a matrix product: {work / limits.flops:.3g} s)",
        flops=dict.fromkeys(jobs, work),
        extras=extras,
        settings=scene.settings(),
        notes=notes,
    )


def _least(scene: StepScene) -> tuple[float, float]:
    """Seconds and operations of the attack's passes and of the update's."""
    passes = time_convolutions(scene.network(), scene.images()[0])
    attack, update = passes.attack(scene.steps), passes.update()
    times = 2 if scene.clean else 1
    return attack[0] + times * update[0], attack[1] + times * update[1]


def peak_of(scene: StepScene, name: str, threads: int) -> int:
    """Bytes by which a process grows at most that makes a contestant and lets it take steps. Alone
    in a process of its own, as what one of them has asked for the next would find there."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(_peak, scene, name, threads).result()


def _peak(scene: StepScene, name: str, threads: int) -> int:
    torch.set_num_threads(threads)
    scene.images()
    memory.reset_peak()
    before = memory.resident()
    with ExitStack() as stack:
        job = (OURS | PEERS)[name](scene, stack)
        for _ in range(STEPS):
            job()
    return max(memory.peak() - before, 0)


def _ours(scene: StepScene, stack: ExitStack) -> Job:
    """The steps that a run takes."""
    threads = torch.get_num_threads()
    world = stack.enter_context(World.join(device="cpu", threads=threads))
    worker = make_worker(scene, world)
    stack.callback(worker.exchange.close)
    worker.exchange.module.train()
    turns = count()
    return lambda: dat_step(worker, next(turns), 0)


def make_worker(scene: StepScene, world: World) -> Worker:
    """All images are one batch, so that every epoch is one step."""
    dealing = Dealing(batch=scene.batch, workers=world.size, place=world.rank, seed=0)
    model = scene.network()
    engine = Engine.of(model, Compute(), scene.images()[0], 0)
    exchange = Exchange(model, world)
    return Worker(
        supply=supply(scene.data(), None, Mix(), dealing),
        threat=scene.threat,
        attack=scene.oracle(),
        objective=Adversarial(clean_weight=float(scene.clean)),
        exchange=exchange,
        engine=engine,
        team=Team(world),
        norms=Norms(Team(world)),
        optimizer=scene.optimizer(exchange.module),
    )


def _bare(scene: StepScene, stack: ExitStack) -> Job:
    """What ours computes, and nothing else: the same layout, the same copy to attack."""
    model, (x, y) = scene.network().train(), scene.images()
    optimizer = scene.optimizer(model)
    engine = Engine.of(model, Compute(), x, 0)
    x = engine.lay(x)

    def step() -> None:
        network = engine.target(eval_mode=True)
        with attack_mode(network):
            x_adv = plain.attack(network, x, y, scene)
        clean = x if scene.clean else None
        with engine.updating():
            plain.update(model, optimizer, x_adv, y, clean=clean, together=True)

    return step


def _plain(scene: StepScene, stack: ExitStack) -> Job:
    return _by_hand(scene, plain.attack)


def _paper(scene: StepScene, stack: ExitStack) -> Job:
    """PGD in eval mode that computes the parameters' gradients too, and with clean images a second
    forward pass."""
    return _by_hand(scene, plain.attack_with_all_gradients)


def _by_hand(scene: StepScene, attack: Callable[[nn.Module, Tensor, Tensor, Any], Tensor]) -> Job:
    model, (x, y) = scene.network(), scene.images()
    optimizer = scene.optimizer(model)

    def step() -> None:
        model.eval()
        x_adv = attack(model, x, y, scene)
        model.train()
        plain.update(model, optimizer, x_adv, y, clean=x if scene.clean else None)

    return step


OURS: dict[str, Maker] = {"ours": _ours}
PEERS: dict[str, Maker] = {"bare": _bare, "plain": _plain, "paper": _paper}
