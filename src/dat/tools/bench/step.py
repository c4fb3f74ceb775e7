"""`dat bench step`: a whole step of adversarial training, images per second and memory.

The loops are given a batch; ours draws its own, and exchanges, checks and reports as in a run.
`bare` does the arithmetic of ours without the framework, so the difference is the framework's
overhead. All use torch's SGD, since `dat bench optimizer` compares optimizers.
"""

from __future__ import annotations

import multiprocessing
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor, nn

from dat.attacks import attack_mode
from dat.data import Mix, PartitionPlan, make_batches
from dat.distributed import Exchange, ScopedBatchNorm, WorkerSubgroup, World
from dat.objectives import Adversarial
from dat.optim import SGD
from dat.tools.bench import memory, plain
from dat.tools.bench.attack import CONVOLUTIONS
from dat.tools.bench.baselines import BASELINES, load_baselines
from dat.tools.bench.limits import describe_machine, measure_limits, time_convolutions, use_threads
from dat.tools.bench.timing import Comparison, Turn, take_turns
from dat.tools.bench.workload import Workload
from dat.train.engine import Compute, Engine
from dat.train.inner import InnerMaximization
from dat.train.sampling import Sampler
from dat.train.step import dat_step
from dat.train.worker import Worker

RATE = 0.001
STEPS = 2
"""Steps after which memory has reached its peak."""
MEMORY_RUNS = 5
"""The median of these is reported: fragmentation varies the peak by a tenth."""


@dataclass(frozen=True, kw_only=True)
class StepWorkload(Workload):
    """A workload whose network is trained."""

    clean: bool = False
    """Train on the clean images too (lambda = 1), as the paper does with PGD."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return SGD(lr=RATE)(model)


MakeTurn = Callable[[StepWorkload, ExitStack], Turn]


def bench_step(
    workload: StepWorkload,
    against: Sequence[str] = ("bare", "plain", "paper"),
    *,
    repeats: int = 5,
    seconds: float = 0.0,
    threads: int | None = None,
    measure_memory: bool = True,
) -> Comparison:
    """Speed is measured in this process; memory in separate processes, if asked for. Both in
    turns."""
    use_threads(threads)
    implementations: dict[str, MakeTurn] = OURS | load_baselines("step", against)
    threads = torch.get_num_threads()
    extras: dict[str, dict[str, float]] = {name: {} for name in implementations}
    if measure_memory:
        for name, peak in _memory(workload, list(implementations), threads).items():
            extras[name]["peak_bytes"] = peak
    with ExitStack() as stack:
        turns = {name: make(workload, stack) for name, make in implementations.items()}
        machine = describe_machine(limits := measure_limits())
        least, work = _lower_bound(workload)
        timings = take_turns(turns, repeats=repeats, seconds=seconds, title="stepping")
    notes: tuple[str, ...] = ()
    if "bare" in timings:
        over, low, high = (100 * (ratio - 1) for ratio in timings["ours"].over(timings["bare"]))
        extras["ours"] |= {"overhead": over, "overhead_low": low, "overhead_high": high}
        notes = (
            f"the framework's overhead over the bare loop, round by round: {over:+.1f} % "
            f"({low:+.1f} to {high:+.1f})",
        )
    return Comparison(
        bench="step",
        timings=timings,
        machine=machine,
        images=workload.batch,
        least=dict.fromkeys(turns, least),
        limit=f"{CONVOLUTIONS} (at the rate of a matrix product: {work / limits.flops:.3g} s)",
        flops=dict.fromkeys(turns, work),
        extras=extras,
        settings=workload.settings(),
        notes=notes,
    )


def _lower_bound(workload: StepWorkload) -> tuple[float, float]:
    """Seconds and operations of the convolutions of a step: the attack's and the update's."""
    convolutions = time_convolutions(workload.network(), workload.images()[0])
    attack, update = convolutions.attack(workload.steps), convolutions.update()
    updates = 2 if workload.clean else 1
    return attack[0] + updates * update[0], attack[1] + updates * update[1]


def _memory(workload: StepWorkload, names: Sequence[str], threads: int) -> dict[str, float]:
    """The median peak of each implementation, in bytes."""
    rounds = [[measure_peak(workload, name, threads) for name in names] for _ in range(MEMORY_RUNS)]
    peaks = zip(*rounds, strict=True)
    return {name: statistics.median(values) for name, values in zip(names, peaks, strict=True)}


def measure_peak(workload: StepWorkload, name: str, threads: int) -> int:
    """Peak growth, in bytes, of a process that builds an implementation and takes steps. It runs in
    a new process, since the memory that one has freed would be reused by the next."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(_peak, workload, name, threads).result()


