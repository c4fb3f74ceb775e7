"""Predicted beside measured: training steps between hosts with shaped links.

    sudo python benchmarks/planner.py [--quick] [--workers 2,3,4,6] [--links 100mbit,1gbit,10gbit]

A step is a forward and a backward pass of a PreActResNet-18 on a few small images, and the exchange
beside it, on hosts that are network namespaces and share this machine's cores. The constants come
from `dat plan --calibrate` and from passes of two workers that exchange nothing; none is fitted to
what is then predicted. Every row is written down as soon as it is measured, and what is there is
not measured again (--fresh begins anew).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from runs import RESULTS, table

from dat.distributed import PROTOCOLS, Buckets, Exchange, World
from dat.distributed.affinity import cores
from dat.models import build_model
from dat.tools.bench import run_workers, testbed
from dat.tools.planning import (
    Cluster,
    ComputeTimes,
    Costs,
    Gradient,
    NetworkLink,
    calibrate,
    predict,
)
from dat.tools.planning.costs import read as read_costs
from dat.tools.planning.gradient import slots_of, watch_backward

Case = tuple[str, int]
CASES: tuple[Case, ...] = (
    ("dense", 32),
    *((name, bits) for name in ("gather", "server", "chunked") for bits in (32, 8, 4)),
)
WORKERS, LINKS = (2, 3, 4, 6), ("100mbit", "1gbit", "10gbit")
QUICK_WORKERS, QUICK_LINKS = (2, 4), ("100mbit", "1gbit", "10gbit")
WIDTHS = {"100mbit": 24, "1gbit": 64, "10gbit": 64}
"""Of the network: at 100 Mbit/s a large one would take hours."""
IMAGES, SIDE = 4, 32
WARM = 2
"""Steps before time is taken: DDP cuts its buckets anew after the first."""
NAMESPACE_GOODPUT = 1448 / 1514
"""The token bucket counts the headers of every packet of 1,514 bytes, though the kernel hands over
many at once."""
FILE = RESULTS / "planner.json"


def network(width: int) -> torch.nn.Module:
    return build_model("preact-resnet18", 10, channels=3, width=width)


def images(rank: int) -> torch.Tensor:
    return torch.randn(IMAGES, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(rank))


def measure_steps(width: int, steps: int, cases: Sequence[Case], out: Path) -> None:
    """What one worker does; the first writes a line for every case."""
    with World.join(threads=1) as world:
        x, first = images(world.rank), network(width)
        for _ in range(WARM):  # memory is taken from the system once
            first(x).square().mean().backward()
        for protocol, bits in cases:
            exchange = Exchange(
                network(width),
                world,
                quantizer=Buckets(bits=bits),
                protocol=PROTOCOLS[protocol](),
            )
            whole, silent = [], []
            for _ in range(WARM + steps):
                whole.append(_step(exchange, world, x))
                with exchange.no_sync():
                    silent.append(_step(exchange, world, x))
            sent = exchange.ledger.read_and_reset().sent / len(whole)
            exchange.close()
            mine = torch.tensor((whole[WARM:], silent[WARM:]), dtype=torch.float64)
            slowest = world.gather(mine).amax(0)
            total = world.gather(torch.tensor(sent, dtype=torch.float64)).sum()
            if world.first:
                row = {
                    "protocol": protocol,
                    "bits": bits,
                    "seconds": float(slowest[0].median()),
                    "silent": float(slowest[1].median()),
                    "all_seconds": slowest[0].tolist(),
                    "bytes": float(total),
                }
                with out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    os._exit(0)


def _step(exchange: Exchange, world: World, x: torch.Tensor) -> float:
    world.barrier()
    start = time.perf_counter()
    exchange(x).square().mean().backward()
    return time.perf_counter() - start


def measure_compute(width: int, out: Path) -> None:
    """The passes of a worker, while as many as there are cores do the same."""
    with World.join(threads=1) as world:
        model, x = network(width), images(world.rank)
        gradient = watch_backward(model, x, lambda logits: logits.square().mean())
        laps = []
        for _ in range(12):
            world.barrier()
            start = time.perf_counter()
            outcome = model(x).square().mean()
            middle = time.perf_counter()
            outcome.backward()
            laps.append((middle - start, time.perf_counter() - middle))
        forward, backward = (statistics.median(lap) for lap in zip(*laps[2:], strict=True))
        found = world.gather(torch.tensor((forward, backward), dtype=torch.float64)).mean(0)
        if world.first:
            row = {"forward": float(found[0]), "backward": float(found[1])}
            order = [slot.position for slot in gradient.slots]
            out.write_text(json.dumps(row | {"order": order, "ready": list(gradient.ready)}))
    os._exit(0)


def known(fresh: bool) -> dict[str, Any]:
    if FILE.exists() and not fresh:
        return dict(json.loads(FILE.read_text()))
    return {"rows": []}


def keep(found: dict[str, Any]) -> None:
    FILE.write_text(json.dumps(found, indent=1) + "\n")


def compute_of(found: dict[str, Any], width: int) -> tuple[Gradient, ComputeTimes]:
    told = found["compute"][str(width)]
    slots = {slot.position: slot for slot in slots_of(network(width)).values()}
    gradient = Gradient(tuple(slots[at] for at in told["order"]), tuple(told["ready"]))
    passes = ComputeTimes(images=IMAGES, forward=told["forward"], backward=told["backward"])
    return gradient, passes


def measure(found: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Whatever is not known yet: the constants, then the grid."""
    words = [sys.executable, __file__]
    if "costs" not in found:
        found["costs"] = asdict(calibrate())
        keep(found)
    found.setdefault("compute", {})
    with tempfile.TemporaryDirectory() as folder:
        for width in sorted({WIDTHS[link] for link in arguments.links}):
            if str(width) not in found["compute"]:
                out = Path(folder) / f"compute{width}.json"
                with testbed(cores(), "unshaped") as hosts:
                    run_workers(hosts, [*words, "--compute", str(width), "--out", str(out)])
                found["compute"][str(width)] = json.loads(out.read_text())
                keep(found)
        for workers in arguments.workers:
            for link in arguments.links:
                try:
                    measure_grid(found, workers, link, arguments.steps)
                except OSError as error:  # a worker was lost; what it had measured is kept
                    print(f"M = {workers}, {link}: {error}; run it again", flush=True)


