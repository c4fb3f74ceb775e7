"""Several hosts with addresses and data of their own; one is lost, and the run finishes by itself.

benchmarks/nodes.py does it with six, on links of 1 Gbit/s.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dat.bench import link
from dat.bench.link import Host
from dat.bench.nodes import Node
from dat.clusters import Job, commands
from tests.distributed.conftest import DAT, run
from tests.faults.test_death import SETTINGS, reached, same_bits

NODES = 3


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    """Network namespaces; only root can make them."""
    try:
        with link.testbed(NODES, "1gbit") as made:
            yield made
    except (ValueError, OSError) as error:
        pytest.skip(f"no network namespaces here: {error}")


def keep_one_part(parts: Path, number: int, home: Path) -> None:
    """A node's own folder, with its part and the test set."""
    own = f"part-{number + 1}-of-{NODES}"
    for name in (own, "test"):
        shutil.copytree(parts / name, home / "parts" / name)


@pytest.mark.alone
def test_a_killed_node_comes_back_and_nothing_differs(hosts: list[Host], tmp_path: Path) -> None:
    """Every node sees its own part alone. The last one loses its agent and its worker."""
    done = run([*DAT, "data", "shard", "digits", "--parts", str(NODES), "--out", "parts"], tmp_path)
    assert done.returncode == 0, done.stderr
    settings = (*SETTINGS, "data.name=parts", "quantizer.bits=8")
    words = ["train", "digits", *settings, "--workers", str(NODES), "--out", "alone", "--quiet"]
    done = run([*DAT, *words], tmp_path)
    assert done.returncode == 0, done.stderr

    out = tmp_path / "run"
    job = Job(
        settings=settings, nodes=NODES, name="lost", out=str(out), interface="eth0", gpus=False
    )
    nodes = []
    try:
        for number, command in enumerate(commands(job, [host.address for host in hosts])):
            home = tmp_path / f"node{number}"
            keep_one_part(tmp_path / "parts", number, home)
            log = tmp_path / f"node{number}.log"
            nodes.append(Node(hosts[number], command, cwd=home, log=log))

        def told() -> str:
            return "\n".join(node.log.read_text() for node in nodes)

        end = time.monotonic() + 600
        while reached(out) < 9:
            assert time.monotonic() < end and nodes[0].service.poll() is None, told()
            time.sleep(0.05)
        assert nodes[-1].kill() == 2
        for node in nodes:
            assert node.service.wait(timeout=600) == 0, told()
    finally:
        for node in nodes:
            node.close()
    environment = json.loads((out / "environment.json").read_text())
    assert environment["workers"] == NODES
    assert "Connection closed by peer" in told() or "lost" in told()
    assert same_bits(tmp_path / "alone", out)
    result = json.loads((out / "result.json").read_text())
    assert result["mb_between"] == pytest.approx(result["mb_per_step"])  # each has its own node
