"""Reprs that fit on a screen: what a class holds is described, not printed."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping
from typing import Any

LONGEST = 280
"""Characters of a repr."""
LONGEST_VALUE = 80
"""Characters of a value in it."""
MOST_ITEMS = 4


def short_repr(self: Any) -> str:
    """The `__repr__` of a dataclass or a named tuple: fields at their defaults are left out,
    tensors, networks and long collections are described."""
    values = ", ".join(f"{name}={_short(value)}" for name, value in _values(self))
    text = f"{type(self).__name__}({values})"
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 4]}...)"


def _values(record: Any) -> Iterator[tuple[str, object]]:
    """The fields that differ from their defaults."""
    if isinstance(record, tuple):
        fields: tuple[str, ...] = getattr(record, "_fields")  # noqa: B009
        yield from zip(fields, record, strict=True)
        return
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if field.repr and not _is_default(value, field):
            yield field.name, value


def _is_default(value: object, field: dataclasses.Field[Any]) -> bool:
    if field.default is not dataclasses.MISSING:
        return type(value) is type(field.default) and bool(value == field.default)
    factory: object = field.default_factory
    return type(value) is factory and bool(value == factory())


def _short(value: object) -> str:
    torch = sys.modules.get("torch")  # if it is not imported, there are no tensors
    if torch is not None and isinstance(value, torch.Tensor):
        return f"<{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}>"
    if torch is not None and isinstance(value, torch.nn.Module):
        return f"<{type(value).__name__}>"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping | list | tuple) and len(value) > MOST_ITEMS:
        return f"<{len(value)} items>"
    text = repr(value)
    printed = any(part in text for part in ("tensor(", " object at 0x", "\n"))
    return f"<{type(value).__name__}>" if printed or len(text) > LONGEST_VALUE else text
