"""Values of settings: their ranges, and their conversion from files and command lines."""

from __future__ import annotations

import math
import re
import types
import typing
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import yaml

from dat.core.mistakes import SettingError, closest

NONE_WORDS = ("none", "null", "")
MANY = 8
"""Choices up to which an error lists all of them, even if one is probably meant."""
SCIENTIFIC = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")


@dataclass(frozen=True)
class SettingLimits:
    """The range of a setting: bounds, or a list of choices."""

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    choices: tuple[str, ...] | tuple[int, ...] | None = None
    finite: bool = True
    or_import: bool = False
    """Also accept `package.module:name`, user code, which `dat.config.trust` looks for."""
    patterns: tuple[tuple[str, str], ...] = ()
    """Also accept names of these forms: as shown to users, and as regular expressions."""

    def __str__(self) -> str:
        if self.choices is not None:
            words = ", ".join((*map(str, self.choices), *(shown for shown, _ in self.patterns)))
            return f"{words}, or package.module:name" if self.or_import else f"one of {words}"
        parts = [
            f"{word} {bound:g}"
            for word, bound in (
                ("at least", self.ge),
                ("above", self.gt),
                ("at most", self.le),
                ("below", self.lt),
            )
            if bound is not None
        ]
        return " and ".join(parts)

    def allow(self, value: object) -> bool:
        if value is None:
            return True
        if isinstance(value, tuple):
            return all(self.allow(item) for item in value)
        if self.choices is not None:
            named = any(re.fullmatch(form, str(value)) for _, form in self.patterns)
            return value in self.choices or named or (self.or_import and ":" in str(value))
        if isinstance(value, bool) or not isinstance(value, int | float):
            return True
        if isinstance(value, float) and (math.isnan(value) or (self.finite and math.isinf(value))):
            return False
        return (
            (self.ge is None or value >= self.ge)
            and (self.gt is None or value > self.gt)
            and (self.le is None or value <= self.le)
            and (self.lt is None or value < self.lt)
        )


class Arguments(Mapping[str, Any]):
    """Named plain values for a function: numbers, text, true or false, none, and lists of them.

    On the command line a value is written as in YAML: `model.args.depths=[2,2,6,2]`.
    """

    def __init__(self, values: Mapping[str, Any] | None = None) -> None:
        self._values = {}
        for name, value in (values or {}).items():
            if not str(name).isidentifier():
                raise ValueError
            self._values[str(name)] = _plain(value)

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return hash(repr(self))

    def __repr__(self) -> str:
        """In YAML's flow style, which can be typed."""
        text = yaml.safe_dump(
            self._values, default_flow_style=True, sort_keys=False, width=math.inf
        )
        return str(text).strip()


def _plain(value: object) -> Any:
    """A value that YAML can write; raises a TypeError or ValueError for any other."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, str) and SCIENTIFIC.fullmatch(value):  # text in YAML 1.1
        value = float(value)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError


def parse_argument(text: str) -> Any:
    """An argument's value as typed on the command line; raises a ValueError if it is not YAML."""
    try:
        return yaml.safe_load(text) if text.strip() else text
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"{text!r}: not YAML ({' '.join(str(error).split())})") from None


def show(value: object) -> str:
    """A value as a user would type it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, tuple):
        return ",".join(show(item) for item in value) or "none"
    return str(value)


def checked(
    value: object,
    hint: Any,
    limits: SettingLimits,
    path: str,
    synonyms: Mapping[str, str] = MappingProxyType({}),
) -> Any:
    """The value converted to its declared type; raises a SettingError if it is out of range."""
    try:
        converted = _convert(value, hint)
    except (TypeError, ValueError, ArithmeticError):
        name = type_name(hint)
        article = "a " if name.startswith(("whole number", "number")) else ""
        allowed = f"{article}{name}" + (f", {limits}" if str(limits) else "")
        raise SettingError(f"{path} = {value!r}: must be {allowed}") from None
    if not limits.allow(converted):
        shown = repr(converted) if isinstance(converted, str) else show(converted)
        allowed = str(limits) or "a finite number"
        meant = _meant(converted, limits, synonyms)
        if meant and len(limits.choices or ()) > MANY:
            raise SettingError(f"{path} = {shown}: unknown: did you mean {meant}?")
        suggestion = f" (did you mean {meant}?)" if meant else ""
        raise SettingError(f"{path} = {shown}: must be {allowed}{suggestion}")
    return converted


def _meant(value: object, limits: SettingLimits, synonyms: Mapping[str, str]) -> str | None:
    """The choice that a value which is not allowed probably stands for."""
    words = [choice for choice in limits.choices or () if isinstance(choice, str)]
    return closest(str(_refused(value, limits)), words, synonyms)


def _refused(value: object, limits: SettingLimits) -> object:
    """The first item of a list that is not allowed, or the value itself."""
    items = value if isinstance(value, tuple) else (value,)
    return next(item for item in items if not limits.allow(item))


def _convert(value: object, hint: Any) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        none = value is None or (isinstance(value, str) and value.lower() in NONE_WORDS)
        if none and type(None) in args:
            return None
        *others, last = (arg for arg in args if arg is not type(None))
        for arg in others:
            with suppress(TypeError, ValueError):
                return _convert(value, arg)
        return _convert(value, last)
    if hint is Arguments:
        return _arguments(value)
    if origin is tuple:
        items = value
        if isinstance(value, str):
            items = [] if value.lower() in NONE_WORDS else value.split(",")
        if not isinstance(items, list | tuple):
            items = [items]
        if args[-1] is not Ellipsis and len(items) != len(args):
            raise ValueError
        return tuple(_convert(item, args[0]) for item in items)
    if hint is bool:
        if isinstance(value, str) and value.lower() in ("true", "false"):
            return value.lower() == "true"
        if isinstance(value, bool):
            return value
        raise TypeError
    if isinstance(value, bool):
        raise TypeError
    if hint is int:
        if isinstance(value, str) or (isinstance(value, float) and value.is_integer()):
            return int(value)
        if isinstance(value, int):
            return value
        raise TypeError
    if hint is float:
        return _number(value)
    if hint is str and isinstance(value, str | int | float):
        return str(value)
    raise TypeError


def _arguments(value: object) -> Arguments:
    if isinstance(value, str):
        value = {} if value.lower() in NONE_WORDS else parse_argument(value)
    if value is None or isinstance(value, Mapping):
        return value if isinstance(value, Arguments) else Arguments(value)
    raise TypeError


def _number(value: object) -> float:
    """A float; strings may be fractions, so that eps can be written as 8/255."""
    if isinstance(value, str):
        numerator, slash, denominator = value.partition("/")
        return float(numerator) / float(denominator) if slash else float(value)
    if isinstance(value, int | float):
        return float(value)
    raise TypeError


def type_name(hint: Any) -> str:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        joined = " or ".join(type_name(arg) for arg in args)
        return joined.replace("true or false or", "true, false or")
    if origin is tuple:
        count = "a list of" if args[-1] is Ellipsis else str(len(args))
        return f"{count} {type_name(args[0])}s"
    if hint is Arguments:
        return "a group of named values"
    names = {int: "whole number", float: "number", bool: "true or false", str: "text"}
    return names.get(hint, "none")
