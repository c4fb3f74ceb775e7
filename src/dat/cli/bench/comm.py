"""`dat bench comm`: the time and traffic of an exchange of gradients."""

from __future__ import annotations

import argparse
from pathlib import Path

from dat.cli.arguments import (
    Commands,
    int_list,
    positive_int,
    scientific_int,
    str_list,
    timing_arguments,
    workers_argument,
)
from dat.jobs.launch import is_worker


def add(bench: Commands) -> None:
    comm = bench.add(
        "comm",
        _comm,
        "benchmark gradient aggregation with every protocol: seconds and bytes",
        "  dat bench comm --workers 4 --link 1gbit,10gbit,unshaped\n"
        "  dat bench comm --workers 6 --quantizer vector --bits 32,16,8 "
        "--protocols gather,server\n"
        "  dat bench comm --workers 6 --inside 3 --protocols chunked,hybrid --link 1gbit\n"
        "  torchrun --nnodes 6 ... -m dat bench comm       on your own cluster",
    )
    _arguments(comm)


def _arguments(comm: argparse.ArgumentParser) -> None:
    workers_argument(comm, default=2)
    comm.add_argument(
        "--model", default="resnet50", help="network whose gradient to sum (default: resnet50)"
    )
    comm.add_argument(
        "--values",
        type=scientific_int,
        metavar="N",
        help="a gradient of N values, instead of a network's",
    )
    comm.add_argument(
        "--bits",
        type=int_list,
        default=(32, 8, 4),
        help="bits per value, comma-separated (default: 32,8,4)",
    )
    comm.add_argument(
        "--protocols",
        type=str_list,
        default=("dense", "gather", "server", "chunked", "ring"),
        help="comma-separated, e.g. dense,chunked,hybrid (default: all but hybrid)",
    )
    comm.add_argument(
        "--inside",
        type=positive_int,
        metavar="Q",
        help="workers per node, for the hybrid protocol; divides --workers (default: as launched)",
    )
    comm.add_argument(
        "--quantizer", default="bucket", help="bucket, tensor or vector (default: bucket)"
    )
    comm.add_argument(
        "--link",
        type=str_list,
        default=(),
        help="emulate hosts with such links, comma-separated: 100mbit, 1gbit, 2.5gbit, 10gbit, "
        "25gbit, unshaped; requires root (default: the loopback interface)",
    )
    comm.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    timing_arguments(comm)


def _comm(arguments: argparse.Namespace, argv: list[str]) -> int:
    from dat.report import check_picture
    from dat.tools.bench.cases import check_protocols, make_quantizer

    if arguments.plot:
        check_picture(arguments.plot)
    check_protocols(arguments.protocols)
    for bits in arguments.bits:
        make_quantizer(arguments.quantizer, bits)
    if is_worker() and arguments.link and not arguments.result:
        raise ValueError("--link: emulates hosts on one machine; omit it under a launcher")
    from dat.tools.bench import CommPlan, bench_comm, measure_comm, show_comm

    names = ("model", "values", "bits", "protocols", "quantizer", "repeats", "threads", "inside")
    plan = CommPlan(**{name: getattr(arguments, name) for name in names})
    if is_worker():
        rows = measure_comm(plan, arguments.result)
    else:
        rows = bench_comm(plan, arguments.workers or 2, arguments.link, argv)
    if rows:
        show_comm(rows, as_json=arguments.json, plot=arguments.plot)
    return 0
