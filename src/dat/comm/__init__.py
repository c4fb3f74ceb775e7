"""Communication: the workers, how they exchange gradients, and what that cost.

This is the only room that calls collectives.
"""

from dat.comm.exchange import Exchange
from dat.comm.ledger import Ledger, Traffic
from dat.comm.world import WorkerError, World

__all__ = ["Exchange", "Ledger", "Traffic", "WorkerError", "World"]
