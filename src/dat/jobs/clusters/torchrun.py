"""torchrun: one command per node, to run by hand."""

from __future__ import annotations

from collections.abc import Sequence

from dat.jobs.clusters.job import HOST, ClusterJob


def torchrun(job: ClusterJob, endpoint: str, *, run_id: str) -> list[str]:
    """The launcher and its options; the endpoint's host runs the rendezvous store."""
    return [
        *("torchrun", "--nnodes", str(job.nodes), "--nproc-per-node", str(job.devices)),
        *("--max-restarts", str(job.restarts), "--rdzv-backend", "c10d"),
        *("--rdzv-endpoint", endpoint, "--rdzv-id", run_id),
    ]


def commands(job: ClusterJob, hosts: Sequence[str]) -> list[list[str]]:
    """The command for each host, in this order; ranks follow the order of host names.

    torch sorts nodes by name: `--local-addr` makes it use the names given here.
    """
    for host in hosts:
        if not HOST.fullmatch(host):
            raise ValueError(f"--hosts {host!r}: not a valid host name or address")
    if len(set(hosts)) != job.nodes:
        raise ValueError(f"--hosts: {len(set(hosts))} different hosts for --nodes {job.nodes}")
    launcher = torchrun(job, f"{hosts[0]}:{job.port}", run_id=job.name)
    per_host = []
    for number, host in enumerate(hosts):
        store = ["--rdzv-conf", f"is_host={int(number == 0)}"]
        env = ["env", *(f"{name}={value}" for name, value in job.variables.items())]
        per_host.append([*env, *launcher, *store, "--local-addr", host, "-m", "dat", *job.train])
    return per_host
