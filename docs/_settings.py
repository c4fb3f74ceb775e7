"""How the reference reads a setting: `steps: int = setting(10, "ascent steps k", ge=1)` is a field
whose default is 10, and whose meaning and range are said beside it."""

from __future__ import annotations

import ast
from typing import Any

import griffe

KINDS = ("setting", "section", "component")
"""The functions of dat.core.settings that make a field."""
LIMITS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}


class Settings(griffe.Extension):
    def on_attribute_instance(
        self,
        *,
        node: ast.AST | griffe.ObjectNode,
        attr: griffe.Attribute,
        agent: griffe.Visitor | griffe.Inspector,
        **kwargs: Any,
    ) -> None:
        value = getattr(node, "value", None)
        if not isinstance(value, ast.Call) or getattr(value.func, "id", "") not in KINDS:
            return
        *_, default, meaning = value.args  # of a component, its registry comes first
        made = "()" if value.func.id == "section" else ""  # type: ignore[attr-defined]
        attr.value = f"{ast.unparse(default)}{made}"
        attr.docstring = griffe.Docstring(_told(meaning, value.keywords), parent=attr)


def _told(meaning: ast.expr, limits: list[ast.keyword]) -> str:
    """The meaning, and what is allowed."""
    text = str(ast.literal_eval(meaning))
    bounds = [f"{LIMITS[it.arg]} {ast.unparse(it.value)}" for it in limits if it.arg in LIMITS]
    for limit in limits:  # those that are written out; others are named in the code alone
        words = getattr(limit.value, "elts", []) if limit.arg == "choices" else []
        if all(isinstance(word, ast.Constant) for word in words):
            bounds += [str(word.value) for word in words]
    allowed = f" ({', '.join(bounds)})" if bounds else ""
    return f"{text[0].upper()}{text[1:]}{allowed}."
