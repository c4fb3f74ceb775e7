"""Several hosts with their own addresses and data: one is killed, and the run still completes.

benchmarks/nodes.py does the same with six hosts, on links of 1 Gbit/s.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dat.jobs.clusters import ClusterJob, commands
from dat.tools.bench import link
from dat.tools.bench.link import Host
from dat.tools.bench.nodes import Node
from tests.faults.test_death import SETTINGS, reached, same_bits
from tests.workers.conftest import DAT, run

NODES = 3


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    """Network namespaces; only root can create them."""
    try:
        with link.testbed(NODES, "1gbit") as hosts:
            yield hosts
    except (ValueError, OSError) as error:
        pytest.skip(f"no network namespaces here: {error}")


def keep_one_part(parts: Path, number: int, home: Path) -> None:
    """Copy a node's own part and the test set to its folder."""
    own = f"part-{number + 1}-of-{NODES}"
    for name in (own, "test"):
        shutil.copytree(parts / name, home / "parts" / name)


@pytest.mark.alone
def test_a_killed_node_comes_back_and_nothing_differs(hosts: list[Host], tmp_path: Path) -> None:
    """Every node has only its own part. The agent and the worker of the last node are killed."""
    done = run([*DAT, "data", "shard", "digits", "--parts", str(NODES), "--out", "parts"], tmp_path)
    assert done.returncode == 0, done.stderr
    settings = (*SETTINGS, "data.name=parts", "quantizer.bits=8")
    options = ["--workers", str(NODES), "--out", "alone", "--quiet"]
    done = run([*DAT, "train", "digits", *settings, *options], tmp_path)
    assert done.returncode == 0, done.stderr

    out = tmp_path / "run"
    job = ClusterJob(
        settings=settings, nodes=NODES, name="lost", out=str(out), interface="eth0", gpus=False
    )
    nodes = []
    try:
        for number, command in enumerate(commands(job, [host.address for host in hosts])):
            home = tmp_path / f"node{number}"
            keep_one_part(tmp_path / "parts", number, home)
            log = tmp_path / f"node{number}.log"
            nodes.append(Node(hosts[number], command, cwd=home, log=log))

        def logs() -> str:
            return "\n".join(node.log.read_text() for node in nodes)

        end = time.monotonic() + 600
        while reached(out) < 9:
            assert time.monotonic() < end and nodes[0].service.poll() is None, logs()
            time.sleep(0.05)
        assert nodes[-1].kill() == 2
        for node in nodes:
            assert node.service.wait(timeout=600) == 0, logs()
    finally:
        for node in nodes:
            node.close()
    environment = json.loads((out / "environment.json").read_text())
    assert environment["workers"] == NODES
    assert "Connection closed by peer" in logs() or "lost" in logs()
    assert same_bits(tmp_path / "alone", out)
    result = json.loads((out / "result.json").read_text())
    assert result["mb_between"] == pytest.approx(result["mb_per_step"])  # each has its own node
