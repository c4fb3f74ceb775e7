"""Old names are refused with the new one: arguments of `Trainer`, and methods of callbacks."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from typing import Any

import pytest

from dat import train
from dat.train import Callback, Trainer
from dat.train.callbacks import RENAMED
from dat.train.moved import MOVED, refuse_moved


@pytest.mark.parametrize("name", MOVED)
def test_a_former_argument_is_refused_with_its_new_place(name: str) -> None:
    arguments: dict[str, Any] = {name: None}
    message = re.escape(f"Trainer({name}=...) has moved: use {MOVED[name]}")
    with pytest.raises(TypeError, match=f"^{message}$"):
        Trainer(**arguments)
    with pytest.raises(TypeError, match=message):
        refuse_moved(["epochs", name])


def test_current_arguments_are_not_refused() -> None:
    names = [field.name for field in dataclasses.fields(Trainer)]
    refuse_moved(names)
    assert not MOVED.keys() & set(names)


@pytest.mark.parametrize("name", MOVED)
def test_the_new_location_exists(name: str) -> None:
    """`Trainer(data=TrainingData(labelled=..., mix=...))`: each class takes these arguments."""
    calls = [
        node
        for node in ast.walk(ast.parse(f"Trainer({MOVED[name]})"))
        if isinstance(node, ast.Call)
    ]
    assert len(calls) == MOVED[name].count("(") + 1
    for call in calls:
        assert isinstance(call.func, ast.Name)
        parameters = inspect.signature(getattr(train, call.func.id).__init__).parameters
        assert {keyword.arg for keyword in call.keywords} <= parameters.keys()


@pytest.mark.parametrize("old", RENAMED)
def test_a_callback_with_an_old_method_name_is_refused(old: str) -> None:
    new = RENAMED[old]
    message = rf"^Mine\.{old} is never called: rename it to {new}$"
    with pytest.raises(TypeError, match=message):
        type("Mine", (Callback,), {old: lambda self, *details: None})
    assert new in vars(Callback) and old not in vars(Callback)
    type("Mine", (Callback,), {new: lambda self, *details: None})


def test_every_event_of_a_callback_can_be_left_out() -> None:
    """A callback without methods inherits one for each event, and `should_stop` says no."""
    callback = Callback()
    assert set(RENAMED.values()) == {name for name in vars(Callback) if name.startswith("on_")}
    for name in RENAMED.values():
        arity = len(inspect.signature(getattr(callback, name)).parameters)
        assert getattr(callback, name)(*[None] * arity) is None
    assert callback.should_stop() is False
