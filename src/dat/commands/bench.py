"""Commands that measure this machine."""

from __future__ import annotations

import argparse
from pathlib import Path

from dat.commands import racing
from dat.commands.arguments import (
    Commands,
    count,
    counts,
    measuring_arguments,
    positive,
    words_of,
    workers_argument,
)
from dat.launch import is_worker


def add(commands: Commands) -> None:
    bench = commands.group(
        "bench",
        "measure attacks, steps, optimizers, loading, startup, communication, quantizers",
        "Measure on this machine how long it takes, beside others and beside the machine's limits.",
    )
    racing.add(bench)
    _comm_arguments(
        bench.add(
            "comm",
            _comm,
            "sum a gradient over workers by every protocol: seconds and bytes",
            "  dat bench comm --workers 4 --link 1gbit,10gbit,unshaped\n"
            "  dat bench comm --workers 6 --quantizer vector --bits 32,16,8 "
            "--protocols gather,server\n"
            "  dat bench comm --workers 6 --inside 3 --protocols chunked,hybrid --link 1gbit\n"
            "  torchrun --nnodes 6 ... -m dat bench comm       on a cluster of your own",
        )
    )
    _quantizer_arguments(
        bench.add(
            "quantizer",
            _quantizer,
            "encode and decode a gradient: speed beside a copy, size, noise",
            "  dat bench quantizer --bits 8,4,2\n  dat bench quantizer --plot speed.png",
        )
    )


def _comm_arguments(comm: argparse.ArgumentParser) -> None:
    workers_argument(comm, usual=2)
    comm.add_argument("--model", default="resnet50", help="whose gradient (resnet50)")
    comm.add_argument("--values", type=count, metavar="N", help="a gradient of N values instead")
    comm.add_argument("--bits", type=counts, default=(32, 8, 4), help="e.g. 32,8,4")
    comm.add_argument(
        "--protocols",
        type=words_of,
        default=("dense", "gather", "server", "chunked", "ring"),
        help="e.g. dense,chunked,hybrid (all but hybrid)",
    )
    comm.add_argument(
        "--inside",
        type=positive,
        metavar="Q",
        help="workers a host, the nodes of protocol hybrid; divides --workers (as launched)",
    )
    comm.add_argument("--quantizer", default="bucket", help="bucket, tensor or vector (bucket)")
    comm.add_argument(
        "--link",
        type=words_of,
        default=(),
        help="hosts of their own with such links: 100mbit, 1gbit, 2.5gbit, 10gbit, 25gbit, "
        "unshaped; several with commas; needs root (workers on the loopback interface)",
    )
    comm.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    measuring_arguments(comm)


def _quantizer_arguments(quantizer: argparse.ArgumentParser) -> None:
    quantizer.add_argument(
        "--values", type=count, default=25_000_000, metavar="N", help="how many (25e6)"
    )
    quantizer.add_argument("--bits", type=counts, default=(16, 8, 4, 3, 2), help="e.g. 8,4,2")
    quantizer.add_argument(
        "--quantizers",
        type=words_of,
        default=("bucket", "tensor", "vector"),
        help="e.g. bucket,vector (all)",
    )
    measuring_arguments(quantizer)


def _comm(arguments: argparse.Namespace, words: list[str]) -> int:
    from dat.bench import CommPlan, bench_comm, measure_comm, show_comm
    from dat.report import check_picture

    names = ("model", "values", "bits", "protocols", "quantizer", "repeats", "threads", "inside")
    plan = CommPlan(**{name: getattr(arguments, name) for name in names})
    if arguments.plot:
        check_picture(arguments.plot)
    if is_worker() and arguments.link and not arguments.result:
        raise ValueError("--link: makes hosts on one machine; leave it out under a launcher")
    if is_worker():
        rows = measure_comm(plan, arguments.result)
    else:
        rows = bench_comm(plan, arguments.workers or 2, arguments.link, words)
    if rows:
        show_comm(rows, as_json=arguments.json, plot=arguments.plot)
    return 0


def _quantizer(arguments: argparse.Namespace, words: list[str]) -> int:
    from dat.bench import bench_quantizer, show_quantizer
    from dat.report import check_picture

    if arguments.plot:
        check_picture(arguments.plot)
    rows = bench_quantizer(
        arguments.bits,
        arguments.quantizers,
        values=arguments.values,
        repeats=arguments.repeats,
        threads=arguments.threads,
    )
    show_quantizer(rows, as_json=arguments.json, plot=arguments.plot)
    return 0
