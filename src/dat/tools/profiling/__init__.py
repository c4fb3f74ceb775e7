"""Profile the time and the memory of a recipe's training steps, stage by stage."""

from dat.tools.profiling.job import WARMUP, profile_steps
from dat.tools.profiling.meters import Stopwatch

__all__ = ["WARMUP", "Stopwatch", "profile_steps"]
