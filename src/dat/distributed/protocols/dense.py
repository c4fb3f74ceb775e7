"""Floats, summed by torch's own all-reduce: the paper's HPC setting."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from dat.core.settings import SettingError
from dat.distributed.lazy import collectives
from dat.distributed.phases import PlannedBucket, PlannedExchange
from dat.distributed.protocols.base import Protocol
from dat.distributed.traffic import around_ring, ring_bytes

if TYPE_CHECKING:
    from torch import Tensor
    from torch.futures import Future

    from dat.distributed.quantizers import Quantizer
    from dat.distributed.traffic import Ledger
    from dat.distributed.world import World


@dataclass(frozen=True, kw_only=True)
class Dense(Protocol):
    """All-reduce of the floats by torch's own collectives: the paper's HPC setting."""

    staged: ClassVar[bool] = False

    def sharding_conflict(self) -> str:
        return ""

    def check(self, quantizer: Quantizer, workers: int) -> None:
        if not quantizer.dense:
            raise SettingError(
                f"protocol.name = dense: sends float32, not quantizer.bits = {quantizer.bits}; "
                "use chunked, gather, server, ring or hybrid"
            )

    def sum_bucket(self, gradient: Tensor, world: World, ledger: Ledger) -> Future[Tensor]:
        land, load = ledger.start_transfer(), around_ring(gradient, world)
        reduction = collectives.start_all_reduce(gradient)

        def finish(summed: Future[Any]) -> Tensor:
            total: Tensor = summed.value()[0]  # raises the error that the exchange failed with
            land(*load)
            return total

        return reduction.then(finish)

    def phases(self, bucket: PlannedBucket) -> PlannedExchange:
        workers, size = bucket.topology.workers, bucket.float_bytes
        if workers == 1:
            return PlannedExchange((), (), sent=0, busiest=0, buffers=0)
        sent = ring_bytes(size, workers)
        return PlannedExchange(
            collect=(bucket.ring(size),), spread=(), sent=workers * sent, busiest=sent, buffers=0
        )
