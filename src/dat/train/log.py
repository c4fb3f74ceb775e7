"""A log file for every worker, e.g. RUN/logs/worker-2.log: its progress, and its last error."""

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

from dat.core.files import log_file
from dat.distributed import World
from dat.train.callbacks import Callback
from dat.train.overfitting_monitor import Collapse
from dat.train.records import EpochRecord
from dat.train.step import StepReport

if TYPE_CHECKING:
    from dat.train.trainer import Trainer

HEARTBEAT = 10.0
"""Seconds between the log lines of steps."""
log = logging.getLogger("dat")


@contextmanager
def worker_log(run: Path, world: World) -> Iterator[None]:
    """Write the log to this worker's file: with the traceback, if an exception ends it, and with
    the stack, if a fatal signal does (a segmentation fault, a bus error) and faulthandler is not
    in use already."""
    path = log_file(run, world.rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    level = log.level
    own = not faulthandler.is_enabled()  # its current file is unknown, so it cannot be restored
    with path.open("a", buffering=1) as file:
        handler = logging.StreamHandler(file)
        handler.setFormatter(logging.Formatter("{asctime} {message}", style="{"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        if own:
            faulthandler.enable(file)
        location = f"process {os.getpid()} on {socket.gethostname()}, {world.device}"
        log.info("worker %d of %d: %s", world.rank, world.size, location)
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


class WorkerLog(Callback):
    """Logs a run's events."""

    def __init__(self) -> None:
        self._last = 0.0

    def on_fit_start(self, trainer: Trainer) -> None:
        log.info("training starts after %d updates", trainer.updates)

    def on_step_end(self, trainer: Trainer, epoch: int, report: StepReport) -> None:
        now = time.monotonic()
        if now - self._last >= HEARTBEAT:
            self._last = now
            step = trainer.tally.step
            log.info("epoch %d, step %d: loss %.4f", epoch + 1, step, report.loss)

    def on_epoch_end(self, trainer: Trainer, record: EpochRecord) -> None:
        log.info("epoch %d ended: loss %.4f, %.1f s", record.epoch, record.loss, record.seconds)

    def on_collapse(self, trainer: Trainer, collapse: Collapse) -> None:
        log.info("%s", collapse)

    def on_step_skipped(self, trainer: Trainer, reason: str, count: int) -> None:
        log.info("skipped: %s", reason)
