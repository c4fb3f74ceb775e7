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
        NativePasses,
        native_convolutions,
        native_passes,
        use_native_convolutions,
    )
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        renamed={
            "Convolution": "NativeConv2d",
            "Ways": "NativePasses",
            "faster": "native_convolutions",
            "quicken": "use_native_convolutions",
            "ways": "native_passes",
        },
        kernel="available convolve input_gradient supported weight_gradient",
        layers=(
            "NativeConv2d NativePasses native_convolutions native_passes use_native_convolutions"
        ),
    )

__all__ = [
    "NativeConv2d",
    "NativePasses",
    "available",
    "convolve",
    "input_gradient",
    "native_convolutions",
    "native_passes",
    "supported",
    "use_native_convolutions",
    "weight_gradient",
]
