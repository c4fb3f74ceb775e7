"""Options for reading data from disk."""

from __future__ import annotations

from dataclasses import dataclass

WEIGH_BY = ("parts", "images")
"""What has equal weight when partitions on disk differ in size."""


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """How pictures are decoded, and what is kept in memory."""

    size: int | None = None
    """Side length in pixels; None: their own, if all have the same."""
    resize: int | None = None
    """Length of the shorter side before the center crop, in pixels."""
    memory: float = 2.0
    """GiB up to which images are read once and kept; larger datasets are read on demand."""
    corrupt: str = "stop"
    """What to do with pictures that cannot be decoded: `stop` or `skip`."""
    random_crops: bool = False
    """Whether training uses random crops of the pictures, which are then decoded on demand."""
    test_share: float = 0.2
    """Share held out for testing if there is no test set."""
