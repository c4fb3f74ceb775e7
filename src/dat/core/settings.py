"""Settings: dataclass fields with a description and a range.

A component (an attack, an objective, the settings of an optimizer) is a frozen dataclass that
inherits from `Settings`. Each field declares its meaning and its range once, and everything else
follows from that: the constructor rejects wrong values, config files and command lines are parsed
into the dataclass, and `dat config` prints it.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import yaml

NONE_WORDS = ("none", "null", "")
SCIENTIFIC = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")


class SettingError(ValueError):
    """A setting with a wrong name or value; the message names it and says what is allowed."""


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
    patterns: tuple[tuple[str, str], ...] = (),
    key: str | None = None,
) -> Any:
    """A dataclass field with a description and a range; `key` is its name in files and on the
    command line, by default the field's own."""
    limits = SettingLimits(ge, gt, le, lt, choices, finite, or_import, patterns)
    metadata = {"help": help, "limits": limits} | ({"key": key} if key else {})
    return dataclasses.field(default=default, metadata=metadata)


def arguments(help: str) -> Any:
    """A field of type `Arguments`, named values whose names are not known in advance."""
    metadata = {"help": help, "limits": SettingLimits()}
    return dataclasses.field(default=Arguments(), metadata=metadata)


def section(kind: type[Settings], help: str) -> Any:
    """A field that holds another group of settings."""
    return dataclasses.field(default_factory=kind, metadata={"help": help})


def inline(kind: type[Settings]) -> Any:
    """A field whose settings belong to the enclosing group: `train.awp` is the `gamma` of `train`'s
    field `awp`."""
    return dataclasses.field(default_factory=kind, metadata={"inline": True})


