"""What `dat plan --sweep` can vary."""

from __future__ import annotations

from collections.abc import Sequence

SWEEPS = ("bits", "protocol", "nodes")


def check_sweep(sweep: Sequence[str]) -> None:
    for word in sweep:
        if word not in SWEEPS:
            raise ValueError(f"--sweep {word}: must be one or more of {', '.join(SWEEPS)}")
