"""Q(.) of Algorithm A1, steps 7 and 10: a gradient in a few bits, right on average.

A value is sent as a whole number of steps, rounded up or down at random so that its expectation is
the value (Alistarh et al. 2017, QSGD). Values that share a step form a group; what differs between
the quantizers is how large a group is and by which norm its step is chosen. The noise that is added
grows with the group: over a whole ResNet-50 gradient the paper's 8 bits add several times the
gradient's own energy, over buckets of 512 values 4 bits add a twentieth of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dat.fields import SettingError, Settings, setting

BITS = (2, 3, 4, 5, 6, 7, 8, 16, 32)
DENSE = 32


@dataclass(frozen=True, kw_only=True)
class Quantizer(Settings):
    """What the quantizers have in common; 32 bits send the floats as they are."""

    bits: int = setting(DENSE, "bits a value, sign included; 32 is not quantized", choices=BITS)
    rounding: str = setting(
        "random", "random is right on average; nearest is not", choices=("random", "nearest")
    )
    error_feedback: bool = setting(
        False, "add what rounding left over to the next step's gradient; suits nearest"
    )
    dense_below: int = setting(0, "tensors with fewer values are sent as floats", ge=0)
    dense_vectors: bool = setting(False, "one-dimensional tensors are sent as floats")

    @property
    def dense(self) -> bool:
        return self.bits == DENSE

    @property
    def levels(self) -> int:
        """s of the paper: steps on either side of zero. With the sign they fill the bits."""
        return (1 << (self.bits - 1)) - 1

    @property
    def scale(self) -> str:
        """By which norm of a group its step is chosen."""
        return "l2"

    @property
    def whole(self) -> bool:
        """A group spans all tensors, so that the gradient has to be complete before it is sent."""
        return False

    @property
    def grain(self) -> int:
        """Where the values of a tensor may be cut: at multiples of this."""
        return 8

    def keeps(self, shape: tuple[int, ...]) -> bool:
        """A tensor of this shape is sent as floats."""
        few = math.prod(shape) < self.dense_below
        return self.dense or few or (self.dense_vectors and len(shape) <= 1)

    def group(self, length: int) -> int:
        """How many of `length` neighbouring values share a step."""
        return max(length, 1)


@dataclass(frozen=True, kw_only=True)
class Buckets(Quantizer):
    """Ours: a step for every few hundred values, so that its noise follows the gradient's size."""

    size: int = setting(512, "values that share a step; a multiple of 8", ge=8)
    norm: str = setting("max", "norm of a bucket that sets its step", choices=("max", "l2"))
    dense_vectors: bool = setting(True, "one-dimensional tensors are sent as floats")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.size % 8:
            raise SettingError(f"size = {self.size}: must be a multiple of 8")

    @property
    def scale(self) -> str:
        return self.norm

    @property
    def grain(self) -> int:
        return self.size

    def group(self, length: int) -> int:
        return self.size


@dataclass(frozen=True, kw_only=True)
class PerTensor(Quantizer):
    """The paper's code: a step for every tensor, from its L2 norm."""


@dataclass(frozen=True, kw_only=True)
class WholeVector(Quantizer):
    """The paper's text: one step for the whole gradient, from its L2 norm: 32 + bits * d bits."""

    @property
    def whole(self) -> bool:
        return True

    def keeps(self, shape: tuple[int, ...]) -> bool:
        return self.dense

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dense_below or self.dense_vectors:
            raise SettingError(
                "dense_below and dense_vectors: the vector quantizer sends the whole gradient; "
                "use bucket or tensor"
            )


QUANTIZERS: dict[str, type[Quantizer]] = {
    "bucket": Buckets,
    "tensor": PerTensor,
    "vector": WholeVector,
}


def quantizer_name(quantizer: Quantizer) -> str:
    return next(name for name, kind in QUANTIZERS.items() if type(quantizer) is kind)
