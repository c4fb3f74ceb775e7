"""Export a trained model: a folder for model hubs, ONNX, TorchScript, torch.export.

To add a format, add a writer and a reader to `formats.py`, and a line to its TRACED.
"""

from typing import TYPE_CHECKING

from dat.core.lazy import lazy_names
from dat.export.formats import FORMATS

if TYPE_CHECKING:
    from dat.export.folder import export_run
    from dat.export.loading import load
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        folder="export_run",
        loading="load",
    )

__all__ = ["FORMATS", "export_run", "load"]
