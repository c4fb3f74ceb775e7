"""Protocols that stand for another one; `distributed/choice.py` picks it."""

from __future__ import annotations

from dataclasses import dataclass

from dat.distributed.protocols.base import DeferredProtocol


@dataclass(frozen=True, kw_only=True)
class Default(DeferredProtocol):
    """dense at 32 bits; below, chunked for buckets and gather for the paper's quantizers, whose
    groups no share may cut."""

    def sharding_conflict(self) -> str:
        return ""


@dataclass(frozen=True, kw_only=True)
class Auto(DeferredProtocol):
    """Whichever of dense and chunked is measured to be faster between these workers."""
