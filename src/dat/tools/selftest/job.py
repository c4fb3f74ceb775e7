"""The self-test job: joins the workers, runs the checks, and reports."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from dat.core import devices
from dat.core.rng import derive
from dat.distributed import WorkerError, World
from dat.tools.selftest.machine import describe
from dat.tools.selftest.registry import Check
from dat.tools.selftest.report import Report
from dat.tools.selftest.result import Context
from dat.tools.selftest.runner import GRACE, POLL_INTERVAL, CheckRunner

REPORTED = "selftest/reported"
"""Set in the store when rank 0 has reported."""


def selftest(
    checks: Sequence[Check], *, device: str, timeout: float, file: str | None, seed: int = 0
) -> bool:
    """Run checks on every worker; the first one writes the report. Returns whether none failed."""
    world = World.join(device=device, timeout=_group_timeout(device, timeout))
    context, names = Context(world, seed), [check.name for check in checks]
    if context.same_on_all_workers(derive(seed, " ".join(names))):
        raise WorkerError("--only: must be the same on all nodes")
    report = Report(describe(world), names, seed, file if world.first else None)
    runner = CheckRunner(
        context=context,
        timeout=2 * timeout,
        on_outcome=report.add,
        on_hang=partial(_show, report, world),
    )
    report.write()  # names the first check, should the process die in it
    runner.run(checks)
    _show(report, world)
    _leave(world)
    return not report.failures


def _group_timeout(device: str, timeout: float) -> float:
    """The timeout of collectives. gloo raises an error that is reported, NCCL ends the process: on
    accelerators the self-test's own limit has to come first."""
    on_cpu = device == "cpu" or devices.accelerator() is None
    return timeout if on_cpu else 10 * timeout


def _show(report: Report, world: World) -> None:
    if world.first:
        report.show()


def _leave(world: World) -> None:
    """Wait until rank 0 has reported: a launcher ends all workers when one exits with an error. The
    process group may be broken, so they wait through the store."""
    assert world.store is not None
    deadline = time.monotonic() + GRACE
    with suppress(RuntimeError):  # the store has gone with its host, which has reported
        if world.first:
            world.store.set(REPORTED, "")
        while not world.store.check([REPORTED]) and time.monotonic() < deadline:
            time.sleep(POLL_INTERVAL)
    world.close()
