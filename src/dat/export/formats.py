"""The formats: how each is written, and how it is read back to see that it says the same."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from dat.fields import did_you_mean
from dat.imports import require

Answer = Callable[[Tensor], Tensor]
"""Images in [0, 1] to logits."""
LARGEST = 2 * 10**9
"""Bytes that fit into one file of ONNX, which is a protobuf."""


@dataclass(frozen=True)
class Format:
    """A file of a kind."""

    file: str
    write: Callable[[nn.Module, Tensor, Path], None]
    read: Callable[[Path], Answer]
    packages: tuple[str, ...] = ()
    """What has to be installed; the format's name is that of the extra."""


def _onnx(model: nn.Module, x: Tensor, path: Path) -> None:
    size = sum(it.numel() * it.element_size() for it in model.state_dict().values())
    if size > LARGEST:
        raise ValueError(f"{size / 1e9:.1f} GB of weights: must be at most {LARGEST / 1e9:g}")
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


def _read_onnx(path: Path) -> Answer:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda x: torch.from_numpy(session.run(["logits"], {"images": x.numpy()})[0])


def _torchscript(model: nn.Module, x: Tensor, path: Path) -> None:
    torch.jit.save(torch.jit.trace(model, x, check_trace=False), path)


def _read_torchscript(path: Path) -> Answer:
    return torch.jit.load(path)  # type: ignore[no-any-return]


def _exported(model: nn.Module, x: Tensor, path: Path) -> None:
    shapes = ({0: torch.export.Dim("batch")},)
    torch.export.save(torch.export.export(model, (x,), dynamic_shapes=shapes), path)


def _read_exported(path: Path) -> Answer:
    return torch.export.load(path).module()


HUB = "hub"
"""Weights and a description; needs dat to be read."""
TRACED = {
    "onnx": Format("model.onnx", _onnx, _read_onnx, ("onnx", "onnxscript", "onnxruntime")),
    "torchscript": Format("model.torchscript", _torchscript, _read_torchscript),
    "exported": Format("model.pt2", _exported, _read_exported),
}
"""Formats that hold the computation itself, and are read without dat."""
FORMATS = (HUB, *TRACED)


def check_formats(names: Sequence[str]) -> None:
    """Refuse what there is not, or what lacks a package, before the work."""
    if not names:
        raise ValueError(f"--format: name at least one of {', '.join(FORMATS)}")
    for name in names:
        if name not in FORMATS:
            raise ValueError(f"--format {name}: unknown{did_you_mean(name, FORMATS)}")
        for package in TRACED[name].packages if name in TRACED else ():
            require(package, name, what=f"--format {name}")


def write_traced(name: str, model: nn.Module, x: Tensor, folder: Path) -> Answer:
    """Write the model as one of TRACED; gives what was read back."""
    form = TRACED[name]
    path = folder / form.file
    try:
        with _undisturbed():
            form.write(model, x, path)
            return form.read(path)
    except Exception as error:  # exporters fail in many ways on networks that they cannot follow
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(f"--format {name}: cannot write this network ({lines[0]})") from error


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Exporters warn of what they will do in later versions; what counts is checked afterwards."""
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        yield
