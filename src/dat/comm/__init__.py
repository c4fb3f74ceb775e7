"""Communication: the workers, how they exchange gradients, and what that cost.

This is the only room that calls collectives.
"""

from dat.comm.choice import choose, choose_default
from dat.comm.exchange import Exchange
from dat.comm.ledger import Ledger, Traffic, clock_of
from dat.comm.protocols import (
    PROTOCOLS,
    Auto,
    Chunked,
    Default,
    Dense,
    Gather,
    Protocol,
    Ring,
    Server,
    protocol_name,
)
from dat.comm.quantizer import (
    QUANTIZERS,
    Buckets,
    PerTensor,
    Quantizer,
    WholeVector,
    quantizer_name,
)
from dat.comm.reducer import Reducer
from dat.comm.team import Team, check_team
from dat.comm.world import LostWorker, WorkerError, World, backends

__all__ = [
    "PROTOCOLS",
    "QUANTIZERS",
    "Auto",
    "Buckets",
    "Chunked",
    "Default",
    "Dense",
    "Exchange",
    "Gather",
    "Ledger",
    "LostWorker",
    "PerTensor",
    "Protocol",
    "Quantizer",
    "Reducer",
    "Ring",
    "Server",
    "Team",
    "Traffic",
    "WholeVector",
    "WorkerError",
    "World",
    "backends",
    "check_team",
    "choose",
    "choose_default",
    "clock_of",
    "protocol_name",
    "quantizer_name",
]
