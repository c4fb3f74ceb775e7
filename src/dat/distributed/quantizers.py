"""Q(.) of Algorithm A1, steps 7 and 10: unbiased quantization of a gradient to a few bits.

A value is sent as an integer multiple of a step size, rounded up or down at random so that its
expectation is the value (Alistarh et al. 2017, QSGD). Values that share a step size form a group.
The quantizers differ in the size of a group and in the norm that sets its step size. The noise
grows with the group: over a whole ResNet-50 gradient the paper's 8 bits add several times the
gradient's own energy; over buckets of 512 values 4 bits add a twentieth of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dat.core.settings import SettingError, Settings, setting

BITS = (2, 3, 4, 5, 6, 7, 8, 16, 32)
DENSE = 32


@dataclass(frozen=True, kw_only=True)
class Quantizer(Settings):
    """The settings that all quantizers share; 32 bits send float32 without quantization."""

    bits: int = setting(DENSE, "bits per value, including the sign; 32 sends float32", choices=BITS)
    rounding: str = setting(
        "random", "random is unbiased; nearest is not", choices=("random", "nearest")
    )
    error_feedback: bool = setting(
        False, "add the quantization error to the next step's gradient; suits nearest"
    )
    dense_below: int = setting(0, "send tensors with fewer values as float32", ge=0)
    dense_vectors: bool = setting(False, "send one-dimensional tensors as float32")

    def sharding_conflict(self) -> str:
        """Why this quantizer does not support a sharded model, and what to set instead."""
        if self.dense:
            return ""
        return "the shards of a layer cannot share a step size; use quantizer.name bucket"

    @property
    def dense(self) -> bool:
        return self.bits == DENSE

    @property
    def levels(self) -> int:
        """s of the paper: levels on either side of zero. With the sign they fill the bits."""
        return (1 << (self.bits - 1)) - 1

    @property
    def scale(self) -> str:
        """The norm of a group that sets its step size."""
        return "l2"

    @property
    def whole(self) -> bool:
        """Whether a group spans all tensors, so that the gradient is sent in one piece."""
        return False

    @property
    def grain(self) -> int:
        """A tensor may be divided between messages at multiples of this many values."""
        return 8

    def keeps(self, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of this shape is sent as float32."""
        small = math.prod(shape) < self.dense_below
        return self.dense or small or (self.dense_vectors and len(shape) <= 1)

    def group(self, length: int) -> int:
        """How many of `length` consecutive values share a step size."""
        return max(length, 1)


@dataclass(frozen=True, kw_only=True)
class Buckets(Quantizer):
    """Ours: one step size for every few hundred values, so that the noise follows the magnitude of
    the gradient."""

    size: int = setting(512, "values per bucket, which share a step size; a multiple of 8", ge=8)
    norm: str = setting("max", "norm of a bucket that sets its step size", choices=("max", "l2"))
    dense_vectors: bool = setting(True, "send one-dimensional tensors as float32")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.size % 8:
            raise SettingError(f"size = {self.size}: must be a multiple of 8")

    def sharding_conflict(self) -> str:
        if self.dense or not self.error_feedback:
            return ""
        return "error feedback is not supported; use quantizer.error_feedback false"

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
    """The paper's code: one step size for each tensor, from its L2 norm."""


@dataclass(frozen=True, kw_only=True)
class WholeVector(Quantizer):
    """The paper's text: one step size for the whole gradient, from its L2 norm: 32 + bits * d
    bits."""

    @property
    def whole(self) -> bool:
        return True

    def keeps(self, shape: tuple[int, ...]) -> bool:
        return self.dense

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dense_below or self.dense_vectors:
            raise SettingError(
                "dense_below and dense_vectors: not supported by quantizer vector, which "
                "quantizes the whole gradient; use bucket or tensor"
            )


QUANTIZERS: dict[str, type[Quantizer]] = {
    "bucket": Buckets,
    "tensor": PerTensor,
    "vector": WholeVector,
}


def quantizer_name(quantizer: Quantizer) -> str:
    return next(name for name, kind in QUANTIZERS.items() if type(quantizer) is kind)
