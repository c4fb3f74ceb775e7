"""What a cluster will do: a model of a step's time, bytes and memory, and its constants."""

from dat.planning.calibration import calibrate
from dat.planning.cluster import Cluster, Link
from dat.planning.costs import Costs
from dat.planning.gradient import Gradient
from dat.planning.model import Compute, Prediction, predict

__all__ = ["Cluster", "Compute", "Costs", "Gradient", "Link", "Prediction", "calibrate", "predict"]
