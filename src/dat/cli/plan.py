"""`dat plan`: what a training step takes on a cluster."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dat.cli.arguments import (
    Commands,
    plot_argument,
    positive_int,
    recipe_arguments,
    str_list,
    trust_argument,
)

if TYPE_CHECKING:
    from dat.tools.planning import Cluster


def add(commands: Commands) -> None:
    plan = commands.add(
        "plan",
        _plan,
        "predict step time, traffic and memory on a cluster; recommend a protocol and bits",
        "  dat plan --calibrate                                  measure this machine, once\n"
        "  dat plan digits --nodes 4 --link 1gbit\n"
        "  dat plan imagenet --nodes 6 --devices 6 --link 1gbit --compute 2.4 --sweep nodes\n"
        "  dat plan digits --nodes 2 --link 10gbit --sweep bits quantizer.size=128",
    )
    recipe_arguments(plan, optional=True)
    _cluster_arguments(plan)
    plan.add_argument(
        "--compute",
        type=float,
        metavar="SECONDS",
        help="seconds per step of a worker on its own device, without communication (default: "
        "measured here)",
    )
    plan.add_argument(
        "--sweep",
        type=str_list,
        default=("bits", "protocol"),
        metavar="WHAT",
        help="what to vary, comma-separated: bits, protocol, nodes (default: bits,protocol)",
    )
    plan.add_argument(
        "--calibrate", action="store_true", help="measure this machine's kernels and messages"
    )
    plan.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    trust_argument(plan)
    plot_argument(plan)


def _cluster_arguments(plan: argparse.ArgumentParser) -> None:
    plan.add_argument(
        "--nodes", type=positive_int, default=1, metavar="N", help="number of nodes (default: 1)"
    )
    plan.add_argument(
        "--devices", type=positive_int, default=1, metavar="D", help="workers per node (default: 1)"
    )
    plan.add_argument(
        "--link",
        default="1gbit",
        metavar="RATE",
        help="bandwidth between nodes, e.g. 100mbit or 25gbit (default: 1gbit)",
    )
    plan.add_argument(
        "--inside", metavar="RATE", help="bandwidth between a node's devices (default: 100gbit)"
    )
    plan.add_argument(
        "--latency", type=float, metavar="US", help="link latency in microseconds (default: 50)"
    )
    plan.add_argument(
        "--cores",
        type=float,
        metavar="N",
        help="CPU cores per node (default: those of this machine)",
    )


def _plan(arguments: argparse.Namespace, argv: list[str]) -> int:
    if arguments.calibrate:
        return _calibrate(arguments)
    if arguments.recipe is None:
        raise ValueError("specify a recipe to plan for, or --calibrate to measure this machine")
    from dat.config.recipes import read
    from dat.config.schema import parse_edits
    from dat.report import check_picture
    from dat.tools.planning.sweeps import check_sweep

    config = read(arguments.recipe, parse_edits(arguments.settings), trust=arguments.trust)
    if arguments.plot:
        check_picture(arguments.plot)
    check_sweep(arguments.sweep)
    cluster = _cluster(arguments)
    from dat.tools.planning.costs import load
    from dat.tools.planning.job import plan
    from dat.tools.planning.show import show_plan

    prediction = plan(
        config,
        arguments.recipe,
        cluster=cluster,
        costs=load(),
        seconds=arguments.compute,
        sweep=arguments.sweep,
    )
    show_plan(prediction, as_json=arguments.json, plot=arguments.plot)
    return 0


def _cluster(arguments: argparse.Namespace) -> Cluster:
    from dat.tools.planning.cluster import INSIDE, INSIDE_LATENCY, LATENCY, Cluster, NetworkLink

    latency = LATENCY if arguments.latency is None else 1e-6 * arguments.latency
    if latency < 0:
        raise ValueError(f"--latency {arguments.latency}: must be at least 0")
    link = NetworkLink.named(arguments.link, latency=latency)
    inside = NetworkLink.named(arguments.inside or INSIDE, latency=INSIDE_LATENCY, goodput=1.0)
    from dat.core import devices
    from dat.distributed.affinity import cores

    return Cluster(
        nodes=arguments.nodes,
        devices=arguments.devices,
        link=link,
        inside=inside,
        cores=cores() if arguments.cores is None else arguments.cores,
        accelerated=arguments.compute is not None or devices.accelerator() is not None,
    )


def _calibrate(arguments: argparse.Namespace) -> int:
    from dat.tools.planning.calibration import calibrate, measure

    if arguments.result:
        measure(arguments.result)
        return 0
    if arguments.recipe is not None:
        raise ValueError(f"--calibrate: measures this machine; omit the recipe {arguments.recipe}")
    from dat.tools.planning.costs import costs_file, save
    from dat.tools.planning.show import show_costs

    print("measuring kernels, messages and sums between two workers ...", file=sys.stderr)
    costs = calibrate()
    save(costs, costs_file())
    show_costs(costs, costs_file(), as_json=arguments.json)
    return 0
