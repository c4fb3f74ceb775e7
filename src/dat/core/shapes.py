"""The order of an image's dimensions."""

from __future__ import annotations

from collections.abc import Sequence

COLORS = (1, 3, 4)
"""Usual numbers of channels."""


def looks_channels_last(shape: Sequence[int]) -> bool:
    """Whether a batch of this shape probably is (n, height, width, channels)."""
    if len(shape) != 4:
        return False
    _, channels, height, width = shape
    return width in COLORS and (channels == height > max(COLORS) or channels > 16)
