"""Convolutions on CPUs with AVX2, faster than torch's; elsewhere torch's are taken.

torch reaches what the processor can do with the sums as they stand. Winograd's algorithm needs
fewer of them for kernels of 3 x 3 (winograd.c), and weight gradients, channels last, are the one
place where torch is slow (gradient.c).
"""

from dat.convolve.kernel import available, convolve, weight_gradient
from dat.convolve.layers import Convolution, faster, quicken, takes, takes_whole

__all__ = [
    "Convolution",
    "available",
    "convolve",
    "faster",
    "quicken",
    "takes",
    "takes_whole",
    "weight_gradient",
]
