"""`dat launch`: commands and job files that start a run on a cluster."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dat.cli.arguments import (
    Commands,
    positive_int,
    recipe_arguments,
    str_list,
    trust_argument,
)

if TYPE_CHECKING:
    from dat.jobs.clusters import ClusterJob


def add(commands: Commands) -> None:
    launch = commands.group(
        "launch",
        "write launch commands or job files for torchrun, SLURM, Kubernetes or Ray",
        "Write what torchrun, SLURM, Kubernetes or Ray needs to start a run on many nodes.",
    )
    torchrun = launch.add(
        "torchrun",
        _torchrun,
        "print the torchrun command for each node",
        "  dat launch torchrun my.yaml --hosts node1,node2 --devices 4 --interface eth0",
    )
    torchrun.add_argument(
        "--hosts",
        metavar="HOST[,HOST]",
        type=str_list,
        required=True,
        help="host names or addresses, comma-separated; the first is the rendezvous host",
    )
    _job_arguments(torchrun)
    _setup_argument(torchrun)
    slurm = launch.add(
        "slurm",
        _slurm,
        "write an sbatch script that handles preemption and requeueing",
        "  dat launch slurm my.yaml --nodes 6 --devices 6 --out runs/mine --file job.sh\n"
        "  dat launch slurm my.yaml --nodes 6 --devices 6 --time 12:00:00 protocol.name=hybrid "
        "quantizer.bits=8\n"
        "  dat launch slurm my.yaml --nodes 6 --setup 'module load cuda; source venv/bin/activate'",
    )
    _slurm_arguments(slurm)
    kubernetes = launch.add(
        "kubernetes",
        _kubernetes,
        "write a Kubernetes manifest: Kubeflow's TrainJob or PyTorchJob",
        "  dat launch kubernetes my.yaml --nodes 6 --devices 6 --image registry.here/dat:1 "
        "--volume-claim runs --out /runs/mine\n"
        "  dat launch kubernetes my.yaml --nodes 6 --devices 6 --image dat:1 --kind pytorchjob",
    )
    _kubernetes_arguments(kubernetes)
    ray = launch.add(
        "ray",
        _ray,
        "write a script that trains with Ray Train",
        "  dat launch ray my.yaml --nodes 6 --devices 6 --out /shared/runs/mine --file job.py",
    )
    _nodes_argument(ray)
    _job_arguments(ray)


def _slurm_arguments(slurm: argparse.ArgumentParser) -> None:
    _nodes_argument(slurm)
    _job_arguments(slurm)
    _setup_argument(slurm)
    slurm.add_argument("--time", default="24:00:00", help="time limit (default: 24:00:00)")
    slurm.add_argument(
        "--grace",
        metavar="S",
        type=positive_int,
        default=120,
        help="seconds before the time limit to save a checkpoint (default: 120)",
    )
    slurm.add_argument("--partition", metavar="P", help="the partition to submit to")
    slurm.add_argument("--account", metavar="A", help="the account to charge")
    slurm.add_argument(
        "--cpus", type=positive_int, metavar="N", help="CPU cores per node (default: --devices)"
    )


def _kubernetes_arguments(kubernetes: argparse.ArgumentParser) -> None:
    _nodes_argument(kubernetes)
    _job_arguments(kubernetes)
    kubernetes.add_argument("--image", required=True, help="a container image with dat installed")
    kubernetes.add_argument(
        "--kind",
        choices=("trainjob", "pytorchjob"),
        default="trainjob",
        help="for Kubeflow Trainer v2 or the training operator v1 (default: trainjob)",
    )
    kubernetes.add_argument(
        "--volume-claim",
        "--volume",
        dest="volume",
        metavar="NAME",
        help="a persistent volume claim to mount at /runs; checkpoints in --out /runs/... outlive "
        "their pod (default: none)",
    )
    _setup_argument(kubernetes)


def _nodes_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--nodes", type=positive_int, required=True, metavar="P", help="number of nodes"
    )


def _setup_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--setup",
        default="",
        metavar="COMMANDS",
        help="shell commands to run before the training command, or a file with them (default: "
        "none)",
    )


def _job_arguments(parser: argparse.ArgumentParser) -> None:
    recipe_arguments(parser)
    trust_argument(parser)
    parser.add_argument(
        "--devices",
        type=positive_int,
        default=1,
        metavar="Q",
        help="workers per node, one per GPU (default: 1)",
    )
    parser.add_argument("--out", metavar="DIR", help="run folder (default: runs/RECIPE)")
    parser.add_argument("--name", help="job name (default: that of the run folder)")
    parser.add_argument(
        "--interface", metavar="I", help="network interface between the nodes, e.g. eth0"
    )
    parser.add_argument(
        "--port", type=positive_int, default=29500, help="rendezvous port (default: 29500)"
    )
    parser.add_argument(
        "--restarts",
        type=int,
        default=3,
        metavar="N",
        help="restart the workers up to N times if one dies (default: 3)",
    )
    parser.add_argument(
        "--cpu",
        action="store_true",
        help="request no GPUs (default: one per worker, unless comm.device = cpu)",
    )
    parser.add_argument("--file", type=Path, help="output file (default: print)")


def _job(arguments: argparse.Namespace, nodes: int) -> ClusterJob:
    """The job. The recipe and its settings are checked now, not when the job leaves the queue."""
    from dat.config.recipes import read
    from dat.config.schema import parse_edits
    from dat.config.trust import code_arguments
    from dat.jobs.clusters import MOUNT
    from dat.jobs.clusters.job import ClusterJob, name_of

    config = read(arguments.recipe, parse_edits(arguments.settings), trust=arguments.trust)
    code = tuple(code_arguments(config))
    workers = nodes * arguments.devices
    config.protocol.check(config.quantizer, workers)
    stem = Path(arguments.recipe).stem
    out = arguments.out or (
        f"{MOUNT}/{stem}" if getattr(arguments, "volume", None) else f"runs/{stem}"
    )
    return ClusterJob(
        recipe=arguments.recipe,
        settings=(*arguments.settings, *(code if arguments.trust else ())),
        code=code,
        nodes=nodes,
        devices=arguments.devices,
        name=arguments.name or name_of(out),
        out=out,
        interface=arguments.interface,
        port=arguments.port,
        restarts=arguments.restarts,
        gpus=_uses_gpus(config.comm.device, arguments.cpu),
        setup=_setup(getattr(arguments, "setup", "")),
    )


def _uses_gpus(device: str, cpu: bool) -> bool:
    """Whether the workers need GPUs; with `comm.device = auto` they use those that they have."""
    if cpu and device not in ("auto", "cpu"):
        raise ValueError(f"--cpu: the recipe needs GPUs (comm.device = {device}); omit one of them")
    return not cpu and device != "cpu"


def _setup(text: str) -> str:
    """Shell commands, or those in a file."""
    return Path(text).read_text().strip() if text and Path(text).is_file() else text.strip()


def _deliver(text: str, arguments: argparse.Namespace, about: str) -> int:
    """Write the text to the file, or print it."""
    if arguments.file:
        arguments.file.write_text(text)
    if arguments.json:
        from dat.report import print_json

        print_json({"file": str(arguments.file) if arguments.file else None, "text": text})
    else:
        print(f"{arguments.file}: {about}" if arguments.file else text.rstrip("\n"))
    return 0


def _torchrun(arguments: argparse.Namespace, argv: list[str]) -> int:
    from dat.jobs.clusters import commands

    job = _job(arguments, len(arguments.hosts))
    per_host = commands(job, arguments.hosts)
    pairs = zip(arguments.hosts, per_host, strict=True)
    setup = f"{job.setup}\n" if job.setup else ""
    lines = [f"# on {host}\n{setup}{shlex.join(command)}\n" for host, command in pairs]
    return _deliver("\n".join(lines), arguments, "one command per node")


def _slurm(arguments: argparse.Namespace, argv: list[str]) -> int:
    from dat.jobs.clusters import Queue, script

    names = ("time", "grace", "partition", "account", "cpus")
    queue = Queue(**{name: getattr(arguments, name) for name in names})
    text = script(_job(arguments, arguments.nodes), queue)
    return _deliver(text, arguments, f"start it with sbatch {shlex.quote(str(arguments.file))}")


def _ray(arguments: argparse.Namespace, argv: list[str]) -> int:
    from dat.jobs.clusters import ray_script

    text = ray_script(_job(arguments, arguments.nodes))
    return _deliver(text, arguments, f"start it with python {shlex.quote(str(arguments.file))}")


def _kubernetes(arguments: argparse.Namespace, argv: list[str]) -> int:
    from dat.jobs.clusters import MOUNT, keeps_checkpoints, manifest

    job = _job(arguments, arguments.nodes)
    text = manifest(job, arguments.image, kind=arguments.kind, volume=arguments.volume)
    if not keeps_checkpoints(job.out, arguments.volume):
        print(
            f"warning: checkpoints are lost with their pod, as {job.out} is not on a persistent "
            f"volume; use --volume-claim NAME --out {MOUNT}/{job.name}",
            file=sys.stderr,
        )
    about = f"start it with kubectl apply -f {shlex.quote(str(arguments.file))}"
    return _deliver(text, arguments, about)
