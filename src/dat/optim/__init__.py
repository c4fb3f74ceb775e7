"""Outer minimisation oracles: step 12 of Algorithm A1, how the exchanged gradient moves theta.

An oracle (`LAMB`, `LARS`, `SGD`, `LSGD`) is a frozen group of settings; called with a model it
makes a `torch.optim.Optimizer`. `LALR` is the paper's layer-wise adaptive learning rate, eq. (3),
once, over a direction of choice. A schedule gives the factor on the peak rate, `EMA` averages the
weights. To add one: a file here, a line below.
"""

from dat.optim.averaging import EMA
from dat.optim.base import OuterOracle, scale_rates
from dat.optim.directions import AdamDirection, Direction, MomentumDirection
from dat.optim.lalr import LALR, Layerwise
from dat.optim.lamb import LAMB
from dat.optim.lars import LARS, ClassicLARS
from dat.optim.schedules import Constant, Cosine, Cyclic, Piecewise, Schedule, set_rate
from dat.optim.sgd import LSGD, SGD

OPTIMIZERS: dict[str, type[OuterOracle]] = {
    "lamb": LAMB,
    "lars": LARS,
    "sgd": SGD,
    "lsgd": LSGD,
}

SCHEDULES: dict[str, type[Schedule]] = {
    "piecewise": Piecewise,
    "cosine": Cosine,
    "cyclic": Cyclic,
    "constant": Constant,
}

__all__ = [
    "EMA",
    "LALR",
    "LAMB",
    "LARS",
    "LSGD",
    "OPTIMIZERS",
    "SCHEDULES",
    "SGD",
    "AdamDirection",
    "ClassicLARS",
    "Constant",
    "Cosine",
    "Cyclic",
    "Direction",
    "Layerwise",
    "MomentumDirection",
    "OuterOracle",
    "Piecewise",
    "Schedule",
    "scale_rates",
    "set_rate",
]
