"""Settings: dataclass fields with a description and a range.

A component (an attack, an objective, the settings of an optimizer) is a frozen dataclass that
inherits from `Settings`. Each field declares its meaning and its range once, and everything else
follows from that: the constructor rejects wrong values, config files and command lines are parsed
into the dataclass, and `dat config` prints it.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

from dat.core.mistakes import Mistakes, SettingError, Synonyms, did_you_mean
from dat.core.reading import read_settings
from dat.core.setting_values import (
    Arguments,
    SettingLimits,
    checked,
    parse_argument,
    show,
    type_name,
)

__all__ = [
    "Arguments",
    "Entry",
    "KeyedField",
    "SettingError",
    "SettingLimits",
    "SettingRow",
    "Settings",
    "arguments",
    "component",
    "did_you_mean",
    "inline",
    "name_of",
    "parse_argument",
    "section",
    "setting",
    "show",
]


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
    show: Callable[[Any], str] = show,
) -> Any:
    """A dataclass field with a description and a range; `key` is its name in files and on the
    command line, by default the field's own, and `show` writes its value as one would type it."""
    limits = SettingLimits(ge, gt, le, lt, choices, finite, or_import, patterns)
    metadata = {"help": help, "limits": limits, "show": show} | ({"key": key} if key else {})
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

    synonyms: ClassVar[Synonyms] = Synonyms()
    """Other names of settings and choices, for suggestions."""
    checks: ClassVar[tuple[Callable[[Any], Iterator[str]], ...]] = ()
    """Checks across fields; each yields its mistakes."""

    def __post_init__(self) -> None:
        hints, mistakes = _hints(type(self)), Mistakes()
        name = type(self).__name__.removesuffix("Settings")
        for field in dataclasses.fields(self):
            if (limits := field.metadata.get("limits")) is not None:
                with mistakes.collected():
                    path, value = f"{name}.{field.name}", getattr(self, field.name)
                    value = checked(value, hints[field.name], limits, path)
                    object.__setattr__(self, field.name, value)
        mistakes.refuse(name)
        mistakes.lines += [mistake for check in self.checks for mistake in check(self)]
        mistakes.refuse(name)

    @classmethod
    def fields_by_key(cls) -> dict[str, KeyedField]:
        """Every key of the group and the field that it sets. Plain dataclass fields have no key;
        they can only be set in Python."""
        hints, by_key = _hints(cls), dict[str, KeyedField]()
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
        """Build from nested mappings, as parsed from YAML or a command line; raises one
        SettingError for all mistakes."""
        return read_settings(cls, values, path)

    @classmethod
    def of_keys(cls, values: Mapping[str, Any]) -> Self:
        """Build from the values of keys, those of inline fields included."""
        by_key, field_values = cls.fields_by_key(), dict[str, Any]()
        for key, value in values.items():
            group = field_values
            for section in by_key[key].sections:
                group = group.setdefault(section, {})
            group[by_key[key].field.name] = value
        return cls._from_fields(field_values)

    @classmethod
    def _from_fields(cls, values: dict[str, Any]) -> Self:
        """Build from field values, with those of inline fields nested."""
        hints, nested, mistakes = _hints(cls), dict[str, Any](), Mistakes()
        for field in dataclasses.fields(cls):
            if "inline" in field.metadata and field.name in values:
                with mistakes.collected():
                    nested[field.name] = hints[field.name]._from_fields(values[field.name])
        mistakes.refuse()
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
        hints = _hints(type(self))
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
            allowed = type_name(hint)
            if str(limits):
                allowed = str(limits) if limits.choices else f"{allowed}, {limits}"
            shown = field.metadata.get("show", show)(value)
            yield SettingRow(path, shown, field.metadata["help"], allowed)


def _dumped(value: object) -> object:
    """A value as YAML and JSON write it."""
    if isinstance(value, Arguments):
        return dict(value)
    return list(value) if isinstance(value, tuple) else value


def name_of(field: dataclasses.Field[Any], value: object) -> str:
    """The registered name of a component."""
    registry: Mapping[str, type] = field.metadata["registry"]
    return next(name for name, kind in registry.items() if type(value) is kind)


_types: dict[Any, dict[str, Any]] = {}


def _hints(group: type) -> dict[str, Any]:
    """The types of a group's fields, evaluated once."""
    if group not in _types:
        _types[group] = typing.get_type_hints(group)
    return _types[group]
