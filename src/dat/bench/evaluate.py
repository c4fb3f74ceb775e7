"""`dat bench evaluate`: TA and RA of a model, ours beside a plain loop over batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from dat.attacks import attack_mode
from dat.bench import plain
from dat.bench.attack import CONVOLUTIONS
from dat.bench.limits import describe_machine, measure_limits, time_convolutions, use_threads
from dat.bench.peers import choose
from dat.bench.race import Job, Race, take_turns
from dat.bench.scene import Scene
from dat.comm import World
from dat.data import ImageData
from dat.evaluation import evaluate

CPU = torch.device("cpu")
IMAGES = 512
Maker = Callable[[Scene, nn.Module, ImageData, World], Job]


def bench_evaluate(
    scene: Scene,
    against: Sequence[str] = ("plain",),
    *,
    subject: tuple[nn.Module, ImageData] | None = None,
    images: int | None = None,
    repeats: int = 5,
    seconds: float = 0.0,
    threads: int | None = None,
) -> Race:
    """A model and its images, or the scene's network, to which its own answers are right: else an
    untrained network would be wrong to begin with, and there would be little to attack."""
    use_threads(threads)
    makers: dict[str, Maker] = OURS | choose(against, PEERS)
    model, data = subject or _untrained(scene, images or IMAGES)
    count = min(images or len(data), len(data))
    data = data.take(torch.arange(count))
    with World.join(device="cpu", threads=torch.get_num_threads()) as world:
        jobs = {name: make(scene, model, data, world) for name, make in makers.items()}
        machine = describe_machine(measure_limits())
        x, _ = data.batch(torch.arange(min(scene.batch, count)), CPU)
        passes = time_convolutions(model.eval(), x)
        timings = take_turns(jobs, repeats=repeats, seconds=seconds, title="evaluating")
    batches = count / len(x)
    attack, work = passes.attack(scene.steps)
    least = batches * (attack + 2 * passes.forward)  # before the attack, and after it
    return Race(
        bench="evaluate",
        timings=timings,
        machine=machine,
        images=count,
        least=dict.fromkeys(jobs, least),
        limit=f"{CONVOLUTIONS}, on every image",
        flops=dict.fromkeys(jobs, batches * (work + 2 * passes.flops)),
        settings=scene.settings(),
        notes=("ours does not attack what is wrong to begin with; the plain loop attacks all",),
    )


def _untrained(scene: Scene, count: int) -> tuple[nn.Module, ImageData]:
    model, data = scene.network().eval(), scene.data(count)
    with torch.no_grad():
        pieces = torch.arange(count).split(scene.batch)
        answers = [model(data.batch(rows, CPU)[0]).argmax(1) for rows in pieces]
    return model, replace(data, labels=torch.cat(answers))


def _ours(scene: Scene, model: nn.Module, data: ImageData, world: World) -> Job:
    options = {"threat": scene.threat, "attack": scene.oracle(), "batch": scene.batch}
    return lambda: evaluate(model, data, world=world, **options)  # type: ignore[arg-type]


def _plain(scene: Scene, model: nn.Module, data: ImageData, world: World) -> Job:
    def right(x: Tensor, y: Tensor) -> int:
        with torch.no_grad():
            return int((model(x).argmax(1) == y).sum())

    def run() -> tuple[int, int]:
        clean = robust = 0
        with attack_mode(model):
            for rows in torch.arange(len(data)).split(scene.batch):
                x, y = data.batch(rows, CPU)
                clean += right(x, y)
                robust += right(plain.attack(model, x, y, scene), y)
        return clean, robust

    return run


OURS: dict[str, Maker] = {"ours": _ours}
PEERS: dict[str, Maker] = {"plain": _plain}
