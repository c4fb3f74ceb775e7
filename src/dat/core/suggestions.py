"""What an unknown setting was probably meant to be: of its own group, or of another one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from dat.core.mistakes import closest, plain

if TYPE_CHECKING:
    from dat.core.settings import KeyedField, Settings

MANY = 3
"""Suggestions of one message at most."""
CLOSE = 0.8
"""How similar a setting of another group must be to be suggested."""


class Suggestions:
    """Knows all settings of `root`, with the components that `values` name."""

    def __init__(self, root: type[Settings], values: object, path: str = "") -> None:
        self.root, self.values, self.path = root, values, path

    def unknown(self, group: str, key: str, value: object = None) -> str:
        """The message about an unknown key of a group."""
        path = _join(group, key)
        if path in self.others:
            return self._of_others(path)
        shown = path if path.isprintable() else repr(path)
        matches = self.candidates(group, key, wanted_group=isinstance(value, Mapping))
        if matches:
            shown_matches = " or ".join(map(self._with_owners, matches[:MANY]))
            return f"unknown setting {shown}: did you mean {shown_matches}?"
        known = sorted({_join(group, name) for name in self._keys(group)})
        return f"unknown setting {shown}: choose from {', '.join(known)}"

    def candidates(self, group: str, key: str, *, wanted_group: bool = False) -> list[str]:
        """The settings that an unknown key may stand for, the most likely ones: one of the same
        group, then synonyms, then settings of the same name elsewhere, then similar names."""
        own = {name: _join(group, name) for name in self._keys(group)}
        word, match = plain(key), closest(key, own, cutoff=1)
        if match is not None:
            return [own[match]]
        if wanted_group:
            targets = [name for name in self.root.synonyms.settings.get(word, ()) if name in own]
        else:
            targets = [own.get(_last(path), path) for path in self._synonyms(word)]
            targets += [path for path in self.paths if plain(_last(path)) == word]
            targets = targets or [path for path in self.others if plain(_last(path)) == word]
        if targets:
            return list(dict.fromkeys(targets))
        match = closest(key, own)
        if match is not None:
            return [own[match]]
        elsewhere = {_last(path): path for path in reversed(self.paths)}
        match = None if wanted_group else closest(key, elsewhere, cutoff=CLOSE)
        return [] if match is None else [elsewhere[match]]

    @cached_property
    def paths(self) -> list[str]:
        """Every setting of the root, as long as its components are those that the values name."""
        return list(self._paths(self.root, self.values, self.path))

    @cached_property
    def others(self) -> dict[str, list[str]]:
        """The settings of components that are not used, and the names of these components."""
        others: dict[str, list[str]] = {}
        for key, keyed in self.root.fields_by_key().items():
            for name, kind in keyed.field.metadata.get("registry", {}).items():
                for own in kind.fields_by_key():
                    path = f"{_join(self.path, key)}.{own}"
                    if path not in self.paths:
                        others.setdefault(path, []).append(name)
        return others

    def _synonyms(self, word: str) -> list[str]:
        """The settings for which the word is another name: those in use, otherwise all."""
        targets = self.root.synonyms.settings.get(word, ())
        used = [target for target in targets if target in self.paths]
        return used or [target for target in targets if target in self.others]

    def _keys(self, group: str) -> list[str]:
        """The keys of a group."""
        start = f"{group}." if group else ""
        rest = (path.removeprefix(start) for path in self.paths if path.startswith(start))
        return list(dict.fromkeys(path.partition(".")[0] for path in rest))

    def _paths(self, kind: type[Settings], values: object, path: str) -> Iterator[str]:
        given = values if isinstance(values, Mapping) else {}
        for key, keyed in kind.fields_by_key().items():
            key_path, metadata = _join(path, key), keyed.field.metadata
            if "registry" in metadata:
                yield f"{key_path}.name"
                component = metadata["registry"][self._chosen(keyed, given.get(key))]
                yield from self._paths(component, {}, key_path)
            elif "limits" in metadata:
                yield key_path
            else:
                yield from self._paths(keyed.hint, given.get(key), key_path)

    def _chosen(self, keyed: KeyedField, value: object) -> str:
        """The component that the values name, or probably mean, or the default one."""
        metadata: Mapping[str, Any] = keyed.field.metadata
        name = value.get("name") if isinstance(value, Mapping) else value
        known = closest(name, metadata["registry"]) if isinstance(name, str) else None
        return known or str(metadata["default"])

    def _of_others(self, path: str) -> str:
        group = path.rpartition(".")[0]
        key = group.removeprefix(f"{self.path}.")
        given = self.values.get(key) if isinstance(self.values, Mapping) else None
        chosen = self._chosen(self.root.fields_by_key()[key], given)
        return f"{path} belongs to {', '.join(self.others[path])}; {group}.name is {chosen}"

    def _with_owners(self, path: str) -> str:
        owners = self.others.get(path)
        return f"{path} (of {', '.join(owners)})" if owners else path


def _join(group: str, key: str) -> str:
    return f"{group}.{key}" if group else key


def _last(path: str) -> str:
    return path.rpartition(".")[2]
