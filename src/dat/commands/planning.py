"""The command that tells what a cluster will do."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dat.commands.arguments import Commands, plot_argument, positive, recipe_arguments, words_of

if TYPE_CHECKING:
    from dat.planning import Cluster


def add(commands: Commands) -> None:
    plan = commands.add(
        "plan",
        _plan,
        "predict a step's time, bytes and memory on a cluster, and recommend protocol and bits",
        "  dat plan --calibrate                                  measure this machine, once\n"
        "  dat plan digits --nodes 4 --link 1gbit\n"
        "  dat plan imagenet --nodes 6 --devices 6 --link 1gbit --compute 2.4 --sweep nodes\n"
        "  dat plan digits --nodes 2 --link 10gbit --sweep bits quantizer.size=128",
    )
    recipe_arguments(plan, optional=True)
    plan.add_argument("--nodes", type=positive, default=1, metavar="N", help="machines (1)")
    plan.add_argument(
        "--devices", type=positive, default=1, metavar="D", help="workers a machine (1)"
    )
    plan.add_argument(
        "--link", default="1gbit", metavar="RATE", help="between nodes: 100mbit, 25gbit (1gbit)"
    )
    plan.add_argument("--inside", metavar="RATE", help="between a node's devices (100gbit)")
    plan.add_argument("--latency", type=float, metavar="US", help="of a link, microseconds (50)")
    plan.add_argument("--cores", type=float, metavar="N", help="of a node (as many as here)")
    plan.add_argument(
        "--compute",
        type=float,
        metavar="SECONDS",
        help="a worker's step without exchange, on a device of its own (measured here)",
    )
    plan.add_argument(
        "--sweep",
        type=words_of,
        default=("bits", "protocol"),
        metavar="WHAT",
        help="what varies: bits, protocol, nodes (bits,protocol)",
    )
    plan.add_argument(
        "--calibrate", action="store_true", help="measure this machine's kernels and messages"
    )
    plan.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    plot_argument(plan)


def _plan(arguments: argparse.Namespace, words: list[str]) -> int:
    if arguments.calibrate:
        return _calibrate(arguments)
    if arguments.recipe is None:
        raise ValueError("RECIPE: name one to plan for, or measure this machine with --calibrate")
    from dat.config import parse_edits
    from dat.recipes import read
    from dat.report import check_picture

    config = read(arguments.recipe, parse_edits(arguments.settings))
    if arguments.plot:
        check_picture(arguments.plot)
    from dat.planning.costs import load
    from dat.planning.job import check_sweep, plan
    from dat.planning.show import show_plan

    check_sweep(arguments.sweep)
    cluster = _cluster(arguments)
    found = plan(
        config,
        arguments.recipe,
        cluster=cluster,
        costs=load(),
        seconds=arguments.compute,
        sweep=arguments.sweep,
    )
    show_plan(found, as_json=arguments.json, plot=arguments.plot)
    return 0


def _cluster(arguments: argparse.Namespace) -> Cluster:
    import torch

    from dat.comm.world import cores
    from dat.planning.cluster import INSIDE, INSIDE_LATENCY, LATENCY, Cluster, Link

    latency = LATENCY if arguments.latency is None else 1e-6 * arguments.latency
    if latency < 0:
        raise ValueError(f"--latency {arguments.latency}: must be 0 or more")
    return Cluster(
        nodes=arguments.nodes,
        devices=arguments.devices,
        link=Link.named(arguments.link, latency=latency),
        inside=Link.named(arguments.inside or INSIDE, latency=INSIDE_LATENCY, goodput=1.0),
        cores=cores() if arguments.cores is None else arguments.cores,
        accelerated=arguments.compute is not None or torch.cuda.is_available(),
    )


def _calibrate(arguments: argparse.Namespace) -> int:
    from dat.planning.calibration import calibrate, measure

    if arguments.result:
        measure(arguments.result)
        return 0
    if arguments.recipe is not None:
        raise ValueError(f"--calibrate: measures the machine, not {arguments.recipe}; leave it out")
    from dat.planning.costs import costs_file, save
    from dat.planning.show import show_costs

    print("measuring kernels, messages and sums between two workers ...", file=sys.stderr)
    found = calibrate()
    save(found, costs_file())
    show_costs(found, costs_file(), as_json=arguments.json)
    return 0
