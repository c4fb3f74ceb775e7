"""A training step on a slow link, the exchange beside the backward pass: ours and torch's hooks.

    sudo python benchmarks/overlap.py [--workers 4] [--link 1gbit] [--steps 5]

ResNet-50 (25.6 million parameters), a forward and a backward pass of a few small images per worker,
on hosts with shaped links (network namespaces). Exposed: what a step takes longer than the same
step without any exchange (DDP's no_sync). torch's PowerSGD hook is given one bucket: with several
under way it waits for ever on gloo. Ways take turns, step by step.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from runs import save, table
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from dat.distributed import Buckets, Chunked, Dense, Exchange, Ring, World
from dat.models import build_model
from dat.tools.bench import run_workers, testbed

ONE_BUCKET = 1 << 20


def ways(world: World) -> dict[str, Callable[[torch.Tensor], None]]:
    """Each takes a step with a network of its own."""

    def network() -> torch.nn.Module:
        return build_model("resnet50", 1000, channels=3)

    def backward(model: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> None:
        model(x).square().mean().backward()

    def exchange(how: Exchange) -> Callable[[torch.Tensor], None]:
        return lambda x: backward(how, x)

    def ddp(model: DistributedDataParallel, silent: bool = False) -> Callable[[torch.Tensor], None]:
        def step(x: torch.Tensor) -> None:
            with model.no_sync() if silent else contextlib.nullcontext():
                backward(model, x)

        return step

    half = DistributedDataParallel(network())
    half.register_comm_hook(None, default_hooks.fp16_compress_hook)
    power = DistributedDataParallel(network(), bucket_cap_mb=ONE_BUCKET)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    power.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return {
        "no exchange": ddp(DistributedDataParallel(network()), silent=True),
        "torch DDP, fp32": ddp(DistributedDataParallel(network())),
        "torch DDP, fp16 hook": ddp(half),
        "torch DDP, PowerSGD rank 2 (biased)": ddp(power),
        "DAT, dense": exchange(Exchange(network(), world, protocol=Dense())),
        "DAT, 8 bits, ring": exchange(
            Exchange(network(), world, quantizer=Buckets(bits=8), protocol=Ring())
        ),
        "DAT, 8 bits, chunked": exchange(
            Exchange(network(), world, quantizer=Buckets(bits=8), protocol=Chunked())
        ),
        "DAT, 4 bits, chunked": exchange(
            Exchange(network(), world, quantizer=Buckets(bits=4), protocol=Chunked())
        ),
    }


def work(steps: int, images: int, out: Path) -> None:
    """What one worker does."""
    with World.join(threads=1) as world:
        x = torch.randn(images, 3, 64, 64, generator=torch.Generator().manual_seed(world.rank))
        taken: dict[str, list[float]] = {}
        every = ways(world)
        for _ in range(steps + 3):  # DDP cuts its buckets anew, PowerSGD starts at its third step
            for name, step in every.items():
                world.barrier()
                start = time.perf_counter()
                step(x)
                taken.setdefault(name, []).append(time.perf_counter() - start)
        mine = torch.tensor([times[3:] for times in taken.values()], dtype=torch.float64)
        slowest = world.gather(mine).amax(0)
        if world.first:
            medians = [statistics.median(row) for row in slowest.tolist()]
            out.write_text(json.dumps(dict(zip(taken, medians, strict=True))))
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--link", default="1gbit")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--images", type=int, default=8)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.out:
        work(arguments.steps, arguments.images, arguments.out)
    with (
        tempfile.TemporaryDirectory() as folder,
        testbed(arguments.workers, arguments.link) as hosts,
    ):
        out = Path(folder) / "seconds.json"
        words = [sys.executable, __file__, *sys.argv[1:], "--out", str(out)]
        run_workers(hosts, words)
        seconds = json.loads(out.read_text())
    alone = seconds["no exchange"]
    base = seconds["torch DDP, fp32"] - alone
    rows = [
        [name, f"{taken:.2f}", f"{taken - alone:.2f}", f"{base / max(taken - alone, 1e-3):.1f}"]
        for name, taken in seconds.items()
        if name != "no exchange"
    ]
    rows.insert(0, ["no exchange", f"{alone:.2f}", "", ""])
    results = {"workers": arguments.workers, "link": arguments.link, "seconds": seconds}
    save(Path(__file__), results, table(["Step", "s", "Exposed (s)", "x"], rows))


if __name__ == "__main__":
    main()
