"""A trained model for the rest of the world: a folder for model hubs, ONNX, TorchScript, .pt2.

To add a format: a writer and a reader in `formats.py`, and a line in its FORMATS.
"""

from dat.export.formats import FORMATS
from dat.export.job import export_run
from dat.export.loading import load

__all__ = ["FORMATS", "export_run", "load"]
