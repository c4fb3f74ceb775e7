"""Weights on disk: safetensors, written atomically, read without executing code."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from dat.core.files import atomic_write

PICKLED = (".pt", ".pth", ".ckpt", ".tar", ".bin")
INSIDE = ("state_dict", "model_state_dict", "model", "net")
"""Keys under which other projects' checkpoints hold their weights."""
WRAPPED = ("module.", "_orig_mod.")
"""Prefixes that wrappers add to every name: nn.DataParallel, DDP, torch.compile."""


def save_weights(model: nn.Module, path: Path) -> None:
    """Save a model's state dict as safetensors. The file is replaced atomically."""
    # a tensor that two modules share is saved under each of its names
    state = {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}
    atomic_write(path, save({name: value.contiguous() for name, value in state.items()}))


def load_weights(model: nn.Module, path: Path) -> None:
    """Load weights into a model, from a safetensors file or one written by torch.save."""
    fill(model, read_weights(path), path)


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read a state dict, from a safetensors file or one written by torch.save."""
    if not path.is_file():
        raise ValueError(f"{path}: no such weights")
    state = (
        _inner_state(_read_pickle(path), path)
        if path.suffix in PICKLED
        else _read_safetensors(path)
    )
    wrapped = all(name.startswith(WRAPPED) for name in state)
    return {_bare(name): value for name, value in state.items()} if wrapped else state


def fill(model: nn.Module, state: dict[str, Tensor], path: Path) -> None:
    """Load a state dict that was read from `path` into a model."""
    try:
        model.load_state_dict(_renamed(state, model.state_dict().keys()))
    except RuntimeError as error:
        first = str(error).splitlines()[1:2] or [str(error)]
        raise ValueError(f"{path}: does not fit the model ({first[0].strip()})") from None


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return load(path.read_bytes())
    except SafetensorError as error:
        raise ValueError(f"{path}: not a valid safetensors file ({error})") from None


def _read_pickle(path: Path) -> object:
    """Tensors and plain containers only: torch refuses to execute anything else."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # an old or damaged archive can fail in any way
        if "Unsupported global" in str(error):
            raise ValueError(
                f"{path}: not plain weights but other objects (a whole model?), which could "
                "execute code when they are read; save model.state_dict() instead"
            ) from None
        first = str(error).strip().splitlines()[:1] or [type(error).__name__]
        raise ValueError(f"{path}: not plain weights ({first[0]})") from None


def _inner_state(saved: object, path: Path) -> dict[str, Tensor]:
    """The state dict inside a checkpoint, however deeply nested."""
    while isinstance(saved, Mapping):
        inner = next((saved[key] for key in INSIDE if isinstance(saved.get(key), Mapping)), None)
        if inner is None:
            break
        saved = inner
    if not isinstance(saved, Mapping) or not all(isinstance(v, Tensor) for v in saved.values()):
        raise ValueError(f"{path}: contains no state dict; save model.state_dict()")
    return {str(key): value for key, value in saved.items()}


def _renamed(state: dict[str, Tensor], wanted: Collection[str]) -> dict[str, Tensor]:
    """A state dict with the names of the model, whichever of the two is wrapped."""
    if state.keys() == set(wanted):
        return state
    bare = {_bare(name): value for name, value in state.items()}
    names = {_bare(name): name for name in wanted}
    if len(bare) < len(state) or len(names) < len(wanted):  # a submodule has the wrapper's name
        return state
    return {names.get(name, name): value for name, value in bare.items()}


def _bare(name: str) -> str:
    while name.startswith(WRAPPED):
        name = name.partition(".")[2]
    return name
