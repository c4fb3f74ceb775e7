"""Export formats: how each is written, and read back for verification."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dat.core.imports import require
from dat.core.lazy import torch
from dat.core.settings import did_you_mean
from dat.export.tracing import symbolic_len

if TYPE_CHECKING:
    from torch import Tensor, nn

Predictor = Callable[["Tensor"], "Tensor"]
"""Maps images in [0, 1] to logits."""
MAX_ONNX_BYTES = 2 * 10**9
"""Size limit of an ONNX file, which is a protobuf."""


@dataclass(frozen=True)
class Format:
    """How to write and read one file format."""

    file: str
    write: Callable[[nn.Module, Tensor, Path], None]
    read: Callable[[Path], Predictor]
    packages: tuple[str, ...] = ()
    """Required packages; the extra that installs them has the name of the format."""


def _onnx(model: nn.Module, x: Tensor, path: Path) -> None:
    weights = model.state_dict().values()
    size = sum(tensor.numel() * tensor.element_size() for tensor in weights)
    if size > MAX_ONNX_BYTES:
        limit = MAX_ONNX_BYTES / 1e9
        raise ValueError(f"{size / 1e9:.1f} GB of weights: must be at most {limit:g}")
    torch.onnx.export(
        model,
        (x,),
        path,
        dynamo=True,
        dynamic_shapes=({0: torch.export.Dim("batch")},),
        input_names=["images"],
        output_names=["logits"],
        external_data=False,
        verbose=False,
    )


def _read_onnx(path: Path) -> Predictor:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda x: torch.from_numpy(session.run(["logits"], {"images": x.numpy()})[0])


def _torchscript(model: nn.Module, x: Tensor, path: Path) -> None:
    torch.jit.save(torch.jit.trace(model, x, check_trace=False), path)


def _read_torchscript(path: Path) -> Predictor:
    return torch.jit.load(path)  # type: ignore[no-any-return]


def _exported(model: nn.Module, x: Tensor, path: Path) -> None:
    shapes = ({0: torch.export.Dim("batch")},)
    torch.export.save(torch.export.export(model, (x,), dynamic_shapes=shapes), path)


def _read_exported(path: Path) -> Predictor:
    return torch.export.load(path).module()


HUB = "hub"
"""Weights and a description; dat is needed to load it."""
TRACED = {
    "onnx": Format("model.onnx", _onnx, _read_onnx, ("onnx", "onnxscript", "onnxruntime")),
    "torchscript": Format("model.torchscript", _torchscript, _read_torchscript),
    "exported": Format("model.pt2", _exported, _read_exported),
}
"""Formats that contain the computation, and load without dat."""
FORMATS = (HUB, *TRACED)


def check_formats(names: Sequence[str]) -> None:
    """Raise for an unknown format or a missing package, before any work is done."""
    if not names:
        raise ValueError(f"--format: name at least one of {', '.join(FORMATS)}")
    for name in names:
        if name not in FORMATS:
            raise ValueError(f"--format {name}: unknown{did_you_mean(name, FORMATS)}")
        for package in TRACED[name].packages if name in TRACED else ():
            require(package, name, what=f"--format {name}")


def write_traced(name: str, model: nn.Module, x: Tensor, folder: Path) -> Predictor:
    """Write the model in one of the TRACED formats, and return what is read back."""
    traced_format = TRACED[name]
    path = folder / traced_format.file
    try:
        with _without_warnings(), symbolic_len(model):
            traced_format.write(model, x, path)
            return traced_format.read(path)
    except Exception as error:  # exporters raise many types on networks that they cannot trace
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(f"--format {name}: cannot write this network ({lines[0]})") from error


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Suppress the exporters' warnings about future versions, and about torchvision, which is not
    needed; the result is verified anyway."""
    registry = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = registry.level
    registry.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            yield
    finally:
        registry.setLevel(level)
