"""Optimizers: the outer minimisation, step 12 of Algorithm A1, which applies the averaged gradient.

`LAMB`, `LARS`, `SGD` and `LSGD` are frozen settings; called with a model, they return a
`torch.optim.Optimizer`. `LALR` is the paper's layer-wise adaptive learning rate, eq. (3), over any
base direction. A schedule returns the factor on the peak learning rate, `EMA` averages the weights.
To add one: a file here, a line below.
"""

from typing import TYPE_CHECKING

from dat.core.lazy import lazy_names
from dat.optim.averaging import EMA
from dat.optim.base import OptimizerSettings, scale_rates
from dat.optim.directions import AdamDirection, Direction, MomentumDirection
from dat.optim.lamb import LAMB
from dat.optim.lars import LARS
from dat.optim.schedules import Constant, Cosine, Cyclic, OneCycle, Piecewise, Schedule, set_rate
from dat.optim.sgd import LSGD, SGD

if TYPE_CHECKING:
    from dat.optim.classic_lars import ClassicLARS
    from dat.optim.lalr import LALR, Layerwise
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        renamed={"OuterOracle": "OptimizerSettings"},
        classic_lars="ClassicLARS",
        lalr="LALR Layerwise",
    )

OPTIMIZERS: dict[str, type[OptimizerSettings]] = {
    "lamb": LAMB,
    "lars": LARS,
    "sgd": SGD,
    "lsgd": LSGD,
}

SCHEDULES: dict[str, type[Schedule]] = {
    "piecewise": Piecewise,
    "cosine": Cosine,
    "cyclic": Cyclic,
    "one-cycle": OneCycle,
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
    "OneCycle",
    "OptimizerSettings",
    "Piecewise",
    "Schedule",
    "scale_rates",
    "set_rate",
]
