"""The layout of a message, as the kernel reads it: which bytes encode which values.

A message holds, in this order, the step sizes of its groups, the values that are sent as float32,
and the packed codes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from dat.core.lazy import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

FLOAT = 4


class Run(NamedTuple):
    """A run of consecutive values and its place in a message; kernel.c has the same struct."""

    start: int
    length: int
    group: int
    """Values that share a step size; 0 if they are sent as float32."""
    floats: int
    """Byte offset of its step sizes or, with group 0, of its values."""
    codes: int
    """Byte offset of its codes."""
    position: int
    """Index of its first value in the whole gradient, which seeds the random rounding."""

    @property
    def groups(self) -> int:
        return -(-self.length // self.group) if self.group else 0


@dataclass(frozen=True)
class MessageLayout:
    """The layout of one message."""

    runs: tuple[Run, ...]
    steps: int
    """Number of step sizes, which come first."""
    floats: int
    """Number of values that are sent as float32, which come next."""
    codes: int
    """Bytes of packed codes."""

    @property
    def size(self) -> int:
        return FLOAT * (self.steps + self.floats) + self.codes

    @cached_property
    def in_whole(self) -> MessageLayout:
        """The same message, with offsets into the whole gradient instead of into a bucket."""
        return replace(self, runs=tuple(run._replace(start=run.position) for run in self.runs))

    @cached_property
    def table(self) -> npt.NDArray[np.int64]:
        """The runs as an array, in the layout of the C struct."""
        return np.array(self.runs, dtype=np.int64).reshape(-1, len(Run._fields))
