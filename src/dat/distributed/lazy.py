"""torch's collectives and ours, imported when they are first used.

A protocol's settings and its route share a file, and settings are read without torch.
"""

from typing import TYPE_CHECKING

from dat.core.lazy import LazyModule

if TYPE_CHECKING:
    import torch.distributed as dist

    from dat.distributed import collectives
else:
    dist = LazyModule("torch.distributed")
    collectives = LazyModule("dat.distributed.collectives")

__all__ = ["collectives", "dist"]
