"""Predictions for a cluster: a model of a step's time, bytes and memory, and its constants."""

from typing import TYPE_CHECKING

from dat.core.lazy import lazy_names
from dat.tools.planning.cluster import Cluster, NetworkLink

if TYPE_CHECKING:
    from dat.tools.planning.calibration import calibrate
    from dat.tools.planning.costs import Costs
    from dat.tools.planning.gradient import Gradient
    from dat.tools.planning.model import ComputeTimes, Prediction, predict
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        renamed={"Compute": "ComputeTimes", "Link": "NetworkLink"},
        calibration="calibrate",
        costs="Costs",
        gradient="Gradient",
        model="ComputeTimes Prediction predict",
    )

__all__ = [
    "Cluster",
    "ComputeTimes",
    "Costs",
    "Gradient",
    "NetworkLink",
    "Prediction",
    "calibrate",
    "predict",
]
