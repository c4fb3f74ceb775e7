"""Errors that end training; all workers raise the same one."""

from __future__ import annotations

ADVICE = (
    "the weights of the last complete epoch are kept. Lower optimizer.lr, or add schedule.warmup"
)


class NotFinite(ArithmeticError):
    """A loss, a gradient or a weight is NaN or infinite."""

    everywhere = True


class NoGradient(ValueError):
    """A trainable parameter does not contribute to the loss."""

    everywhere = True


class Preempted(Exception):
    """The run received a request to stop and has saved a checkpoint."""

    everywhere = True
    resumable = True
