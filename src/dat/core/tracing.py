"""Named stages of a training step, for hooks that time or profile them. Without a hook a stage
costs next to nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
Watch = Callable[[str], AbstractContextManager[object]]
"""Called with a stage's name; the stage runs inside the context manager that it returns."""
_NO_HOOK = nullcontext()
_hooks: list[Watch] = []


def stage(name: str) -> AbstractContextManager[object]:
    """A stage, as in `with stage("attack"): ...`; stages may be nested."""
    if len(_hooks) > 1:
        return _enter_all(name)
    return _hooks[0](name) if _hooks else _NO_HOOK


@contextmanager
def _enter_all(name: str) -> Iterator[None]:
    with ExitStack() as stack:
        for hook in tuple(_hooks):
            stack.enter_context(hook(name))
        yield


def staged(name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """A decorator that makes every call of a function a stage."""

    def wrap(function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            with stage(name):
                return function(*args, **kwargs)

        return run

    return wrap


@contextmanager
def watched(hook: Watch) -> Iterator[None]:
    """Call `hook` for every stage inside the context."""
    _hooks.append(hook)
    try:
        yield
    finally:
        _hooks.remove(hook)
