"""What a bundle claims, as JSON."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from dat.core.threat import ThreatModel

FORMAT = "dat evidence bundle 1"
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class SuiteClaim:
    """The result of one suite of attacks."""

    name: str
    attacks: tuple[str, ...]
    """In order; the images say which of them broke them, by number from 1."""
    rounds: tuple[str, ...]
    """Each attack with its settings."""
    broken: dict[str, int]
    """Number of images that each attack broke."""
    ra: float
    """Robust accuracy in percent."""
    examples: str
    """SHA-256 of the adversarial examples, as float32."""

    @classmethod
    def read(cls, values: Any) -> SuiteClaim:
        take = _Reader(values)
        return cls(
            name=take("name", _text),
            attacks=tuple(take("attacks", _list_of(_text))),
            rounds=tuple(take("rounds", _list_of(_text))),
            broken={_text(name): _count(n) for name, n in take("broken", _mapping).items()},
            ra=take("ra", _number),
            examples=take("examples", _text),
        )


@dataclass(frozen=True, kw_only=True)
class Claim:
    """The figures of an evaluation, and what they were measured with."""

    images: int
    shape: tuple[int, ...]
    """Channels, height, width."""
    correct: int
    """Images classified correctly without an attack."""
    ta: float
    """Test accuracy in percent."""
    threat: ThreatModel
    seed: int
    precision: str
    batch: int
    weights: str
    """SHA-256 of the model's state dict."""
    suites: tuple[SuiteClaim, ...]
    versions: dict[str, str]

    def dump(self) -> dict[str, Any]:
        return asdict(self) | {"format": FORMAT, "threat": self.threat.dump()}

    @classmethod
    def read(cls, values: dict[str, Any]) -> Claim:
        """Read a claim that may come from anybody; raises a `ValueError` if it is not valid."""
        if values.get("format") != FORMAT:
            raise ValueError(f"format {str(values.get('format'))[:50]!r}: must be {FORMAT!r}")
        take = _Reader(values)
        threat = take("threat", _mapping)
        return cls(
            images=take("images", _count),
            shape=tuple(take("shape", _list_of(_count))),
            correct=take("correct", _count),
            ta=take("ta", _number),
            threat=ThreatModel(norm=_text(threat.get("norm")), eps=_number(threat.get("eps"))),
            seed=take("seed", _count),
            precision=take("precision", _text),
            batch=take("batch", _count),
            weights=take("weights", _text),
            suites=tuple(take("suites", _list_of(SuiteClaim.read))),
            versions={_text(k): _text(v) for k, v in take("versions", _mapping).items()},
        )


class _Reader:
    """Reads the entries of a JSON object, each with a function that checks it."""

    def __init__(self, values: Any) -> None:
        self.values = _mapping(values)

    def __call__(self, name: str, read: Callable[[Any], T]) -> T:
        try:
            return read(self.values[name])
        except KeyError:
            raise ValueError(f"{name} is missing") from None
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("must be a JSON object")
    return value


def _list_of(read: Callable[[Any], T]) -> Callable[[Any], list[T]]:
    def read_all(value: Any) -> list[T]:
        if not isinstance(value, list):
            raise ValueError("must be a list")
        return [read(entry) for entry in value]

    return read_all


def _text(value: Any) -> str:
    """One printable line: it ends up on a terminal."""
    if not isinstance(value, str) or not value.isprintable() or len(value) > 1000:
        raise ValueError("must be a line of text")
    return value


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**63:
        raise ValueError("must be a whole number, 0 or more")
    return value


def _number(value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError("must be a number")
    return float(value)
