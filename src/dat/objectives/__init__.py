"""Objectives: lambda * clean loss + max over the ball of phi, equation (2) of the paper.

An objective defines what the attack maximizes (`phi`) and what the optimizer minimizes (`loss`). To
add one: a file here, a line below.
"""

from dat.core.deprecation import renamed_names
from dat.objectives.adversarial import Adversarial
from dat.objectives.base import Batch, Objective, Outcome, SubgroupLike
from dat.objectives.gradalign import GradAlign
from dat.objectives.mart import MART
from dat.objectives.pairing import LogitPairing
from dat.objectives.smooth import Noisy, Smooth
from dat.objectives.stability import Stability
from dat.objectives.trades import TRADES

OBJECTIVES: dict[str, type[Objective]] = {
    "at": Adversarial,
    "trades": TRADES,
    "mart": MART,
    "alp": LogitPairing,
    "gradalign": GradAlign,
    "smooth": Smooth,
    "stability": Stability,
}

__all__ = [
    "MART",
    "OBJECTIVES",
    "TRADES",
    "Adversarial",
    "Batch",
    "GradAlign",
    "LogitPairing",
    "Noisy",
    "Objective",
    "Outcome",
    "Smooth",
    "Stability",
    "SubgroupLike",
]

__getattr__ = renamed_names(__name__, Team="SubgroupLike")
