"""The ways to exchange gradients that a user can choose."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

from dat.comm.hybrid import HybridRoute
from dat.comm.quantizer import Quantizer
from dat.comm.routes import Bucket, ChunkedRoute, GatherRoute, RingRoute, Route, ServerRoute
from dat.comm.world import World
from dat.fields import SettingError, Settings, setting


@dataclass(frozen=True, kw_only=True)
class Protocol(Settings):
    """A way to exchange gradients."""

    def check(self, quantizer: Quantizer, workers: int) -> None:
        """Refuse what does not go together."""

    def settle(self, world: World) -> Self:
        """The same, with what only these workers can tell; all of them call it."""
        return self

    def sender(self, rank: int) -> int:
        """On whose behalf a worker rounds: its random numbers are that one's."""
        return rank

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
                "use chunked, gather, server, ring or hybrid"
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
class Hybrid(Protocol):
    """Floats inside a node, quantized between nodes: the paper's p nodes of q devices."""

    inside: int | None = setting(
        None, "workers a node, which divides the workers; none is as they were launched", ge=1
    )

    def check(self, quantizer: Quantizer, workers: int) -> None:
        if self.inside is not None and workers % self.inside:
            raise SettingError(
                f"protocol.inside = {self.inside}: must divide the number of workers, {workers}"
            )

    def settle(self, world: World) -> Self:
        return self if self.inside is not None else replace(self, inside=world.workers_a_node())

    def sender(self, rank: int) -> int:
        """A node rounds its sum, whichever of its workers does."""
        assert self.inside is not None
        return rank // self.inside

    def route(self, bucket: Bucket) -> Route:
        assert self.inside is not None
        return HybridRoute(bucket, self.inside)


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
    "hybrid": Hybrid,
}


def protocol_name(protocol: Protocol) -> str:
    return next(name for name, kind in PROTOCOLS.items() if type(protocol) is kind)
