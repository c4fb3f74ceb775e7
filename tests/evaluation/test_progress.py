"""`progress=True`: a bar."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from rich.console import Console
from torch import nn

import dat
from dat.core import progress
from dat.data import ImageData
from tests.evaluation.cases import ProgressRecorder, everything

THREAT = dat.ThreatModel(eps=0.05)
CALLS: dict[str, tuple[str, Callable[..., Any]]] = {
    "evaluate": ("evaluating", partial(dat.evaluate, threat=THREAT, attack=dat.PGD(steps=1))),
    "evaluate-attacks": ("evaluating", partial(dat.evaluate, threat=THREAT, attacks=["pgd-1"])),
    "assess": ("evaluating", partial(dat.assess, threat=THREAT, attacks=["pgd-1"])),
    "sweep": ("sweeping", partial(dat.sweep, threat=THREAT, eps=[0.0, 0.1], at_steps=1)),
    "certify": ("certifying", partial(dat.certify, sigma=0.1, n0=8, n=8, batch=32)),
}


@pytest.mark.parametrize("call", CALLS)
def test_true_draws_a_bar_and_false_does_not(
    call: str,
    model: nn.Module,
    small_data: ImageData,
    no_launcher: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bars: dict[str, ProgressRecorder] = {}

    @contextmanager
    def bar(title: str, *, show: bool) -> Iterator[ProgressRecorder]:
        bars[title] = ProgressRecorder()
        yield bars[title] if show else ProgressRecorder()

    monkeypatch.setattr(progress, "progress_bar", bar)
    title, function = CALLS[call]
    function(model, small_data)
    assert bars[title].shown == []
    function(model, small_data, progress=True)
    assert bars[title].done[-1] == bars[title].total[-1] > 0


def test_autoattack_passes_it_on(
    model: nn.Module,
    small_data: ImageData,
    no_launcher: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And the bar is drawn on standard error."""
    monkeypatch.setattr(progress, "Console", partial(Console, force_terminal=True))
    x, y = everything(small_data)
    dat.autoattack(model, x[:2], y[:2], eps=0.0, attacks=["apgd-ce"], progress=True)
    shown = capsys.readouterr()
    assert "evaluating" in shown.err and "100%" in shown.err
    assert shown.out == ""
