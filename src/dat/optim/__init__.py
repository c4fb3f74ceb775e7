"""Optimizers: the outer minimization, step 12 of Algorithm A1, which applies the averaged gradient.

`LALR` is the paper's layer-wise adaptive learning rate, eq. (3), over any base direction; `LAMB`
and `LARS` are LALR over Adam and momentum. They and `Muon` are `torch.optim.Optimizer`s; without
parameters, they are frozen settings, as are `SGD`, `LSGD` and `AdamW`. Called with a model,
settings return its optimizer. A schedule returns the factor on the peak learning rate, `EMA`
averages the weights. To add one: a file here or in `settings`, a line below.
"""

from typing import TYPE_CHECKING

from dat.core.lazy import lazy_names
from dat.optim.averaging import EMA
from dat.optim.base import OptimizerSettings, scale_rates
from dat.optim.directions import AdamDirection, Direction, MomentumDirection, MuonDirection
from dat.optim.schedules import Constant, Cosine, Cyclic, OneCycle, Piecewise, Schedule, set_rate
from dat.optim.settings import LSGD, SGD, AdamW, LAMBSettings, LARSSettings, MuonSettings

if TYPE_CHECKING:
    from dat.optim.classic_lars import ClassicLARS
    from dat.optim.lalr import LALR, Layerwise
    from dat.optim.lamb import LAMB
    from dat.optim.lars import LARS
    from dat.optim.muon import Muon
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        renamed={"OuterOracle": "OptimizerSettings"},
        classic_lars="ClassicLARS",
        lalr="LALR Layerwise",
        lamb="LAMB",
        lars="LARS",
        muon="Muon",
    )

OPTIMIZERS: dict[str, type[OptimizerSettings]] = {
    "lamb": LAMBSettings,
    "lars": LARSSettings,
    "sgd": SGD,
    "lsgd": LSGD,
    "adamw": AdamW,
    "muon": MuonSettings,
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
    "AdamW",
    "ClassicLARS",
    "Constant",
    "Cosine",
    "Cyclic",
    "Direction",
    "LAMBSettings",
    "LARSSettings",
    "Layerwise",
    "MomentumDirection",
    "Muon",
    "MuonDirection",
    "MuonSettings",
    "OneCycle",
    "OptimizerSettings",
    "Piecewise",
    "Schedule",
    "scale_rates",
    "set_rate",
]
