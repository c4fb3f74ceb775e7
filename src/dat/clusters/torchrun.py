"""torchrun by hand: one command for each node."""

from __future__ import annotations

from collections.abc import Sequence

from dat.clusters.job import HOST, Job


def torchrun(job: Job, endpoint: str, *, run_id: str) -> list[str]:
    """The launcher and its options; the first host of the job keeps the store."""
    return [
        *("torchrun", "--nnodes", str(job.nodes), "--nproc-per-node", str(job.devices)),
        *("--max-restarts", str(job.restarts), "--rdzv-backend", "c10d"),
        *("--rdzv-endpoint", endpoint, "--rdzv-id", run_id),
    ]


def commands(job: Job, hosts: Sequence[str]) -> list[list[str]]:
    """What to run on every one of the hosts, in this order; the ranks follow their names.

    torch sorts the nodes by name: with `--local-addr` it is the name that was given here.
    """
    for host in hosts:
        if not HOST.fullmatch(host):
            raise ValueError(f"--hosts {host!r}: is no name or address of a host")
    if len(set(hosts)) != job.nodes:
        raise ValueError(f"--hosts: {len(set(hosts))} different ones for --nodes {job.nodes}")
    start = torchrun(job, f"{hosts[0]}:{job.port}", run_id=job.name)
    found = []
    for number, host in enumerate(hosts):
        keeper = ["--rdzv-conf", f"is_host={int(number == 0)}"]
        env = ["env", *(f"{name}={value}" for name, value in job.variables.items())]
        found.append([*env, *start, *keeper, "--local-addr", host, "-m", "dat", *job.train])
    return found
