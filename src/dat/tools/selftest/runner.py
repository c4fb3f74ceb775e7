"""Runs the checks one after the other, on all workers alike.

Workers agree on each result through the key-value store, not through collectives: a check that
fails on one worker may leave the others in a collective that nobody joins. Such a collective ends
with the process group's timeout, and the group is replaced. A thread watches over everything that
does not end: it reports the check by name and ends the process.
"""

from __future__ import annotations

import gc
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dat.core import devices
from dat.distributed import World
from dat.distributed.world import CONNECTION_ERRORS
from dat.tools.selftest.registry import Check
from dat.tools.selftest.result import FAIL, REPORT, Context, Result, failed, skipped

POLL_INTERVAL = 0.02
GRACE = 5.0
"""Seconds that rank 0 has to write its report before the other workers end."""


class CheckOutcome(NamedTuple):
    """A check that is over, with the common result of all workers."""

    check: Check
    result: Result
    seconds: float


@dataclass
class CheckRunner:
    """Runs checks; every worker has one. `on_outcome` is called after each of them."""

    context: Context
    timeout: float
    """Seconds after which a check counts as hanging."""
    on_outcome: Callable[[CheckOutcome], None]
    on_hang: Callable[[], None]
    """Called by the watching thread, before the process ends."""
    outcomes: list[CheckOutcome] = field(default_factory=list)

    @property
    def world(self) -> World:
        return self.context.world

    def run(self, checks: Sequence[Check]) -> list[CheckOutcome]:
        """Run all checks. After one that hangs, the process ends: see `on_hang`."""
        broken = ""
        for place, check in enumerate(checks):
            start, number = time.monotonic(), len(self.outcomes)
            if broken:
                self._conclude(check, skipped(broken), start)
                continue
            with self._watched(number, checks[place:], start):
                own = self._run_one(check)
                results = self._agree(number, own)
            common = Result.of_workers(results)
            self._conclude(check, common, start)
            if common.raised and self.world.size > 1:
                broken = self._replace_group(number)
        return self.outcomes

    def _run_one(self, check: Check) -> Result:
        try:
            result = check.load()(self.context)
            devices.synchronize(self.context.device)  # errors of the device surface here
        except Exception as error:
            return _raised(error)
        return result

    def _conclude(self, check: Check, result: Result, start: float) -> None:
        outcome = CheckOutcome(check, result, time.monotonic() - start)
        self.outcomes.append(outcome)
        self.on_outcome(outcome)

    def _agree(self, number: int, own: Result) -> list[Result]:
        """The results of all workers; waits for them as long as the watching thread allows."""
        store = self.world.store
        if self.world.size == 1 or store is None:
            return [own]
        store.set(_key(number, self.world.rank), json.dumps(own.dump()))
        while None in (results := self._published(number)):
            time.sleep(POLL_INTERVAL)
        return [result for result in results if result is not None]

    def _published(self, number: int) -> list[Result | None]:
        """The result of each worker that has one by now."""
        store = self.world.store
        if store is None:
            return [None]
        keys = [_key(number, rank) for rank in range(self.world.size)]
        return [
            Result(**json.loads(store.get(key))) if store.check([key]) else None for key in keys
        ]

    @contextmanager
    def _watched(self, number: int, checks: Sequence[Check], start: float) -> Iterator[None]:
        """End the process if the work inside the context, on the first of these checks, does not
        end."""
        done = threading.Event()

        def watch() -> None:
            if not done.wait(self.timeout):
                self._end_hanging(number, checks, start)

        threading.Thread(target=watch, daemon=True, name="selftest watch").start()
        try:
            yield
        finally:
            done.set()

    def _end_hanging(self, number: int, checks: Sequence[Check], start: float) -> None:
        """Report the check that hangs and end the process, whatever its main thread waits for."""
        try:
            published = self._published(number)
        except RuntimeError:  # the store is gone with its host
            published = [None] * self.world.size
        missing = [rank for rank, result in enumerate(published) if result is None]
        raised = [result.detail for result in published if result is not None and result.raised]
        cause = f"; another worker failed: {raised[0]}" if raised else ""
        plural, ranks = "s" if len(missing) > 1 else "", ", ".join(map(str, missing))
        result = failed(
            f"no answer from worker{plural} {ranks} within {self.timeout:g} s{cause}",
            f"use a longer --timeout if this machine is slow; if it hangs again, {REPORT}",
            published=[None if result is None else result.dump() for result in published],
        )
        hanging, *rest = checks
        self._conclude(hanging, result, start)
        for check in rest:
            self._conclude(check, skipped(f"{hanging.name} did not end"), time.monotonic())
        self.on_hang()
        if not self.world.first:
            time.sleep(GRACE)
        os._exit(1)

    def _replace_group(self, number: int) -> str:
        """A new process group in place of one that may be out of step; returns why there is
        none."""
        gc.collect()  # what the check left, and its connections
        try:
            self.world.replace_group(f"after check {number}")
        except Exception as error:
            return f"the rendezvous of the workers failed: {first_line(error)}"
        return ""


def _raised(error: Exception) -> Result:
    name = type(error).__name__
    advice = f"DAT_TRACEBACK=1 shows where; {REPORT}"
    if os.environ.get("DAT_TRACEBACK"):
        import traceback

        traceback.print_exception(error)
    detail = f"{name}: {first_line(error)}"
    secondary = any(re.search(pattern, detail) for pattern in CONNECTION_ERRORS)
    return Result(verdict=FAIL, detail=detail, advice=advice, raised=True, secondary=secondary)


def first_line(error: Exception) -> str:
    """The first line of its message, without the place in gloo's source."""
    lines = re.sub(r"^\[[^\]]*\] ", "", str(error).strip()).splitlines()
    return lines[0].strip() if lines else type(error).__name__


def _key(number: int, rank: int) -> str:
    return f"selftest/{number}/{rank}"


def dump(outcome: CheckOutcome) -> dict[str, Any]:
    """An outcome in the report."""
    result = outcome.result
    return {
        "name": outcome.check.name,
        "what": outcome.check.what,
        "verdict": result.verdict,
        "detail": result.detail,
        "advice": result.advice,
        "seconds": round(outcome.seconds, 3),
        "figures": dict(result.figures),
    }
