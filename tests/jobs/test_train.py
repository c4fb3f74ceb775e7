"""Ctrl-C during training: the first one saves, the second one stops at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from dat.jobs.train import _stop_on_signals


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_the_second_interrupt_stops_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    stopping = threading.Event()
    messages = []

    def train() -> None:
        with _stop_on_signals(stopping, first=True):
            signal.raise_signal(signal.SIGINT)
            messages.append(capfd.readouterr().err)
            signal.raise_signal(signal.SIGINT)
            messages.append("training continued")

    with pytest.raises(KeyboardInterrupt):
        train()
    assert stopping.is_set()
    (message,) = messages
    assert message.startswith("\ninterrupted: saving a checkpoint")  # on a line of its own


def test_only_the_first_worker_reports_an_interrupt(capfd: pytest.CaptureFixture[str]) -> None:
    stopping = threading.Event()
    with pytest.raises(KeyboardInterrupt), _stop_on_signals(stopping, first=False):
        signal.raise_signal(signal.SIGINT)
    assert stopping.is_set()
    assert capfd.readouterr().err == ""
