"""Which functions of ours handle devices, by their source; and which of them a process has entered.

A function handles devices if it names `devices`, the module that knows them, or `device`, as an
attribute, an argument or a variable, or if it copies in the background (`non_blocking`), moves a
tensor with `cpu`, or is part of `dat.core.devices`.
"""

from __future__ import annotations

import ast
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from tests.devices.simulated import SOURCE, name_of

OWNER = "core/devices.py"
NAMES = ("device", "devices")
Function = ast.FunctionDef | ast.AsyncFunctionDef


def device_functions() -> set[str]:
    """The functions that handle devices, as `path:qualified name`."""
    root = Path(SOURCE)
    return {
        f"{path.relative_to(root)}:{name}"
        for path in sorted(root.rglob("*.py"))
        for name, function in functions(ast.parse(path.read_text()))
        if str(path.relative_to(root)) == OWNER or handles_devices(function)
    }


def functions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function):
            yield prefix + child.name, child
            yield from functions(child, f"{prefix}{child.name}.<locals>.")
        elif isinstance(child, ast.ClassDef):
            yield from functions(child, f"{prefix}{child.name}.")
        else:
            yield from functions(child, prefix)


def handles_devices(function: Function) -> bool:
    return any(map(names_device, own_nodes(function)))


def own_nodes(function: Function) -> Iterator[ast.AST]:
    """What is in the body of a function, but not in that of a function inside."""
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, Function):
            waiting += ast.iter_child_nodes(node)


def names_device(node: ast.AST) -> bool:
    if isinstance(node, ast.keyword):
        return node.arg in ("device", "non_blocking")
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr == "cpu"
    if isinstance(node, ast.Attribute):
        return node.attr in NAMES
    return isinstance(node, ast.Name) and node.id in NAMES


class Recorder:
    """Records the functions of ours that are entered, in every thread of Python; in those of
    autograd once `follow` was called there."""

    def __init__(self) -> None:
        self.codes: set[CodeType] = set()
        self.active = False

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record inside this context, in new threads as well."""
        threading.settrace(self._enter)
        self.active = True
        self.follow()
        yield
        self.active = False
        sys.settrace(None)
        threading.settrace(None)

    def follow(self) -> None:
        """Record this thread as well, its present functions included."""
        if sys.gettrace() is not None or not self.active:
            return
        sys.settrace(self._enter)
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            self.codes.add(frame.f_code)
            frame = frame.f_back

    def _enter(self, frame: FrameType, event: str, argument: Any) -> None:
        if self.active:
            self.codes.add(frame.f_code)

    def entered(self) -> list[str]:
        ours = (code for code in list(self.codes) if code.co_filename.startswith(SOURCE))
        return sorted({name_of(code) for code in ours})


RECORDER = Recorder()
