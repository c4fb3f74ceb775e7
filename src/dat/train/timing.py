"""The time of a step, split into attack and update."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from dat.distributed import clock_of

PHASES = {
    "attack": "attack",
    "update/forward": "update",
    "update/backward": "update",
    "optimizer": "update",
}
"""The stages that are timed, and the phase each belongs to."""
_NOT_TIMED = nullcontext()


class StepTimer:
    """Adds up the seconds of attacks and of updates; to be entered around each stage of a step.

    On a GPU it records events of the device's clock and reads them only on demand, so that nothing
    synchronizes with the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._clock = clock_of(device)
        self._laps: list[tuple[str, object, object]] = []

    def __call__(self, stage: str) -> AbstractContextManager[object]:
        phase = PHASES.get(stage)
        return self._timed(phase) if phase else _NOT_TIMED

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        start = self._clock.mark()
        yield
        self._laps.append((phase, start, self._clock.mark()))

    def read(self) -> dict[str, float]:
        """Seconds by phase since the last call."""
        seconds = {"attack": 0.0, "update": 0.0}
        for phase, start, end in self._laps:
            begun, ended = self._clock.seconds(start, end)
            seconds[phase] += ended - begun
        self._laps.clear()
        return seconds
