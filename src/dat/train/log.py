"""A log file for every worker, RUN/logs/worker-2.log: where it was, and what it said last."""

from __future__ import annotations

import faulthandler
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from dat.comm import World
from dat.files import log_file
from dat.train.records import EpochRecord, Listener
from dat.train.sentinel import Collapse
from dat.train.step import StepReport

if TYPE_CHECKING:
    from dat.train.trainer import Trainer

HEARTBEAT = 10.0
"""Seconds between lines while nothing happens but steps."""
log = logging.getLogger("dat")


@contextmanager
def worker_log(run: Path, world: World) -> Iterator[None]:
    """What is logged meanwhile goes to this worker's file: with the error, if one ends it, and the
    stack, if a signal of the machine's does (a segmentation fault, a bus error) and nobody else
    has asked for it."""
    path = log_file(run, world.rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    level = log.level
    own = not faulthandler.is_enabled()  # where it writes now cannot be asked, so not put back
    with path.open("a", buffering=1) as file:
        handler = logging.StreamHandler(file)
        handler.setFormatter(logging.Formatter("{asctime} {message}", style="{"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        if own:
            faulthandler.enable(file)
        place = f"process {os.getpid()} on {socket.gethostname()}, {world.device}"
        log.info("worker %d of %d: %s", world.rank, world.size, place)
        try:
            yield
            log.info("ended")
        except BaseException as error:
            log.info("ended by %s", type(error).__name__, exc_info=True)
            raise
        finally:
            if own:
                faulthandler.disable()
            log.removeHandler(handler)
            log.setLevel(level)


class WorkerLog(Listener):
    """A run's events, for the log."""

    def __init__(self) -> None:
        self._last = 0.0

    def started(self, trainer: Trainer) -> None:
        log.info("begins after %d updates", trainer.updates)

    def step_ended(self, trainer: Trainer, epoch: int, report: StepReport) -> None:
        now = time.monotonic()
        if now - self._last >= HEARTBEAT:
            self._last = now
            step = trainer.tally.step
            log.info("epoch %d, step %d: loss %.4f", epoch + 1, step, report.loss)

    def epoch_ended(self, trainer: Trainer, record: EpochRecord) -> None:
        log.info("epoch %d ended: loss %.4f, %.1f s", record.epoch, record.loss, record.seconds)

    def collapsed(self, trainer: Trainer, collapse: Collapse) -> None:
        log.info("%s", collapse)

    def left_out_step(self, trainer: Trainer, reason: str, count: int) -> None:
        log.info("left out: %s", reason)
