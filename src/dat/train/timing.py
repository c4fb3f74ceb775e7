"""How the time of a step is divided between attack and update."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from dat.comm import clock_of

PARTS = {
    "attack": "attack",
    "update/forward": "update",
    "update/backward": "update",
    "optimizer": "update",
}
"""The stages that are timed, and as what."""
_NOT_TIMED = nullcontext()


class Split:
    """Told of the stages of steps: adds up the seconds of the attacks and of the updates.

    On CUDA the device's own clock is read, and only when somebody asks: nothing waits for it.
    """

    def __init__(self, device: torch.device) -> None:
        self._clock = clock_of(device)
        self._laps: list[tuple[str, object, object]] = []

    def __call__(self, name: str) -> AbstractContextManager[object]:
        part = PARTS.get(name)
        return self._timed(part) if part else _NOT_TIMED

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        start = self._clock.mark()
        yield
        self._laps.append((part, start, self._clock.mark()))

    def read(self) -> dict[str, float]:
        """Seconds since the last reading."""
        found = {"attack": 0.0, "update": 0.0}
        for part, start, end in self._laps:
            begun, ended = self._clock.seconds(start, end)
            found[part] += ended - begun
        self._laps.clear()
        return found