def component(registry: Mapping[str, type[Settings]], default: str, help: str) -> Any:
    """A field that holds one of several components, chosen by its `name`."""
    return dataclasses.field(
        default_factory=registry[default],
        metadata={"help": help, "registry": registry, "default": default},
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


class KeyedField(NamedTuple):
    """The field that a key sets."""

    sections: tuple[str, ...]
    """The inline fields that lead to it, outermost first."""
    field: dataclasses.Field[Any]
    hint: Any


class Entry(NamedTuple):
    """A setting and its path."""

    path: str
    value: Any
    field: dataclasses.Field[Any]
    hint: Any


class SettingRow(NamedTuple):
    """One line of `dat config`."""

    path: str
    value: str
    help: str
    allowed: str


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Base class of everything that can be configured."""

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for field in dataclasses.fields(self):
            if "limits" in field.metadata:
                value = getattr(self, field.name)
                path = f"{type(self).__name__.removesuffix('Settings')}.{field.name}"
                object.__setattr__(
                    self, field.name, _checked(value, hints[field.name], field, path)
                )

    @classmethod
    def fields_by_key(cls) -> dict[str, KeyedField]:
        """Every key of the group and the field that it sets. Plain dataclass fields have no key;
        they can only be set in Python."""
        hints, by_key = typing.get_type_hints(cls), dict[str, KeyedField]()
        for field in dataclasses.fields(cls):
            hint = hints[field.name]
            if "inline" in field.metadata:
                for key, keyed in hint.fields_by_key().items():
                    by_key[key] = keyed._replace(sections=(field.name, *keyed.sections))
            elif field.metadata:
                by_key[field.metadata.get("key", field.name)] = KeyedField((), field, hint)
        return by_key

    @classmethod
    def read(cls, values: object, path: str = "") -> Self:
        """Build from nested mappings, as parsed from YAML or a command line."""
        if not isinstance(values, Mapping):
            raise SettingError(f"{path or 'the config'} = {values!r}: must be a group of settings")
        by_key = cls.fields_by_key()
        field_values: dict[str, Any] = {}
        for key, value in values.items():
            key_path = f"{path}.{key}" if path else str(key)
            if key not in by_key:
                known = [f"{path}.{name}" if path else name for name in by_key]
                shown = key_path if key_path.isprintable() else repr(key_path)
                raise SettingError(f"unknown setting {shown}{did_you_mean(key_path, known)}")
            sections, field, hint = by_key[key]
            group = field_values
            for section in sections:
                group = group.setdefault(section, {})
            if "registry" in field.metadata:
                group[field.name] = _read_component(field, value, key_path)
            elif isinstance(hint, type) and issubclass(hint, Settings):
                group[field.name] = hint.read(value, key_path)
            else:
                group[field.name] = _checked(value, hint, field, key_path)
        try:
            return cls._from_fields(field_values)
        except SettingError as error:  # raised by a check across fields
            raise SettingError(f"{path}: {error}" if path else str(error)) from None

    @classmethod
    def _from_fields(cls, values: dict[str, Any]) -> Self:
        """Build from field values, with those of inline fields nested."""
        hints = typing.get_type_hints(cls)
        inlined = [field.name for field in dataclasses.fields(cls) if "inline" in field.metadata]
        nested = {
            name: hints[name]._from_fields(values[name]) for name in inlined if name in values
        }
        return cls(**values | nested)

    def dump(self) -> dict[str, Any]:
        """A nested mapping from which `read` builds an equal object."""
        plain: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            value, key = getattr(self, field.name), field.metadata.get("key", field.name)
            if "inline" in field.metadata:
                plain |= value.dump()
            elif "registry" in field.metadata:
                plain[key] = {"name": name_of(field, value)} | value.dump()
            elif isinstance(value, Settings):
                plain[key] = value.dump()
            elif field.metadata:
                plain[key] = _dumped(value)
        return plain

    def entries(self, path: str = "") -> Iterator[Entry]:
        """Every setting, nested ones included; of a component, also its name."""
        hints = typing.get_type_hints(type(self))
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            field_path = f"{path}{field.metadata.get('key', field.name)}"
            if "registry" in field.metadata:
                yield Entry(f"{field_path}.name", name_of(field, value), field, str)
            if isinstance(value, Settings):
                yield from value.entries(path if "inline" in field.metadata else f"{field_path}.")
            elif field.metadata:
                yield Entry(field_path, value, field, hints[field.name])

    def rows(self) -> Iterator[SettingRow]:
        """Every setting with its value, meaning and range, for display."""
        for path, value, field, hint in self.entries():
            limits = field.metadata.get("limits")
            if limits is None:
                limits = SettingLimits(choices=tuple(field.metadata["registry"]))
            allowed = _type_name(hint)
            if str(limits):
                allowed = str(limits) if limits.choices else f"{allowed}, {limits}"
            yield SettingRow(path, show(value), field.metadata["help"], allowed)


def _dumped(value: object) -> object:
    """A value as YAML and JSON write it."""
    if isinstance(value, Arguments):
        return dict(value)
    return list(value) if isinstance(value, tuple) else value


def name_of(field: dataclasses.Field[Any], value: object) -> str:
    """The registered name of a component."""
    registry: Mapping[str, type] = field.metadata["registry"]
    return next(name for name, kind in registry.items() if type(value) is kind)


def did_you_mean(word: str, known: typing.Iterable[str]) -> str:
    """The end of an error message about an unknown name: the closest one, or all."""
    known = sorted(known)
    matches = difflib.get_close_matches(word, known, n=1)
    return f": did you mean {matches[0]}?" if matches else f": choose from {', '.join(known)}"


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


def _read_component(field: dataclasses.Field[Any], value: object, path: str) -> Settings:
    registry: Mapping[str, type[Settings]] = field.metadata["registry"]
    if isinstance(value, str):  # the short form, `attack: fgsm`
        value = {"name": value}
    if not isinstance(value, Mapping):
        raise SettingError(f"{path} = {value!r}: must be a group of settings with a name")
    name = value.get("name", field.metadata["default"])
    if not isinstance(name, str) or name not in registry:
        raise SettingError(f"{path}.name = {name!r}: unknown{did_you_mean(str(name), registry)}")
    return registry[name].read({k: v for k, v in value.items() if k != "name"}, path)


def _checked(value: object, hint: Any, field: dataclasses.Field[Any], path: str) -> Any:
    """The value converted to its declared type; raises a SettingError if it is out of range."""
    limits: SettingLimits = field.metadata["limits"]
    try:
        converted = _convert(value, hint)
    except (TypeError, ValueError, ArithmeticError):
        article = "a " if _type_name(hint).startswith(("whole number", "number")) else ""
        expected = _type_name(hint) + (f", {limits}" if str(limits) else "")
        raise SettingError(f"{path} = {value!r}: must be {article}{expected}") from None
    if not limits.allow(converted):
        suggestion = ""
        if limits.choices is not None:
            words = [choice for choice in limits.choices if isinstance(choice, str)]
            matches = difflib.get_close_matches(str(converted), words, n=1)
            suggestion = f" (did you mean {matches[0]}?)" if matches else ""
        shown = repr(converted) if isinstance(converted, str) else show(converted)
        allowed = str(limits) or "a finite number"
        raise SettingError(f"{path} = {shown}: must be {allowed}{suggestion}")
    return converted


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


def _type_name(hint: Any) -> str:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_type_name(arg) for arg in args)
    if origin is tuple:
        count = "a list of" if args[-1] is Ellipsis else str(len(args))
        return f"{count} {_type_name(args[0])}s"
    if hint is Arguments:
        return "name: value, ..."
    names = {int: "whole number", float: "number", bool: "true or false", str: "text"}
    return names.get(hint, "none")
