"""A bundle's file: safetensors, of which the last 32 bytes are the SHA-256 of all bytes before."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from dat.core.files import atomic_write

CLAIM = "claim"
DIGEST = "sha256"
"""The last tensor in the file: safetensors sorts by dtype, then by name."""
PLACEHOLDER = b"SHA-256 of all preceding bytes.."
DIGEST_BYTES = 32
MAX_BYTES = 2**32
"""The largest file that is read."""


class Contents(NamedTuple):
    """What a file contains."""

    claim: dict[str, Any]
    tensors: dict[str, Tensor]
    digest: str
    """SHA-256 of the file, as sha256sum prints it."""


def pack(claim: dict[str, Any], tensors: dict[str, Tensor]) -> bytes:
    """The bytes of a file with this claim and these tensors."""
    text = json.dumps(claim, indent=1, sort_keys=True).encode()
    placed = {**tensors, CLAIM: as_tensor(text), DIGEST: as_tensor(PLACEHOLDER)}
    data = save(placed)
    assert data.endswith(PLACEHOLDER)
    data = data[:-DIGEST_BYTES]
    return data + hashlib.sha256(data).digest()


def write(path: Path, claim: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Write a file, atomically."""
    atomic_write(path, pack(claim, tensors))


def read(path: Path) -> Contents:
    """Read a file after checking its SHA-256; nothing in it is executed."""
    if not path.is_file():
        raise ValueError(f"{path}: no such bundle")
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise ValueError(f"{path}: {size / 2**30:.1f} GiB is more than a bundle can have")
    data = path.read_bytes()
    body, digest = data[:-DIGEST_BYTES], data[-DIGEST_BYTES:]
    if hashlib.sha256(body).digest() != digest:
        raise ValueError(
            f"{path}: damaged, or not an evidence bundle (it does not end with the SHA-256 of its "
            "content)"
        )
    try:
        tensors = load(data)
        claim = json.loads(as_bytes(tensors.pop(CLAIM)))
        del tensors[DIGEST]
    except (SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not an evidence bundle ({_first_line(error)})") from None
    if not isinstance(claim, dict):
        raise ValueError(f"{path}: not an evidence bundle (the claim is no JSON object)")
    return Contents(claim, tensors, hashlib.sha256(data).hexdigest())


def as_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def as_bytes(data: Tensor) -> bytes:
    if data.dtype != torch.uint8:
        raise ValueError(f"{data.dtype} instead of bytes")
    return data.numpy().tobytes()


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]
