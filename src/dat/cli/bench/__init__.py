"""`dat bench`: benchmarks on this machine, one module per sub-command."""

from __future__ import annotations

from dat.cli.arguments import Commands
from dat.cli.bench import (
    attack,
    comm,
    evaluate,
    loader,
    optimizer,
    quantizer,
    startup,
    step,
)

BENCHMARKS = (attack, step, optimizer, evaluate, loader, startup, comm, quantizer)
"""In the order of `dat bench --help`."""


def add(commands: Commands) -> None:
    bench = commands.group(
        "bench",
        "benchmark attacks, steps, optimizers, data loading, startup, communication, quantizers",
        "Benchmark DAT on this machine, against other implementations and the hardware's limits.",
    )
    for benchmark in BENCHMARKS:
        benchmark.add(bench)