def measure_grid(found: dict[str, Any], workers: int, link: str, steps: int) -> None:
    where = {"workers": workers, "link": link, "width": WIDTHS[link]}
    out = RESULTS / f".planner-{workers}-{link}.jsonl"
    absorb(found, where, out)  # of a measurement that was cut off
    there = {
        (row["protocol"], row["bits"])
        for row in found["rows"]
        if (row["workers"], row["link"]) == (workers, link)
    }
    missing = [case for case in CASES if case not in there]
    if not missing:
        return
    told = ",".join(f"{name}:{bits}" for name, bits in missing)
    words = [sys.executable, __file__, "--steps", str(steps), "--cases", told]
    try:
        with testbed(workers, link) as hosts:
            run_workers(hosts, [*words, "--width", str(WIDTHS[link]), "--out", str(out)])
    finally:
        absorb(found, where, out)
        print(f"M = {workers}, {link}", flush=True)


def absorb(found: dict[str, Any], where: dict[str, Any], out: Path) -> None:
    """Take over the rows that workers have written."""
    if out.exists():
        found["rows"] += [where | json.loads(line) for line in out.read_text().splitlines()]
        keep(found)
        out.unlink()


def foresee(found: dict[str, Any]) -> None:
    """Put the prediction beside every measured row."""
    costs = costs_of(found)
    passes = {width: compute_of(found, int(width)) for width in found["compute"]}
    for row in found["rows"]:
        gradient, compute = passes[str(row["width"])]
        link = NetworkLink.named(row["link"], latency=0.0, goodput=NAMESPACE_GOODPUT)
        cluster = Cluster(nodes=row["workers"], link=link, inside=link, cores=cores(), shared=True)
        seen = predict(
            gradient,
            compute,
            protocol=row["protocol"],
            quantizer=Buckets(bits=row["bits"]),
            cluster=cluster,
            costs=costs,
        )
        row["predicted"], row["predicted_silent"] = seen.step, seen.alone
        row["predicted_bytes"] = seen.sent
        row["error"] = seen.step / row["seconds"] - 1


def costs_of(found: dict[str, Any]) -> Costs:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "costs.json"
        path.write_text(json.dumps(found["costs"]))
        return read_costs(path)


def show(found: dict[str, Any]) -> str:
    """A row a way, predicted / measured in each cell, and the median error."""
    rows = found["rows"]
    places = sorted({(row["link"], row["workers"]) for row in rows}, key=_place)
    lines = []
    for protocol, bits in CASES:
        cells = []
        for link, workers in places:
            key = (protocol, bits, link, workers)
            cells += [
                f"{row['predicted']:.2f} / {row['seconds']:.2f}"
                for row in rows
                if key == (row["protocol"], row["bits"], row["link"], row["workers"])
            ] or [""]
        lines.append([f"{protocol}, {bits} bits", *cells])
    errors = [abs(row["error"]) for row in rows]
    lines.append(["median error", *(_median_error(rows, *place) for place in places)])
    headers = ["Step (s), predicted / measured", *(f"M = {m}, {link}" for link, m in places)]
    if errors:
        print(f"median error {100 * statistics.median(errors):.1f} % over {len(errors)} rows")
    return table(headers, lines)


def _place(place: tuple[str, int]) -> tuple[int, int]:
    return LINKS.index(place[0]), place[1]


def _median_error(rows: Sequence[dict[str, Any]], link: str, workers: int) -> str:
    errors = [abs(it["error"]) for it in rows if (it["link"], it["workers"]) == (link, workers)]
    return f"{100 * statistics.median(errors):.0f} %"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=_numbers, default=WORKERS)
    parser.add_argument("--links", type=_words, default=LINKS)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="2 and 4 hosts, 3 steps")
    parser.add_argument("--fresh", action="store_true", help="forget what was measured")
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--compute", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--width", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--cases", help=argparse.SUPPRESS)
    return parser.parse_args()


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(","))


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def main() -> None:
    arguments = parse()
    if arguments.compute:
        measure_compute(arguments.compute, arguments.out)
    if arguments.out:
        pairs = [case.split(":") for case in arguments.cases.split(",")]
        cases = [(name, int(bits)) for name, bits in pairs]
        measure_steps(arguments.width, arguments.steps, cases, arguments.out)
    RESULTS.mkdir(exist_ok=True)
    if os.geteuid() != 0:
        print("planner: hosts with shaped links need root (sudo); nothing is measured")
        return
    if arguments.quick:
        arguments.workers, arguments.links, arguments.steps = QUICK_WORKERS, QUICK_LINKS, 3
    found = known(arguments.fresh)
    measure(found, arguments)
    foresee(found)
    found["median_error"] = statistics.median(abs(row["error"]) for row in found["rows"])
    keep(found)
    FILE.with_suffix(".md").write_text(text := show(found))
    print(text)


if __name__ == "__main__":
    main()
