"""The ways to exchange gradients that a user can choose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dat.comm.quantizer import Quantizer
from dat.comm.routes import Bucket, ChunkedRoute, GatherRoute, RingRoute, Route, ServerRoute
from dat.fields import SettingError, Settings, setting


@dataclass(frozen=True, kw_only=True)
class Protocol(Settings):
    """A way to exchange gradients."""

    def check(self, quantizer: Quantizer, workers: int) -> None:
        """Refuse what does not go together."""

    def route(self, bucket: Bucket) -> Route:
        """The way of a bucket."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Default(Protocol):
    """dense at 32 bits; below, chunked for buckets and gather for the paper's quantizers, whose
    groups no share may cut."""


@dataclass(frozen=True, kw_only=True)
class Auto(Protocol):
    """Whichever of dense and chunked is measured to be faster between these workers."""


@dataclass(frozen=True, kw_only=True)
class Dense(Protocol):
    """All-reduce of the floats by torch's own collectives: the paper's HPC setting."""

    def check(self, quantizer: Quantizer, workers: int) -> None:
        if not quantizer.dense:
            raise SettingError(
                f"protocol.name = dense: sends floats, not quantizer.bits = {quantizer.bits}; "
                "use chunked, gather, server or ring"
            )


@dataclass(frozen=True, kw_only=True)
class Gather(Protocol):
    """All-gather of the quantized gradients: the paper's one-sided quantization."""

    def route(self, bucket: Bucket) -> Route:
        return GatherRoute(bucket)


@dataclass(frozen=True, kw_only=True)
class Server(Protocol):
    """A worker is the server and quantizes again: the paper's two-sided quantization."""

    rank: int = setting(0, "the worker that is the server", ge=0)

    def check(self, quantizer: Quantizer, workers: int) -> None:
        if self.rank >= workers:
            raise SettingError(
                f"protocol.rank = {self.rank}: must be below the number of workers, {workers}"
            )

    def route(self, bucket: Bucket) -> Route:
        return ServerRoute(bucket, self.rank)


@dataclass(frozen=True, kw_only=True)
class Chunked(Protocol):
    """Every worker is the server of one share: two-sided, and no worker is a bottleneck."""

    def route(self, bucket: Bucket) -> Route:
        return ChunkedRoute(bucket)


@dataclass(frozen=True, kw_only=True)
class Ring(Protocol):
    """Integers with common steps, summed in a ring: one-sided, with 127 / M levels."""

    BITS: ClassVar[int] = 8

    def check(self, quantizer: Quantizer, workers: int) -> None:
        if quantizer.bits != self.BITS:
            raise SettingError(
                f"protocol.name = ring: adds integers of 8 bits, not quantizer.bits = "
                f"{quantizer.bits}"
            )
        if workers > quantizer.levels:
            raise SettingError(
                f"protocol.name = ring: at most {quantizer.levels} workers, not {workers}; "
                "use chunked"
            )

    def route(self, bucket: Bucket) -> Route:
        return RingRoute(bucket)


PROTOCOLS: dict[str, type[Protocol]] = {
    "default": Default,
    "auto": Auto,
    "dense": Dense,
    "gather": Gather,
    "server": Server,
    "chunked": Chunked,
    "ring": Ring,
}


def protocol_name(protocol: Protocol) -> str:
    return next(name for name, kind in PROTOCOLS.items() if type(protocol) is kind)
