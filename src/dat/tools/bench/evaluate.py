"""`dat bench evaluate`: TA and RA of a model, compared with a plain loop over batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from dat.attacks import attack_mode
from dat.data import ImageData
from dat.distributed import World
from dat.evaluation import evaluate
from dat.tools.bench import plain
from dat.tools.bench.attack import CONVOLUTIONS
from dat.tools.bench.baselines import load_baselines
from dat.tools.bench.limits import describe_machine, measure_limits, time_convolutions, use_threads
from dat.tools.bench.timing import Comparison, Turn, take_turns
from dat.tools.bench.workload import Workload

CPU = torch.device("cpu")
IMAGES = 512
MakeTurn = Callable[[Workload, nn.Module, ImageData, World], Turn]


def bench_evaluate(
    workload: Workload,
    against: Sequence[str] = ("plain",),
    *,
    subject: tuple[nn.Module, ImageData] | None = None,
    images: int | None = None,
    repeats: int = 5,
    seconds: float = 0.0,
    threads: int | None = None,
) -> Comparison:
    """Evaluate a model on its images, or the workload's untrained network. The labels of the latter
    are its own predictions: otherwise most images would be misclassified without an attack, and
    there would be little to attack."""
    use_threads(threads)
    implementations: dict[str, MakeTurn] = OURS | load_baselines("evaluate", against)
    model, data = subject or _untrained(workload, images or IMAGES)
    count = min(images or len(data), len(data))
    data = data.take(torch.arange(count))
    with World.join(device="cpu", threads=torch.get_num_threads()) as world:
        turns = {name: make(workload, model, data, world) for name, make in implementations.items()}
        machine = describe_machine(measure_limits())
        x, _ = data.batch(torch.arange(min(workload.batch, count)), CPU)
        convolutions = time_convolutions(model.eval(), x)
        timings = take_turns(turns, repeats=repeats, seconds=seconds, title="evaluating")
    batches = count / len(x)
    attack, work = convolutions.attack(workload.steps)
    least = batches * (attack + 2 * convolutions.forward)  # before the attack, and after it
    return Comparison(
        bench="evaluate",
        timings=timings,
        machine=machine,
        images=count,
        least=dict.fromkeys(turns, least),
        limit=f"{CONVOLUTIONS}, on every image",
        flops=dict.fromkeys(turns, batches * (work + 2 * convolutions.flops)),
        settings=workload.settings(),
        notes=("ours skips images that are misclassified already; the plain loop attacks all",),
    )


def _untrained(workload: Workload, count: int) -> tuple[nn.Module, ImageData]:
    model, data = workload.network().eval(), workload.data(count)
    with torch.no_grad():
        batches = torch.arange(count).split(workload.batch)
        predictions = [model(data.batch(rows, CPU)[0]).argmax(1) for rows in batches]
    return model, replace(data, labels=torch.cat(predictions))


def _ours(workload: Workload, model: nn.Module, data: ImageData, world: World) -> Turn:
    threat, attack, batch = workload.threat, workload.make_attack(), workload.batch
    return lambda: evaluate(model, data, threat=threat, attack=attack, batch=batch, world=world)


OURS: dict[str, MakeTurn] = {"ours": _ours}


def plain_loop(workload: Workload, model: nn.Module, data: ImageData, world: World) -> Turn:
    def count_correct(x: Tensor, y: Tensor) -> int:
        with torch.no_grad():
            return int((model(x).argmax(1) == y).sum())

    def run() -> tuple[int, int]:
        clean = robust = 0
        with attack_mode(model):
            for rows in torch.arange(len(data)).split(workload.batch):
                x, y = data.batch(rows, CPU)
                clean += count_correct(x, y)
                robust += count_correct(plain.attack(model, x, y, workload), y)
        return clean, robust

    return run
