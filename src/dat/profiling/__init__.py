"""Where the time and the memory of a recipe's steps go."""

from dat.profiling.job import profile_steps
from dat.profiling.watchers import Stopwatch

__all__ = ["Stopwatch", "profile_steps"]
