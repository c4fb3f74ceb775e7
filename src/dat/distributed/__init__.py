"""Communication: the workers, the exchange of gradients, and the traffic that it causes.

No other package calls collectives.
"""

from typing import TYPE_CHECKING

from dat.core.lazy import lazy_names
from dat.distributed.names import BATCH_NORM_SCOPES, GATHER_CHOICES
from dat.distributed.protocols import (
    CONCRETE_PROTOCOLS,
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
from dat.distributed.quantizers import (
    QUANTIZERS,
    Buckets,
    PerTensor,
    Quantizer,
    WholeVector,
    quantizer_name,
)

if TYPE_CHECKING:
    from dat.distributed.base import BaseExchange
    from dat.distributed.batch_norm import ScopedBatchNorm
    from dat.distributed.choice import choose, choose_default
    from dat.distributed.exchange import Exchange
    from dat.distributed.peers import Peers
    from dat.distributed.reducer import Reducer
    from dat.distributed.sharded import ShardedExchange
    from dat.distributed.shards import (
        Shards,
        TensorShard,
        check_shard,
        like,
        local_tensor,
        shard_of,
    )
    from dat.distributed.subgroup import WorkerSubgroup, check_subgroup
    from dat.distributed.traffic import Ledger, Traffic, clock_of
    from dat.distributed.world import LostWorker, WorkerError, World, backends
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        renamed={
            "GATHER": "GATHER_CHOICES",
            "NORMS": "BATCH_NORM_SCOPES",
            "Norms": "ScopedBatchNorm",
            "Part": "TensorShard",
            "Team": "WorkerSubgroup",
            "check_team": "check_subgroup",
            "local_of": "local_tensor",
            "part_of": "shard_of",
        },
        base="BaseExchange",
        choice="choose choose_default",
        exchange="Exchange",
        traffic="Ledger Traffic clock_of",
        batch_norm="ScopedBatchNorm",
        peers="Peers",
        reducer="Reducer",
        sharded="ShardedExchange",
        shards="TensorShard Shards check_shard like local_tensor shard_of",
        subgroup="WorkerSubgroup check_subgroup",
        world="LostWorker WorkerError World backends",
    )

__all__ = [
    "BATCH_NORM_SCOPES",
    "CONCRETE_PROTOCOLS",
    "GATHER_CHOICES",
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
    "Peers",
    "PerTensor",
    "Protocol",
    "Quantizer",
    "Reducer",
    "Ring",
    "ScopedBatchNorm",
    "Server",
    "ShardedExchange",
    "Shards",
    "TensorShard",
    "Traffic",
    "WholeVector",
    "WorkerError",
    "WorkerSubgroup",
    "World",
    "backends",
    "check_shard",
    "check_subgroup",
    "choose",
    "choose_default",
    "clock_of",
    "like",
    "local_tensor",
    "protocol_name",
    "quantizer_name",
    "shard_of",
]
