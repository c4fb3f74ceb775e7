"""The runs of a study as commands for a cluster, to paste into a shell."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from dat.jobs.clusters import ClusterJob
from dat.jobs.clusters.torchrun import torchrun
from dat.tools.reproduce.keys import flat
from dat.tools.reproduce.runs import StudyRun

GPUS_PER_NODE = 6
"""At most, as in the paper."""
HOST = "node1"
WIDTH = 100
TORCHRUN = f"""\
# torchrun: start a line on every node of its run, with the first node's name for {HOST}, in this
# folder, on storage that all nodes share. The recipes are written."""
SLURM = """\
# SLURM, instead: `dat launch slurm` writes a job file, which sbatch submits."""


def layout(workers: int) -> tuple[int, int]:
    """Nodes, and devices on each: as many as a node has, if that divides the workers."""
    devices = next(d for d in range(min(workers, GPUS_PER_NODE), 0, -1) if workers % d == 0)
    return workers // devices, devices


def cluster_job(run: StudyRun) -> ClusterJob:
    """The job of a run whose recipe is written."""
    nodes, devices = layout(run.row.workers)
    return ClusterJob(
        recipe=str(run.recipe),
        nodes=nodes,
        devices=devices,
        name=f"dat-{run.key}",
        out=str(run.folder),
    )


def title(run: StudyRun) -> str:
    """A comment that names a run."""
    nodes, devices = layout(run.row.workers)
    tuned = "".join(f", {key}={value}" for key, value in flat(run.edits))
    return f"# {run.row.name}{tuned}, seed {run.seed}: {nodes} x {devices} workers"


def torchrun_lines(run: StudyRun) -> list[str]:
    """For torchrun on each node."""
    job = cluster_job(run)
    environment = ["env", *(f"{name}={value}" for name, value in job.variables.items())]
    launcher = torchrun(job, f"{HOST}:{job.port}", run_id=job.name)
    commands = [[*environment, *launcher, "-m", "dat", *words] for words in _commands(run)]
    return [title(run), *map(_wrapped, commands)]


def slurm_lines(run: StudyRun) -> list[str]:
    """For a SLURM queue, which can start `dat train` only."""
    if run.row.command != "train":
        return [f"{title(run)}: with torchrun only"]
    job, script = cluster_job(run), f"{run.folder}.sh"
    size = ["--nodes", str(job.nodes), "--devices", str(job.devices), "--name", job.name]
    words = ["dat", "launch", "slurm", job.recipe, *size, "--out", job.out, "--file", script]
    return [title(run), f"{_wrapped(words)} &&\n    sbatch {shlex.quote(script)}"]


def _commands(run: StudyRun) -> list[list[str]]:
    """What torchrun starts, one after the other."""
    recipe, folder = str(run.recipe), str(run.folder)
    if run.row.command == "selftrain":  # starts its own workers, on one machine only
        from dat.jobs.selftrain import stages

        base = [f"{key}={value}" for key, value in flat(run.row.labeller)]
        return stages(recipe, [], run.config.data.unlabelled or "", base, Path(folder))
    origin = str(run.origin.trained) if run.origin else ""
    words = run.command(recipe, folder, origin)
    place = words.index("--workers")  # the launcher knows how many
    return [words[:place] + words[place + 2 :]]


def _wrapped(words: Sequence[str]) -> str:
    """A shell command, continued on indented lines."""
    lines = [""]
    for word in map(shlex.quote, words):
        if lines[-1].strip() and len(lines[-1]) + len(word) + 3 > WIDTH:
            lines.append("   ")
        lines[-1] += f" {word}" if lines[-1] else word
    return " \\\n".join(lines)
