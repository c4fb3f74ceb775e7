"""Commands that write what a cluster needs to start a run."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from dat.commands.arguments import Commands, positive, recipe_arguments, words_of

if TYPE_CHECKING:
    from dat.clusters import Job


def add(commands: Commands) -> None:
    launch = commands.group(
        "launch",
        "write what torchrun, SLURM, Kubernetes or Ray need to start a run on many nodes",
        "Write what a cluster needs to start a run: the same recipe on many nodes.",
    )
    torchrun = launch.add(
        "torchrun",
        _torchrun,
        "print the command for each node",
        "  dat launch torchrun my.yaml --hosts node1,node2 --devices 4 --interface eth0",
    )
    torchrun.add_argument(
        "--hosts", type=words_of, required=True, help="names or addresses; the first is met at"
    )
    _job_arguments(torchrun)
    slurm = launch.add(
        "slurm",
        _slurm,
        "write a script for sbatch, with preemption and requeue",
        "  dat launch slurm my.yaml --nodes 6 --devices 6 --out runs/mine --file job.sh\n"
        "  dat launch slurm my.yaml --nodes 6 --devices 6 --time 12:00:00 protocol.name=hybrid "
        "quantizer.bits=8",
    )
    _nodes_argument(slurm)
    _job_arguments(slurm)
    slurm.add_argument("--time", default="24:00:00", help="at most so long at a time (24:00:00)")
    slurm.add_argument("--grace", type=positive, default=120, help="seconds to save in (120)")
    slurm.add_argument("--partition", metavar="P", help="where to queue")
    slurm.add_argument("--account", metavar="A", help="who pays")
    slurm.add_argument("--cpus", type=positive, metavar="N", help="cores a node (--devices)")
    kubernetes = launch.add(
        "kubernetes",
        _kubernetes,
        "write a manifest for kubectl: Kubeflow's TrainJob or PyTorchJob",
        "  dat launch kubernetes my.yaml --nodes 6 --devices 6 --image registry.here/dat:1 "
        "--volume runs --out /runs/mine\n"
        "  dat launch kubernetes my.yaml --nodes 6 --devices 6 --image dat:1 --kind pytorchjob",
    )
    _nodes_argument(kubernetes)
    _job_arguments(kubernetes)
    kubernetes.add_argument("--image", required=True, help="a container image with dat in it")
    kubernetes.add_argument(
        "--kind",
        choices=("trainjob", "pytorchjob"),
        default="trainjob",
        help="of Kubeflow Trainer v2, or of its training operator v1 (trainjob)",
    )
    kubernetes.add_argument(
        "--volume", metavar="CLAIM", help="a persistent volume claim, mounted at /runs"
    )

    ray = launch.add(
        "ray",
        _ray,
        "write a script that trains under Ray Train",
        "  dat launch ray my.yaml --nodes 6 --devices 6 --out /shared/runs/mine --file job.py",
    )
    _nodes_argument(ray)
    _job_arguments(ray)


def _nodes_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nodes", type=positive, required=True, metavar="P", help="nodes")


def _job_arguments(parser: argparse.ArgumentParser) -> None:
    recipe_arguments(parser)
    parser.add_argument(
        "--devices", type=positive, default=1, metavar="Q", help="workers a node, one a GPU (1)"
    )
    parser.add_argument("--out", metavar="DIR", help="the run's folder (runs/RECIPE)")
    parser.add_argument("--name", help="of the job (the run's)")
    parser.add_argument("--interface", metavar="I", help="network between the nodes, e.g. eth0")
    parser.add_argument("--port", type=positive, default=29500, help="where they meet (29500)")
    parser.add_argument(
        "--restarts", type=int, default=3, metavar="N", help="of workers that die (3)"
    )
    parser.add_argument("--cpu", action="store_true", help="ask for no GPUs")
    parser.add_argument("--file", type=Path, help="write it there (print it)")


def _job(arguments: argparse.Namespace, nodes: int) -> Job:
    """What is wrong with the recipe or its settings is told here, not in the queue."""
    from dat.clusters.job import Job, name_of
    from dat.config import parse_edits
    from dat.recipes import read

    config = read(arguments.recipe, parse_edits(arguments.settings))
    workers = nodes * arguments.devices
    config.protocol.check(config.quantizer, workers)
    out = arguments.out or f"runs/{Path(arguments.recipe).stem}"
    return Job(
        recipe=arguments.recipe,
        settings=tuple(arguments.settings),
        nodes=nodes,
        devices=arguments.devices,
        name=arguments.name or name_of(out),
        out=out,
        interface=arguments.interface,
        port=arguments.port,
        restarts=arguments.restarts,
        gpus=not arguments.cpu,
    )


def _deliver(text: str, arguments: argparse.Namespace, then: str) -> int:
    """Into the file, or onto the screen; as JSON the text itself."""
    if arguments.file:
        arguments.file.write_text(text)
    if arguments.json:
        from dat.report import print_json

        print_json({"file": str(arguments.file) if arguments.file else None, "text": text})
    else:
        print(f"{arguments.file}: {then}" if arguments.file else text.rstrip("\n"))
    return 0


def _torchrun(arguments: argparse.Namespace, words: list[str]) -> int:
    from dat.clusters import commands

    found = commands(_job(arguments, len(arguments.hosts)), arguments.hosts)
    pairs = zip(arguments.hosts, found, strict=True)
    lines = [f"# on {host}\n{shlex.join(command)}\n" for host, command in pairs]
    return _deliver("\n".join(lines), arguments, "a command for each node")


def _slurm(arguments: argparse.Namespace, words: list[str]) -> int:
    from dat.clusters import Queue, script

    names = ("time", "grace", "partition", "account", "cpus")
    queue = Queue(**{name: getattr(arguments, name) for name in names})
    text = script(_job(arguments, arguments.nodes), queue)
    return _deliver(text, arguments, f"start it with sbatch {shlex.quote(str(arguments.file))}")


def _ray(arguments: argparse.Namespace, words: list[str]) -> int:
    from dat.clusters import ray_script

    text = ray_script(_job(arguments, arguments.nodes))
    return _deliver(text, arguments, f"start it with python {shlex.quote(str(arguments.file))}")


def _kubernetes(arguments: argparse.Namespace, words: list[str]) -> int:
    from dat.clusters import manifest

    job = _job(arguments, arguments.nodes)
    text = manifest(job, arguments.image, kind=arguments.kind, volume=arguments.volume)
    then = f"start it with kubectl apply -f {shlex.quote(str(arguments.file))}"
    return _deliver(text, arguments, then)
