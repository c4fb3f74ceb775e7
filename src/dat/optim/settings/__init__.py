"""The settings of optimizers, which need no torch; called with a model, they return an optimizer.

To add an optimizer: a file here, and a line in `OPTIMIZERS` (`optim/__init__.py`).
"""

from dat.optim.settings.adamw import AdamW
from dat.optim.settings.lamb import LAMBSettings
from dat.optim.settings.lars import LARSSettings
from dat.optim.settings.muon import MuonSettings
from dat.optim.settings.sgd import LSGD, SGD

__all__ = ["LSGD", "SGD", "AdamW", "LAMBSettings", "LARSSettings", "MuonSettings"]
