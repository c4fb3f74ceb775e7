"""Settings: dataclass fields that know their meaning and their range.

A component of the house (an attack, an objective, an optimizer's recipe) is a frozen dataclass that
inherits `Settings`. Each field says what it means and what it may be, once, and everything else
follows: a wrong value is refused where the object is made, a config file or a command line is read
into it, and `dat config` prints it.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

NONE_WORDS = ("none", "null", "")


class SettingError(ValueError):
    """A setting has a wrong name or value; the message names it and says what is allowed."""


@dataclass(frozen=True)
class Limits:
    """What a value may be."""

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    choices: tuple[str, ...] | tuple[int, ...] | None = None
    finite: bool = True
    or_import: bool = False
    """A string of the form `package.module:name` is allowed beside the choices."""

    def __str__(self) -> str:
        if self.choices is not None:
            words = ", ".join(map(str, self.choices))
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
            return value in self.choices or (self.or_import and ":" in str(value))
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


def setting(
    default: object,
    help: str,
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    choices: tuple[str, ...] | tuple[int, ...] | None = None,
    finite: bool = True,
    or_import: bool = False,
) -> Any:
    """A dataclass field with a meaning and a range."""
    limits = Limits(ge, gt, le, lt, choices, finite, or_import)
    return dataclasses.field(default=default, metadata={"help": help, "limits": limits})


def section(kind: type[Settings], help: str) -> Any:
    """A field that holds another group of settings."""
    return dataclasses.field(default_factory=kind, metadata={"help": help})


def component(registry: Mapping[str, type[Settings]], default: str, help: str) -> Any:
    """A field that holds one of several components, chosen by its `name`."""
    return dataclasses.field(
        default_factory=registry[default],
        metadata={"help": help, "registry": registry, "default": default},
    )


class Row(NamedTuple):
    """One line of `dat config`."""

    path: str
    value: str
    help: str
    allowed: str


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Base of everything that can be configured."""

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for field in dataclasses.fields(self):
            if "limits" in field.metadata:
                value = getattr(self, field.name)
                where = f"{type(self).__name__}.{field.name}"
                object.__setattr__(
                    self, field.name, _checked(value, hints[field.name], field, where)
                )

    @classmethod
    def read(cls, values: object, path: str = "") -> Self:
        """Build from nested mappings, as they come from YAML or a command line."""
        if not isinstance(values, Mapping):
            raise SettingError(f"{path or 'the config'} = {values!r}: must be a group of settings")
        hints = typing.get_type_hints(cls)
        known = {field.name: field for field in dataclasses.fields(cls)}
        made: dict[str, Any] = {}
        for key, value in values.items():
            where = f"{path}.{key}" if path else str(key)
            if key not in known:
                named = [f"{path}.{name}" if path else name for name in known]
                shown = where if where.isprintable() else repr(where)
                raise SettingError(f"unknown setting {shown}{did_you_mean(where, named)}")
            field, hint = known[key], hints[key]
            if "registry" in field.metadata:
                made[key] = _read_component(field, value, where)
            elif isinstance(hint, type) and issubclass(hint, Settings):
                made[key] = hint.read(value, where)
            else:
                made[key] = _checked(value, hint, field, where)
        try:
            return cls(**made)
        except SettingError as error:  # a rule between fields
            raise SettingError(f"{path}: {error}" if path else str(error)) from None

    def dump(self) -> dict[str, Any]:
        """The nested mapping that `read` turns back into an equal object."""
        plain: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if "registry" in field.metadata:
                plain[field.name] = {"name": name_of(field, value)} | value.dump()
            elif isinstance(value, Settings):
                plain[field.name] = value.dump()
            else:
                plain[field.name] = list(value) if isinstance(value, tuple) else value
        return plain

    def rows(self, path: str = "") -> Iterator[Row]:
        """Every setting with its value, meaning and range."""
        hints = typing.get_type_hints(type(self))
        for field in dataclasses.fields(self):
            value, where = getattr(self, field.name), f"{path}{field.name}"
            if "registry" in field.metadata:
                names = Limits(choices=tuple(field.metadata["registry"]))
                help = field.metadata["help"]
                yield Row(f"{where}.name", name_of(field, value), help, str(names))
            if isinstance(value, Settings):
                yield from value.rows(f"{where}.")
            else:
                allowed = _type_name(hints[field.name])
                limits = field.metadata["limits"]
                if str(limits):
                    allowed = str(limits) if limits.choices else f"{allowed}, {limits}"
                yield Row(where, show(value), field.metadata["help"], allowed)


def name_of(field: dataclasses.Field[Any], value: object) -> str:
    """The registered name of a component."""
    registry: Mapping[str, type] = field.metadata["registry"]
    return next(name for name, kind in registry.items() if type(value) is kind)


def did_you_mean(word: str, known: typing.Iterable[str]) -> str:
    """The tail of an error message about an unknown name."""
    known = sorted(known)
    near = difflib.get_close_matches(word, known, n=1)
    return f": did you mean {near[0]}?" if near else f": known are {', '.join(known)}"


def show(value: object) -> str:
    """A value as a person would type it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, tuple):
        return ",".join(show(item) for item in value) or "none"
    return str(value)


def _read_component(field: dataclasses.Field[Any], value: object, where: str) -> Settings:
    registry: Mapping[str, type[Settings]] = field.metadata["registry"]
    if isinstance(value, str):  # the short form, `attack: fgsm`
        value = {"name": value}
    if not isinstance(value, Mapping):
        raise SettingError(f"{where} = {value!r}: must be a group of settings with a name")
    name = value.get("name", field.metadata["default"])
    if not isinstance(name, str) or name not in registry:
        raise SettingError(f"{where}.name = {name!r}: unknown{did_you_mean(str(name), registry)}")
    return registry[name].read({k: v for k, v in value.items() if k != "name"}, where)


def _checked(value: object, hint: Any, field: dataclasses.Field[Any], where: str) -> Any:
    """The value in its declared type and within its limits, or an error that names the setting."""
    limits: Limits = field.metadata["limits"]
    try:
        converted = _convert(value, hint)
    except (TypeError, ValueError, ArithmeticError):
        wanted = _type_name(hint) + (f", {limits}" if str(limits) else "")
        raise SettingError(f"{where} = {value!r}: must be {wanted}") from None
    if not limits.allow(converted):
        near = ""
        if limits.choices is not None:
            words = [choice for choice in limits.choices if isinstance(choice, str)]
            match = difflib.get_close_matches(str(converted), words, n=1)
            near = f" (did you mean {match[0]}?)" if match else ""
        shown = repr(converted) if isinstance(converted, str) else show(converted)
        allowed = str(limits) or "a finite number"
        raise SettingError(f"{where} = {shown}: must be {allowed}{near}")
    return converted


def _convert(value: object, hint: Any) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None or (isinstance(value, str) and value.lower() in NONE_WORDS):
            return None
        return _convert(value, next(arg for arg in args if arg is not type(None)))
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


def _number(value: object) -> float:
    """A float; text may be a fraction, so that eps can be written as 8/255."""
    if isinstance(value, str):
        numerator, slash, denominator = value.partition("/")
        return float(numerator) / float(denominator) if slash else float(value)
    if isinstance(value, int | float):
        return float(value)
    raise TypeError


def _type_name(hint: Any) -> str:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_type_name(arg) for arg in args)
    if origin is tuple:
        count = "a list of" if args[-1] is Ellipsis else str(len(args))
        return f"{count} {_type_name(args[0])}s"
    names = {int: "whole number", float: "number", bool: "true or false", str: "text"}
    return names.get(hint, "none")