def _peak(workload: StepWorkload, name: str, threads: int) -> int:
    torch.set_num_threads(threads)
    workload.images()
    memory.reset_peak()
    before = memory.resident()
    with ExitStack() as stack:
        turn = make_implementation(name)(workload, stack)
        for _ in range(STEPS):
            turn()
    return max(memory.peak() - before, 0)


def make_implementation(name: str) -> MakeTurn:
    """Ours or a baseline, by name."""
    implementations: dict[str, MakeTurn] = OURS | load_baselines("step", list(BASELINES["step"]))
    return implementations[name]


def _ours(workload: StepWorkload, stack: ExitStack) -> Turn:
    """A training step as a run takes it."""
    threads = torch.get_num_threads()
    world = stack.enter_context(World.join(device="cpu", threads=threads))
    worker = make_worker(workload, world)
    stack.callback(worker.exchange.close)
    worker.exchange.module.train()
    steps = count()
    return lambda: dat_step(worker, next(steps), 0)


OURS: dict[str, MakeTurn] = {"ours": _ours}


def make_worker(workload: StepWorkload, world: World) -> Worker:
    """A worker whose batch is the whole training set, so that an epoch is one step."""
    dealing = PartitionPlan(batch=workload.batch, workers=world.size, rank=world.rank, seed=0)
    model = workload.network()
    engine = Engine.of(model, Compute(), workload.images()[0], 0)
    exchange = Exchange(model, world)
    batches = make_batches(workload.data(), None, Mix(), dealing)
    subgroup = WorkerSubgroup(world)
    return Worker(
        sampler=Sampler(
            batches=batches, threat=workload.threat, subgroup=subgroup, device=world.device
        ),
        inner=InnerMaximization(workload.make_attack(), workload.threat),
        objective=Adversarial(clean_weight=float(workload.clean)),
        exchange=exchange,
        engine=engine,
        norms=ScopedBatchNorm(subgroup),
        optimizer=workload.optimizer(exchange.module),
    )


def bare_step(workload: StepWorkload, stack: ExitStack) -> Turn:
    """The computation of ours and nothing else: the same memory layout, the same folded copy to
    attack."""
    model, (x, y) = workload.network().train(), workload.images()
    optimizer = workload.optimizer(model)
    engine = Engine.of(model, Compute(), x, 0)
    x = engine.to_memory_format(x)

    def step() -> None:
        network = engine.target(eval_mode=True)
        with attack_mode(network):
            x_adv = plain.attack(network, x, y, workload)
        clean = x if workload.clean else None
        with engine.updating():
            plain.update(model, optimizer, x_adv, y, clean=clean, together=True)

    return step


def plain_step(workload: StepWorkload, stack: ExitStack) -> Turn:
    return _hand_written(workload, plain.attack)


def paper_step(workload: StepWorkload, stack: ExitStack) -> Turn:
    """PGD in eval mode that also computes the gradients of the parameters; clean images take a
    second forward pass."""
    return _hand_written(workload, plain.attack_with_all_gradients)


def _hand_written(
    workload: StepWorkload, attack: Callable[[nn.Module, Tensor, Tensor, Workload], Tensor]
) -> Turn:
    model, (x, y) = workload.network(), workload.images()
    optimizer = workload.optimizer(model)

    def step() -> None:
        model.eval()
        x_adv = attack(model, x, y, workload)
        model.train()
        plain.update(model, optimizer, x_adv, y, clean=x if workload.clean else None)

    return step
