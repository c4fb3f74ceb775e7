"""Convolutions on CPUs with AVX2, faster than torch's; elsewhere torch's are taken.

torch reaches what the processor can do with the sums as they stand. Winograd's algorithm needs
fewer of them for kernels of 3 x 3 (winograd.c). Weight gradients, channels last (gradient.c), and
gradients by an input of few channels (few.c) are where torch is slow.
"""

from dat.convolve.kernel import available, convolve, input_gradient, weight_gradient
from dat.convolve.layers import Convolution, Ways, faster, quicken, ways

__all__ = [
    "Convolution",
    "Ways",
    "available",
    "convolve",
    "faster",
    "input_gradient",
    "quicken",
    "ways",
    "weight_gradient",
]
