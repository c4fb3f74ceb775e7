"""The ways to exchange gradients. Each protocol is a file and a line in `PROTOCOLS`: its settings,
its route on the workers, and its phases for the planner."""

from dat.distributed.protocols.base import DeferredProtocol, Protocol
from dat.distributed.protocols.chunked import Chunked
from dat.distributed.protocols.default import Auto, Default
from dat.distributed.protocols.dense import Dense
from dat.distributed.protocols.gather import Gather
from dat.distributed.protocols.hybrid import Hybrid
from dat.distributed.protocols.ring import Ring
from dat.distributed.protocols.server import Server

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
CONCRETE_PROTOCOLS = {
    name: kind for name, kind in PROTOCOLS.items() if not issubclass(kind, DeferredProtocol)
}
"""Protocols that exchange gradients themselves; `default` and `auto` are resolved to one of
them."""


def protocol_name(protocol: Protocol) -> str:
    """A protocol's name in the registry."""
    return next(name for name, kind in PROTOCOLS.items() if type(protocol) is kind)


__all__ = [
    "CONCRETE_PROTOCOLS",
    "PROTOCOLS",
    "Auto",
    "Chunked",
    "Default",
    "DeferredProtocol",
    "Dense",
    "Gather",
    "Hybrid",
    "Protocol",
    "Ring",
    "Server",
    "protocol_name",
]
