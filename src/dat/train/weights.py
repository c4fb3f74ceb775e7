"""Weights on disk: safetensors, written whole or not at all, read without executing anything."""

from __future__ import annotations

import os
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import nn


def save_weights(model: nn.Module, path: Path) -> None:
    """Write to a file beside it, then rename: a reader sees the old weights or the new, whole."""
    # a tensor that two modules share is written under each of its names
    state = {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        file.write(save({name: value.contiguous() for name, value in state.items()}))
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def load_weights(model: nn.Module, path: Path) -> None:
    """Fill a model of the same shape."""
    if not path.is_file():
        raise ValueError(f"{path}: no such weights")
    try:
        state = load(path.read_bytes())
        model.load_state_dict(state)
    except SafetensorError as error:
        raise ValueError(f"{path}: not a whole safetensors file ({error})") from None
    except RuntimeError as error:
        first = str(error).splitlines()[1:2] or [str(error)]
        raise ValueError(f"{path}: does not fit the model ({first[0].strip()})") from None
