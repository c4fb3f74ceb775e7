"""Weights on disk: safetensors, written whole or not at all, read without executing anything."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from dat.files import write_whole

PICKLED = (".pt", ".pth", ".ckpt", ".tar", ".bin")
INSIDE = ("state_dict", "model_state_dict", "model", "net")
"""Where checkpoints of others keep their weights."""


def save_weights(model: nn.Module, path: Path) -> None:
    """A reader sees the old weights or the new, whole."""
    # a tensor that two modules share is written under each of its names
    state = {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}
    write_whole(path, save({name: value.contiguous() for name, value in state.items()}))


def load_weights(model: nn.Module, path: Path) -> None:
    """Fill a model of the same shape, from safetensors or from what torch.save wrote."""
    fill(model, read_weights(path), path)


def read_weights(path: Path) -> dict[str, Tensor]:
    """A state dict, from safetensors or from what torch.save wrote."""
    if not path.is_file():
        raise ValueError(f"{path}: no such weights")
    return _unwrapped(_pickled(path), path) if path.suffix in PICKLED else _plain(path)


def fill(model: nn.Module, state: dict[str, Tensor], path: Path) -> None:
    """Fill a model with the weights that were read from `path`."""
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        first = str(error).splitlines()[1:2] or [str(error)]
        raise ValueError(f"{path}: does not fit the model ({first[0].strip()})") from None


def _plain(path: Path) -> dict[str, Tensor]:
    try:
        return load(path.read_bytes())
    except SafetensorError as error:
        raise ValueError(f"{path}: not a whole safetensors file ({error})") from None


def _pickled(path: Path) -> object:
    """Tensors and plain containers only: torch refuses to execute anything else."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # an old or a broken archive fails in many ways
        first = str(error).strip().splitlines()[:1] or [type(error).__name__]
        raise ValueError(f"{path}: not plain weights ({first[0]})") from None


def _unwrapped(saved: object, path: Path) -> dict[str, Tensor]:
    """Others keep weights in a checkpoint, and those of a wrapped model under another name."""
    while isinstance(saved, Mapping):
        inner = next((saved[key] for key in INSIDE if isinstance(saved.get(key), Mapping)), None)
        if inner is None:
            break
        saved = inner
    if not isinstance(saved, Mapping) or not all(isinstance(v, Tensor) for v in saved.values()):
        raise ValueError(f"{path}: holds no state dict; save model.state_dict()")
    return {str(key).removeprefix("module."): value for key, value in saved.items()}
