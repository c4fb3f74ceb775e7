"""Mistakes in settings: all of them are reported at once, each with the closest correct name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import NamedTuple

SHOWN = 20
"""Mistakes that are shown at most."""


class SettingError(ValueError):
    """Settings with wrong names or values; the message names each and says what is allowed.

    One mistake is one line. Several are a header, which names their `source`, and a line each.
    """

    def __init__(self, *mistakes: str, source: str = "") -> None:
        self.mistakes = mistakes
        super().__init__(_message(mistakes, source))

    def in_source(self, source: str) -> SettingError:
        """The same mistakes; a list of them is headed by their source, a recipe or a file."""
        return SettingError(*self.mistakes, source=source)


def _message(mistakes: tuple[str, ...], source: str) -> str:
    if len(mistakes) == 1:
        return mistakes[0]
    header = f"{len(mistakes)} mistakes"
    lines = [f"{source}: {header}" if source else header]
    lines += [f"  {mistake}" for mistake in mistakes[:SHOWN]]
    if len(mistakes) > SHOWN:
        lines.append(f"  and {len(mistakes) - SHOWN} more")
    return "\n".join(lines)


class Mistakes:
    """Collects the mistakes of several checks, to report all at once."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Keep the mistakes of the SettingError that ends this block, if any."""
        try:
            yield
        except SettingError as error:
            self.lines += error.mistakes

    def refuse(self, source: str = "") -> None:
        """Raise one SettingError for all mistakes, if there are any."""
        if self.lines:
            raise SettingError(*self.lines, source=source)


class Synonyms(NamedTuple):
    """Other names that users know; those to look up are written as `plain` returns them."""

    settings: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    """The paths of settings, or groups, by other names of theirs."""
    names: Mapping[str, str] = MappingProxyType({})
    """The names of components and choices by other names of theirs."""


def plain(word: str) -> str:
    """A name without case and punctuation: `Batch-Size` is `batchsize`."""
    return "".join(filter(str.isalnum, word.casefold()))


def closest(
    word: str,
    known: Iterable[str],
    synonyms: Mapping[str, str] = MappingProxyType({}),
    *,
    cutoff: float = 0.6,
) -> str | None:
    """The known name that the word most likely stands for: the same but for case and punctuation,
    that of which it is a synonym, or a similar one."""
    known = sorted(known)
    by_plain = {plain(name): name for name in reversed(known)}
    sought = plain(word)
    if not sought:
        return None
    if sought in by_plain:
        return by_plain[sought]
    if synonyms.get(sought) in known:
        return synonyms[sought]
    by_lower = {name.casefold(): name for name in reversed(known)}
    matches = difflib.get_close_matches(word.casefold(), list(by_lower), n=1, cutoff=cutoff)
    return by_lower[matches[0]] if matches else None


def did_you_mean(
    word: str, known: Iterable[str], synonyms: Mapping[str, str] = MappingProxyType({})
) -> str:
    """The end of an error message about an unknown name: the closest one, or all."""
    known = sorted(known)
    match = closest(word, known, synonyms)
    return f": did you mean {match}?" if match else f": choose from {', '.join(known)}"
