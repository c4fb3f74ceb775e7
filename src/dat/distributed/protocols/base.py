"""The interface of protocols: settings, the route on the workers, phases for the planner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from dat.core.settings import SettingError, Settings

if TYPE_CHECKING:
    from torch import Tensor
    from torch.futures import Future

    from dat.distributed.phases import PlannedBucket, PlannedExchange, Topology
    from dat.distributed.quantizers import Quantizer
    from dat.distributed.routes import GradientBucket, GradientRoute
    from dat.distributed.traffic import Ledger
    from dat.distributed.world import World


@dataclass(frozen=True, kw_only=True)
class Protocol(Settings):
    """A way to exchange gradients."""

    staged: ClassVar[bool] = True
    """A bucket passes through two stages (`route`), each with a thread of its own. Otherwise one
    collective of torch's sums it (`sum_bucket`)."""

    def check(self, quantizer: Quantizer, workers: int) -> None:
        """Refuse a quantizer or a number of workers that the protocol does not work with."""

    def sharding_conflict(self) -> str:
        """Why it cannot sum the gradients of a sharded model, and what to set."""
        return "it cannot reduce-scatter gradients; use protocol.name default"

    def resolve(self, world: World) -> Self:
        """This protocol, with the settings filled in that depend on the workers; a collective
        call."""
        return self

    def sender(self, rank: int) -> int:
        """The seed of a worker's random rounding: workers with the same one round identically."""
        return rank

    def levels(self, quantizer: Quantizer, workers: int) -> int:
        """Levels of a worker's codes on either side of zero."""
        return quantizer.levels

    def route(self, bucket: GradientBucket) -> GradientRoute:
        """What exchanges a bucket on the workers, if the protocol is `staged`."""
        raise NotImplementedError

    def sum_bucket(self, gradient: Tensor, world: World, ledger: Ledger) -> Future[Tensor]:
        """Begin to sum a bucket in place, if the protocol is not `staged`; the future gives the
        same tensor."""
        raise NotImplementedError

    def applicable(self, quantizer: Quantizer, topology: Topology) -> bool:
        """Whether a plan for these workers should consider the protocol."""
        try:
            self.check(quantizer, topology.workers)
        except SettingError:
            return False
        return True

    def phases(self, bucket: PlannedBucket) -> PlannedExchange:
        """The exchange of a bucket, phase by phase: the same bytes as on the workers."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class DeferredProtocol(Protocol):
    """Stands for another protocol, which `choose` picks before the first exchange."""
