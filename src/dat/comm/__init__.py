"""Communication: the workers, how they exchange gradients, and what that cost.

This is the only room that calls collectives.
"""

from dat.comm.base import BaseExchange
from dat.comm.choice import choose, choose_default
from dat.comm.exchange import Exchange
from dat.comm.ledger import Ledger, Traffic, clock_of
from dat.comm.norms import NORMS, Norms
from dat.comm.protocols import (
    PROTOCOLS,
    Auto,
    Chunked,
    Default,
    Dense,
    Gather,
    Hybrid,
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
from dat.comm.sharded import GATHER, ShardedExchange
from dat.comm.shards import Part, Shards, check_shard, like, local_of, part_of
from dat.comm.team import Team, check_team
from dat.comm.world import LostWorker, WorkerError, World, backends

__all__ = [
    "GATHER",
    "NORMS",
    "PROTOCOLS",
    "QUANTIZERS",
    "Auto",
    "BaseExchange",
    "Buckets",
    "Chunked",
    "Default",
    "Dense",
    "Exchange",
    "Gather",
    "Hybrid",
    "Ledger",
    "LostWorker",
    "Norms",
    "Part",
    "PerTensor",
    "Protocol",
    "Quantizer",
    "Reducer",
    "Ring",
    "Server",
    "ShardedExchange",
    "Shards",
    "Team",
    "Traffic",
    "WholeVector",
    "WorkerError",
    "World",
    "backends",
    "check_shard",
    "check_team",
    "choose",
    "choose_default",
    "clock_of",
    "like",
    "local_of",
    "part_of",
    "protocol_name",
    "quantizer_name",
]
