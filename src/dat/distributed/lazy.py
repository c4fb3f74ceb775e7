"""torch's collectives, imported when they are first used.

A protocol's settings and its route share a file, and settings are read without torch.
"""

from typing import TYPE_CHECKING

from dat.core.lazy import LazyModule

if TYPE_CHECKING:
    import torch.distributed as dist
else:
    dist = LazyModule("torch.distributed")

__all__ = ["dist"]
