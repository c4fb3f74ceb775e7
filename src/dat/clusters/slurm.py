"""SLURM: a script for `sbatch`, with preemption and requeue."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from importlib import resources

from dat.clusters.job import Job
from dat.fields import Settings, setting

TIME = re.compile(r"(\d+-)?\d+(:\d\d){0,2}")
WORD = re.compile(r"[A-Za-z0-9][\w.,-]*")


@dataclass(frozen=True, kw_only=True)
class Queue(Settings):
    """What SLURM must know beyond the job."""

    time: str = setting("24:00:00", "at most so long at a time: [days-]hours:minutes:seconds")
    grace: int = setting(120, "seconds before that at which a checkpoint is written", ge=30)
    partition: str | None = setting(None, "where to queue")
    account: str | None = setting(None, "who pays")
    cpus: int | None = setting(None, "cores a node", ge=1)

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


def script(job: Job, queue: Queue) -> str:
    """The script. What a user named is quoted for the shell, or was checked to need no quotes."""
    exported = [f"export {name}={shlex.quote(value)}" for name, value in job.variables.items()]
    start = ["torchrun", "--nnodes", job.nodes, "--nproc-per-node", job.devices]
    start += ["--max-restarts", job.restarts]
    words = {
        "DIRECTIVES": "\n".join(f"#SBATCH {it}" for it in _directives(job, queue)),
        "OUT": shlex.quote(job.out),
        "TRAIN": shlex.join(job.train),
        "VARIABLES": "\n".join(exported),
        "TORCHRUN": " ".join(map(str, start)),
        "PORT": str(job.port),
    }
    text = resources.files(__package__).joinpath("slurm.sh").read_text()
    # in one go, so that nothing is looked for in what was put in
    return re.sub(r"@([A-Z]+)@", lambda place: words[place[1]], text)


def _directives(job: Job, queue: Queue) -> list[str]:
    found = [
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
        found.append(f"--gpus-per-node={job.devices}")
    for name in ("partition", "account"):
        if value := getattr(queue, name):
            found.append(f"--{name}={value}")
    return found
