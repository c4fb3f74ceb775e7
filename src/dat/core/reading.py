"""Reads nested mappings, as parsed from YAML or a command line, into settings; collects all
mistakes in the order of the file."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from dat.core.mistakes import SettingError, closest, did_you_mean
from dat.core.setting_values import checked
from dat.core.suggestions import Suggestions

if TYPE_CHECKING:
    from dat.core.settings import KeyedField, Settings

S = TypeVar("S", bound="Settings")
NAMED = re.compile(r"(\w+)(?: =|:) ")


def read_settings(kind: type[S], values: object, path: str) -> S:
    """Build `kind` from the values; raises one SettingError for all mistakes."""
    reader = _Reader(kind, values, path)
    settings = reader.group(kind, values, path)
    if settings is None:
        raise SettingError(*reader.mistakes)
    return settings


class _Reader:
    def __init__(self, root: type[Settings], values: object, path: str) -> None:
        self.mistakes: list[str] = []
        self.suggestions = Suggestions(root, values, path)
        self.names = root.synonyms.names

    def group(self, kind: type[S], values: object, path: str) -> S | None:
        """Build a group; None if there are mistakes."""
        if not isinstance(values, Mapping):
            where = path or "the config"
            self.mistakes.append(f"{where} = {values!r}: must be a group of settings")
            return None
        by_key, readable, before = kind.fields_by_key(), dict[str, Any](), len(self.mistakes)
        unknown = False
        for key, value in values.items():
            if key not in by_key:
                unknown = True
                self._unknown(path, str(key), value)
                continue
            read = self._value(by_key[key], value, f"{path}.{key}" if path else key)
            if read is not UNREADABLE:
                readable[key] = read
        if len(self.mistakes) == before:
            return self._built(kind, readable, path)
        if not unknown:
            self._check_readable(kind, values, readable)
        return None

    def _value(self, keyed: KeyedField, value: object, path: str) -> Any:
        """The value of a field, or `UNREADABLE`."""
        metadata = keyed.field.metadata
        if "registry" in metadata:
            read = self._component(metadata["registry"], metadata["default"], value, path)
            return UNREADABLE if read is None else read
        if "limits" not in metadata:
            read = self.group(keyed.hint, value, path)
            return UNREADABLE if read is None else read
        try:
            return checked(value, keyed.hint, metadata["limits"], path, self.names)
        except SettingError as error:
            self.mistakes += error.mistakes
            return UNREADABLE

    def _component(
        self, registry: Mapping[str, type[Settings]], default: str, value: object, path: str
    ) -> Settings | None:
        if isinstance(value, str):  # the short form, `attack: fgsm`
            value = {"name": value}
        if not isinstance(value, Mapping):
            self.mistakes.append(f"{path} = {value!r}: must be a group of settings with a name")
            return None
        name = value.get("name", default)
        own = {key: setting for key, setting in value.items() if key != "name"}
        if isinstance(name, str) and name in registry:
            return self.group(registry[name], own, path)
        meant = did_you_mean(str(name), registry, self.names)
        self.mistakes.append(f"{path}.name = {name!r}: unknown{meant}")
        self._check_probable(registry, closest(str(name), registry, self.names), own, path)
        return None

    def _check_probable(
        self,
        registry: Mapping[str, type[Settings]],
        name: str | None,
        values: Mapping[Any, object],
        path: str,
    ) -> None:
        """Check the settings of a component with an unknown name: those that no component has are
        mistakes, and of the one that is probably meant, the values are checked."""
        probable = registry[name].fields_by_key() if name else {}
        known = {key for kind in registry.values() for key in kind.fields_by_key()}
        for key, value in values.items():
            if key in probable:
                self._value(probable[key], value, f"{path}.{key}")
            elif key not in known:
                self._unknown(path, str(key), value)

    def _unknown(self, path: str, key: str, value: object) -> None:
        """Report an unknown key; if it probably means a group, also the mistakes in the group."""
        self.mistakes.append(self.suggestions.unknown(path, key, value))
        if isinstance(value, Mapping) and not path:
            by_key = self.suggestions.root.fields_by_key()
            meant = self.suggestions.candidates(path, key, wanted_group=True)
            if len(meant) == 1 and meant[0] in by_key:
                self._value(by_key[meant[0]], value, meant[0])

    def _built(self, kind: type[S], values: Mapping[str, Any], path: str) -> S | None:
        try:
            return kind.of_keys(values)
        except SettingError as error:  # raised by a check across fields
            keys = kind.fields_by_key()
            for mistake in error.mistakes:
                named = NAMED.match(mistake)
                separator = "." if named and named[1] in keys else ": "
                self.mistakes.append(f"{path}{separator}{mistake}" if path else mistake)
            return None

    def _check_readable(
        self, kind: type[Settings], given: Mapping[Any, object], readable: Mapping[str, Any]
    ) -> None:
        """Run the checks across fields for which all fields are readable."""
        partial = _Partial(kind, given, readable)
        for check in kind.checks:
            with suppress(_Unreadable):
                for mistake in check(partial):
                    self.mistakes.append(mistake)


UNREADABLE = object()
"""In place of a field's value with mistakes in it."""


class _Unreadable(Exception):
    """A check needs a field with mistakes in it."""


class _Partial:
    """The readable fields of a group; a check that needs another one ends there."""

    def __init__(
        self, kind: type[Settings], given: Mapping[Any, object], readable: Mapping[str, Any]
    ) -> None:
        for key, (sections, field, _) in kind.fields_by_key().items():
            if key in readable and not sections:
                setattr(self, field.name, readable[key])
            elif key not in given and not sections:
                made = field.default_factory
                default = field.default if made is dataclasses.MISSING else made()
                setattr(self, field.name, default)

    def __getattr__(self, name: str) -> Any:
        raise _Unreadable
