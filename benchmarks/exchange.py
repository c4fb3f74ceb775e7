"""Seconds for one sum of 25.6 million floats over slow and fast links, by every protocol.

    sudo python benchmarks/exchange.py [--repeats 7]

Runs `dat bench comm` on 4 and 6 hosts (network namespaces on this machine) with links of 1 Gbit/s
and 10 Gbit/s, and with links that nothing slows down. Kernels are included and nothing is hidden
behind a backward pass. The hosts share this machine's cores, so on fast links the kernels are
slower here than on hosts of their own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from runs import save, table

WORKERS = (4, 6)
LINKS = ("1gbit", "10gbit", "unshaped")


def measure(workers: int, repeats: int) -> list[dict[str, Any]]:
    words = ("--workers", str(workers), "--values", "25.6e6", "--link", ",".join(LINKS))
    limits = ("--protocols", "dense,gather,server,chunked,ring", "--bits", "32,8,4")
    command = [sys.executable, "-m", "dat", "bench", "comm", *words, *limits]
    done = subprocess.run(
        [*command, "--repeats", str(repeats), "--json"], capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    return [row for row in rows if row["bits"] < 32 or row["protocol"] == "dense"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args().repeats
    rows = [row for workers in WORKERS for row in measure(workers, repeats)]
    found = {(r["workers"], r["link"], r["protocol"], r["bits"]): r["seconds"] for r in rows}
    ways = list(dict.fromkeys((r["protocol"], r["bits"]) for r in rows))
    lines = []
    for protocol, bits in ways:
        cells = []
        for workers in WORKERS:
            for link in LINKS:
                seconds = found[workers, link, protocol, bits]
                cells.append(f"{seconds:.2f} ({found[workers, link, 'dense', 32] / seconds:.1f}x)")
        lines.append([f"{protocol}, {bits} bits", *cells])
    headers = ["Protocol", *(f"M = {workers}, {link}" for workers in WORKERS for link in LINKS)]
    save(Path(__file__), rows, table(headers, lines))


if __name__ == "__main__":
    main()
