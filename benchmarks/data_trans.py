"""The paper's column 'Data trans. (MB)', counted in a real exchange: ResNet-50, 6 processes.

    python benchmarks/data_trans.py

Each row is one `dat bench comm` between processes on this machine: bytes as the ledger counted them
where they were handed to the network, all workers together, in MiB as the paper's figures are.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from runs import save, table

PAPER = {
    ("vector", "gather", 32): "2924",
    ("vector", "gather", 16): "1462",
    ("vector", "gather", 8): "731",
    ("vector", "server", 8): "244",
}
"""Its Table 4."""


def measure(quantizer: str, bits: str, protocols: str) -> list[dict[str, Any]]:
    words = ("--workers", "6", "--quantizer", quantizer, "--bits", bits, "--protocols", protocols)
    command = [sys.executable, "-m", "dat", "bench", "comm", "--model", "resnet50", *words]
    done = subprocess.run([*command, "--repeats", "1", "--json"], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return [{"quantizer": quantizer} | row for row in json.loads(done.stdout)]


def main() -> None:
    rows = [
        *measure("vector", "32,16,8", "gather"),
        *measure("vector", "8", "server"),
        *measure("bucket", "32,8,4", "dense,chunked,ring"),
    ]
    lines = [
        [
            row["quantizer"] if row["bits"] < 32 else "-",
            row["protocol"],
            str(row["bits"]),
            PAPER.get((row["quantizer"], row["protocol"], row["bits"]), ""),
            f"{row['bytes'] / 2**20:.1f}",
            f"{row['bytes_busiest'] / 2**20:.1f}",
        ]
        for row in rows
    ]
    headers = ["Quantizer", "Protocol", "Bits", "Paper (MiB)", "Counted (MiB)", "Busiest (MiB)"]
    save(Path(__file__), rows, table(headers, lines))


if __name__ == "__main__":
    main()
