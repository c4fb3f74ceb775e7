"""Six nodes with data of their own on links of 1 Gbit/s; one is killed, another time cut off.

    sudo python benchmarks/nodes.py [--epochs 6]

Each node is a network namespace with an address, a shaped link and a folder that holds its own part
of the digits and nothing of the others'; torchrun runs on it by the command that `dat launch
torchrun` prints, and a shell starts it again when it ends badly. All six share this machine's
cores, so the seconds are mostly those of importing torch twelve times at once.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from runs import save, table
from safetensors.torch import load_file

from dat.jobs.clusters import ClusterJob, commands
from dat.tools.bench import testbed
from dat.tools.bench.link import Host
from dat.tools.bench.nodes import Node

NODES, LINK, AWAY = 6, "1gbit", 20.0
IMAGES, BATCH = 1293, 96
"""Of the digits, without the test set and what is held out."""
SETTINGS = (
    *(
        "data.name=parts",
        "model.width=8",
        "attack.steps=2",
        f"train.batch={BATCH}",
        "comm.threads=1",
    ),
    *("evaluate.report=0", "evaluate.attacks=pgd-1", "train.select_steps=1", "train.save_every=5"),
    *("quantizer.bits=8", "comm.timeout=15"),
)
Harm = Callable[[list[Node]], None]


def reached(run: Path) -> int:
    names = [it.name for it in (run / "checkpoints").glob("*")]
    return max((int(name) for name in names if name.isdecimal()), default=0)


def home(folder: Path, number: int) -> Path:
    """A node's folder: its own part and the test set."""
    place = folder / f"node{number}"
    if not place.exists():
        for name in (f"part-{number + 1}-of-{NODES}", "test"):
            shutil.copytree(folder / "parts" / name, place / "parts" / name)
    return place


def run(name: str, settings: tuple[str, ...], folder: Path, harm: Harm | None) -> dict[str, Any]:
    """Train on six nodes; halfway something happens."""
    steps = int(settings[-1].partition("=")[2]) * (IMAGES // BATCH)
    out, start, lost = folder / name, time.perf_counter(), 0
    job = ClusterJob(
        settings=settings, nodes=NODES, name=name, out=str(out), interface="eth0", gpus=False
    )
    nodes: list[Node] = []
    with testbed(NODES, LINK) as hosts:
        try:
            nodes = begin(job, hosts, folder)
            while any(node.service.poll() is None for node in nodes):
                if harm and reached(out) >= steps // 2:
                    lost = reached(out)
                    harm(nodes)
                    harm = None
                time.sleep(0.05)
            codes = [node.service.returncode for node in nodes]
        finally:
            for node in nodes:
                node.close()
    result = json.loads((out / "result.json").read_text())
    found = {"seconds": time.perf_counter() - start, "codes": codes, "halfway": lost}
    print(name, found, flush=True)
    keys = ("ta", "ra", "steps", "workers", "protocol", "mb_per_step", "mb_between")
    return found | {key: result[key] for key in keys}


def begin(job: ClusterJob, hosts: list[Host], folder: Path) -> list[Node]:
    starts = commands(job, [host.address for host in hosts])
    return [
        Node(hosts[i], words, cwd=home(folder, i), log=folder / f"{job.name}-{i}.log")
        for i, words in enumerate(starts)
    ]


def kill_last(nodes: list[Node]) -> None:
    nodes[-1].kill()


def kill_first(nodes: list[Node]) -> None:
    """It keeps the store by which the agents meet."""
    nodes[0].kill()


def cut_off(nodes: list[Node]) -> None:
    nodes[-1].cut_off()
    time.sleep(AWAY)
    nodes[-1].mend()


PLAN: dict[str, tuple[tuple[str, ...], dict[str, Harm]]] = {
    "chunked": (
        ("protocol.name=chunked",),
        {"last node killed": kill_last, "last node cut off": cut_off},
    ),
    "hybrid": (
        ("protocol.name=hybrid", "protocol.inside=2"),
        {"first node killed": kill_first},
    ),
}
"""Six nodes of a worker each, which `hybrid` takes for three of two."""


def same(one: Path, other: Path) -> bool:
    first, second = (load_file(it / "last.safetensors") for it in (one, other))
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=6)
    epochs = f"train.epochs={parser.parse_args().epochs}"
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        words = ["data", "shard", "digits", "--parts", str(NODES), "--out", str(folder / "parts")]
        subprocess.run([sys.executable, "-m", "dat", *words], check=True, capture_output=True)
        for way, (protocol, harms) in PLAN.items():
            for what, harm in {"undisturbed": None, **harms}.items():
                name = f"{way}-{what}".replace(" ", "-")
                row = run(name, (*SETTINGS, *protocol, epochs), folder, harm)
                row["identical"] = same(folder / f"{way}-undisturbed", folder / name)
                found[f"{way}: {what}"] = row
    lines = [
        [
            name,
            f"{row['seconds']:.0f}",
            str(row["steps"]),
            f"{row['mb_per_step']:.3f}",
            f"{row['mb_between']:.3f}",
            f"{row['ta']:.1f} / {row['ra']:.1f}",
            "-" if "undisturbed" in name else "identical" if row["identical"] else "OTHER",
        ]
        for name, row in found.items()
    ]
    headers = ["Run", "s", "Steps", "MB/it", "Between nodes", "TA / RA (%)", "Weights"]
    save(Path(__file__), found, table(headers, lines))


if __name__ == "__main__":
    main()
