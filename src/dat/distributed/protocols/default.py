"""Protocols that `distributed/choice.py` resolves to another one."""

from __future__ import annotations

from dataclasses import dataclass

from dat.distributed.protocols.base import DeferredProtocol


@dataclass(frozen=True, kw_only=True)
class Default(DeferredProtocol):
    """dense at 32 bits; below, chunked for buckets and gather for the paper's quantizers, whose
    groups cannot be divided."""

    def sharding_conflict(self) -> str:
        return ""


@dataclass(frozen=True, kw_only=True)
class Auto(DeferredProtocol):
    """Whichever of dense and chunked is measured to be faster between these workers."""
