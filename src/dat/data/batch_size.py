"""Validation of the batch size, without torch, so that the launcher can do it early."""

from __future__ import annotations

import math

from dat.core.glossary import plural


def check_batch(batch: int, workers: int, partitions: int) -> None:
    """Raise if a global batch is too small for the workers, or for the partitions of the data."""
    largest = max(workers, partitions)
    if batch < 2 * largest and batch % math.lcm(workers, partitions):
        raise ValueError(
            f"train.batch = {batch}: too small for {plural(workers, 'worker')} and "
            f"{plural(partitions, 'partition')}; use {2 * largest} or more"
        )
