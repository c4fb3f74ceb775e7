"""SLURM: a script for `sbatch`, with preemption and requeue."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from importlib import resources

from dat.core.settings import Settings, setting
from dat.jobs.clusters.job import ClusterJob

TIME = re.compile(r"(\d+-)?\d+(:\d\d){0,2}")
WORD = re.compile(r"[A-Za-z0-9][\w.,-]*")


@dataclass(frozen=True, kw_only=True)
class Queue(Settings):
    """The settings of SLURM, besides the job's."""

    time: str = setting("24:00:00", "time limit: [days-]hours:minutes:seconds")
    grace: int = setting(120, "seconds before the time limit to save a checkpoint", ge=30)
    partition: str | None = setting(None, "the partition to queue in")
    account: str | None = setting(None, "the account to charge")
    cpus: int | None = setting(None, "cores per node", ge=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not TIME.fullmatch(self.time):
            raise ValueError(
                f"--time {self.time!r}: must be like 90, 24:00:00 or 2-12:00:00 (minutes, hours, "
                "days)"
            )
        for name in ("partition", "account"):
            value = getattr(self, name)
            if value is not None and not WORD.fullmatch(value):
                raise ValueError(f"--{name} {value!r}: must be letters, digits, . , _ and -")


def script(job: ClusterJob, queue: Queue) -> str:
    """The script. User input is quoted for the shell, or checked to need no quotes."""
    exports = [f"export {name}={shlex.quote(value)}" for name, value in job.variables.items()]
    torchrun = ["torchrun", "--nnodes", job.nodes, "--nproc-per-node", job.devices]
    torchrun += ["--max-restarts", job.restarts]
    values = {
        "DIRECTIVES": "\n".join(f"#SBATCH {directive}" for directive in _directives(job, queue)),
        "SETUP": f"\n{job.setup.rstrip()}\n" if job.setup else "",
        "OUT": shlex.quote(job.out),
        "TRAIN": shlex.join(job.train),
        "CODE": "".join(f" {shlex.quote(word)}" for word in job.code),
        "VARIABLES": "\n".join(exports),
        "TORCHRUN": " ".join(map(str, torchrun)),
        "PORT": str(job.port),
    }
    text = resources.files(__package__).joinpath("slurm.sh").read_text()
    # in one pass, so that inserted values are not searched for placeholders
    return re.sub(r"@([A-Z]+)@", lambda placeholder: values[placeholder[1]], text)


def _directives(job: ClusterJob, queue: Queue) -> list[str]:
    directives = [
        f"--job-name={job.name}",
        f"--nodes={job.nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={queue.cpus or job.devices}",
        f"--time={queue.time}",
        "--requeue",
        "--open-mode=append",
        f"--signal=B:TERM@{queue.grace}",
        "--output=%x-%j.log",
    ]
    if job.gpus:
        directives.append(f"--gpus-per-node={job.devices}")
    for name in ("partition", "account"):
        if value := getattr(queue, name):
            directives.append(f"--{name}={value}")
    return directives
