"""The parts of a step, for whoever wants to know how long they take: nobody, most of the time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
Watch = Callable[[str], AbstractContextManager[object]]
"""Called with a stage's name; what it gives is entered and left with the stage."""
_NOBODY = nullcontext()
_watching: list[Watch] = []


def stage(name: str) -> AbstractContextManager[object]:
    """`with stage("attack"): ...`; stages may lie in one another."""
    if len(_watching) > 1:
        return _told_to_all(name)
    return _watching[0](name) if _watching else _NOBODY


@contextmanager
def _told_to_all(name: str) -> Iterator[None]:
    with ExitStack() as stack:
        for watch in tuple(_watching):
            stack.enter_context(watch(name))
        yield


def staged(name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """The whole of a function is a stage."""

    def wrap(work: Callable[P, T]) -> Callable[P, T]:
        @wraps(work)
        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            with stage(name):
                return work(*args, **kwargs)

        return run

    return wrap


@contextmanager
def watched(watch: Watch) -> Iterator[None]:
    """Inside, stages are told to `watch`."""
    _watching.append(watch)
    try:
        yield
    finally:
        _watching.remove(watch)
