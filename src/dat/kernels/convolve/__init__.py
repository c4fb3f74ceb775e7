"""Convolutions for CPUs with AVX2, faster than torch's; elsewhere torch's are used.

torch's direct convolutions are close to the processor's peak. Winograd's algorithm needs fewer
multiplications for 3 x 3 kernels (winograd.c). torch is slow at weight gradients in channels-last
format (gradient.c) and at gradients with respect to an input of few channels (few.c).
"""

from typing import TYPE_CHECKING

from dat.core.lazy import lazy_names

if TYPE_CHECKING:
    from dat.kernels.convolve.kernel import (
        available,
        convolve,
        input_gradient,
        supported,
        weight_gradient,
    )
    from dat.kernels.convolve.layers import (
        NativeConv2d,
        Ways,
        faster,
        use_native_convolutions,
        ways,
    )
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        renamed={"Convolution": "NativeConv2d", "quicken": "use_native_convolutions"},
        kernel="available convolve input_gradient supported weight_gradient",
        layers="NativeConv2d Ways faster use_native_convolutions ways",
    )

__all__ = [
    "NativeConv2d",
    "Ways",
    "available",
    "convolve",
    "faster",
    "input_gradient",
    "supported",
    "use_native_convolutions",
    "ways",
    "weight_gradient",
]
