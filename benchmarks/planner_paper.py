"""Tables 1 and 4 of the paper, predicted: C and T of an epoch on 6 x 6 GPUs and links of 1 Gbit/s.

    python benchmarks/planner_paper.py

Nothing is measured. What a node computes is taken from the paper's own rows for one node (AT 6,022
s and Fast AT 1,544 s an epoch at batch 512); a node is one worker, whose GPUs have summed before.
The rest is the planner's: bytes, a link of 1 Gbit/s with Ethernet's headers, kernels. The paper
adds C to the computation; where gradients may be exchanged during the backward pass, T is shorter.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from runs import save, table

from dat.distributed import Buckets, Quantizer, WholeVector
from dat.models import build_model
from dat.tools.planning import Cluster, ComputeTimes, Costs, Gradient, NetworkLink, predict
from dat.tools.planning.datasets import KNOWN_DATASETS
from dat.tools.planning.gradient import slots_of

NODES, BATCH = 6, 512
STEPS = round(KNOWN_DATASETS["imagenet"].total / (NODES * BATCH))
ALONE = {"PGD": 6022.0, "FGSM": 1544.0}
"""Seconds of an epoch on one node: AT, Fast AT."""
PASSES = {"PGD": 4, "FGSM": 1}
HPC = "100gbit"
"""The paper does not say; this is what such clusters have."""
ROWS: tuple[tuple[str, str, str, Quantizer, str, float, float | None], ...] = (
    ("1", "PGD", "dense", Buckets(), "1gbit", 898, 1960),
    ("1, w/o LALR", "PGD", "dense", Buckets(), "1gbit", 865, 1932),
    ("1", "FGSM", "dense", Buckets(), "1gbit", 859, 1109),
    ("1, w/o LALR", "FGSM", "dense", Buckets(), "1gbit", 863, 1080),
    ("4", "PGD", "gather", WholeVector(bits=16), "1gbit", 850, None),
    ("4", "FGSM", "gather", WholeVector(bits=16), "1gbit", 849, None),
    ("4", "PGD", "gather", WholeVector(bits=8), "1gbit", 592, None),
    ("4", "FGSM", "gather", WholeVector(bits=8), "1gbit", 594, None),
    ("4", "PGD", "server", WholeVector(bits=8), "1gbit", 1091, None),
    ("4", "FGSM", "server", WholeVector(bits=8), "1gbit", 1013, None),
    ("4, HPC", "PGD", "dense", Buckets(), HPC, 15, None),
    ("4, HPC", "FGSM", "dense", Buckets(), HPC, 15, None),
)
OURS: tuple[tuple[str, str, Quantizer], ...] = (
    ("PGD", "chunked", Buckets(bits=8)),
    ("PGD", "chunked", Buckets(bits=4)),
    ("FGSM", "chunked", Buckets(bits=8)),
    ("FGSM", "chunked", Buckets(bits=4)),
)


def gradient() -> Gradient:
    """ResNet-50's, whose tensors become ready evenly from the last to the first."""
    slots = list(slots_of(build_model("resnet50", 1000, channels=3)).values())[::-1]
    return Gradient(tuple(slots), tuple((k + 1) / len(slots) for k in range(len(slots))))


def compute(method: str) -> ComputeTimes:
    """A node's step, divided by passes: 2 for each step of the attack, 1 forward, 2 backward."""
    step = ALONE[method] / (KNOWN_DATASETS["imagenet"].total / BATCH)
    unit = step / (2 * PASSES[method] + 3)
    before = 2 * PASSES[method] * unit
    return ComputeTimes(images=BATCH, before=before, forward=unit, backward=2 * unit)


def foresee(method: str, protocol: str, quantizer: Quantizer, link: str) -> dict[str, Any]:
    cluster = Cluster(
        nodes=NODES,
        link=NetworkLink.named(link),
        inside=NetworkLink.named("unshaped"),
        accelerated=True,
    )
    found = predict(
        gradient(),
        compute(method),
        protocol=protocol,
        quantizer=quantizer,
        cluster=cluster,
        costs=Costs(),
    )
    return {
        "method": method,
        "protocol": protocol,
        "bits": quantizer.bits,
        "mib": found.sent / 2**20,
        "c": STEPS * found.communication,
        "t_in_turn": STEPS * (found.alone + found.communication),
        "t": STEPS * found.step,
    }


def main() -> None:
    rows: list[dict[str, Any]] = []
    for place, method, protocol, quantizer, link, c, t in ROWS:
        rows.append(
            {"table": place, "link": link, "paper_c": c, "paper_t": t}
            | foresee(method, protocol, quantizer, link)
        )
    for method, protocol, quantizer in OURS:
        ours = foresee(method, protocol, quantizer, "1gbit")
        rows.append({"table": "ours", "link": "1gbit", "paper_c": None, "paper_t": None} | ours)
    headers = [
        *("Table", "Method", "Protocol", "Bits", "MiB/it", "C, paper (s)", "C (s)", "C, off"),
        *("T, paper (s)", "T, one after the other (s)", "T (s)"),
    ]
    lines = [
        [
            it["table"],
            f"DAT-{it['method']}",
            it["protocol"],
            str(it["bits"]),
            f"{it['mib']:.0f}",
            f"{it['paper_c']:.0f}" if it["paper_c"] else "",
            f"{it['c']:.0f}",
            f"{100 * (it['c'] / it['paper_c'] - 1):+.0f} %" if it["paper_c"] else "",
            f"{it['paper_t']:.0f}" if it["paper_t"] else "",
            f"{it['t_in_turn']:.0f}",
            f"{it['t']:.0f}",
        ]
        for it in rows
    ]
    save(Path(__file__), rows, table(headers, lines))


if __name__ == "__main__":
    main()
