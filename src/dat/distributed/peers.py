"""Work that is divided among the workers, instead of being repeated by each of them."""

from torch import Tensor

from dat.distributed.collectives import all_gather
from dat.distributed.traffic import Ledger, to_all_others
from dat.distributed.world import World


class Peers:
    """The workers of a world, for exchanging results that only one of them has computed."""

    def __init__(self, world: World, ledger: Ledger) -> None:
        self.rank, self.size = world.rank, world.size
        self._world, self._ledger = world, ledger

    def all_gather(self, values: Tensor) -> Tensor:
        """The values of all workers, one row per rank; all pass tensors of the same shape."""
        finish, sent = self._ledger.start_transfer(), to_all_others(values, self._world)
        rows = all_gather(values, self.size)
        finish(*sent)
        return rows
