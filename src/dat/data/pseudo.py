"""Pseudo-labels: a file with a model's predictions for unlabelled images."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dat.core.files import atomic_write
from dat.core.short_repr import short_repr
from dat.data.images import ImageData
from dat.data.lazy_images import chunks

ARRAYS = ("labels", "confidences", "images")


class PseudoLabels(NamedTuple):
    """One label per image, in order."""

    labels: Tensor
    confidences: Tensor
    """The model's probability of the label."""

    def __repr__(self) -> str:
        return short_repr(self)

    def save(self, path: Path, data: ImageData) -> None:
        """Write an .npz file that identifies the images it labels."""
        buffer = io.BytesIO()
        np.savez(
            buffer,
            labels=self.labels.numpy(),
            confidences=self.confidences.numpy(),
            images=np.frombuffer(_digest(data), dtype=np.uint8),
        )
        atomic_write(path, buffer.getvalue())

    @classmethod
    def read(cls, path: Path, data: ImageData) -> PseudoLabels:
        """Read the labels of these images; a file for other images is an error."""
        setting = f"data.pseudo_labels = {path}"
        if not path.is_file():
            raise ValueError(f"{setting}: no such file; create it with dat label")
        try:
            with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
                labels, confidences, images = (np.ascontiguousarray(file[name]) for name in ARRAYS)
                pseudo = cls(
                    torch.from_numpy(labels.astype(np.int64)),
                    torch.from_numpy(confidences.astype(np.float32)),
                )
        except Exception as error:  # numpy raises many types on broken files
            raise ValueError(f"{setting}: not a file written by dat label ({error})") from None
        if len(pseudo.labels) != len(data) or images.tobytes() != _digest(data):
            raise ValueError(f"{setting}: is for other images; create it again with dat label")
        return pseudo

    def applied(self, data: ImageData, confidence: float = 0.0) -> ImageData:
        """The images with these labels, without those of lower confidence."""
        confident = (self.confidences >= confidence).nonzero().squeeze(1)
        if len(confident) == 0:
            highest = float(self.confidences.max())
            raise ValueError(
                f"data.confidence = {confidence:g}: leaves no images; the highest confidence is "
                f"{highest:.3g}"
            )
        return data.take(confident).labelled(self.labels[confident])


def _digest(data: ImageData) -> bytes:
    images = data.images
    digest = hashlib.blake2b(f"{tuple(images.shape)} {images.dtype}".encode(), digest_size=16)
    for chunk in chunks(images):
        digest.update(memoryview(chunk.reshape(-1).view(torch.uint8).numpy()))  # type: ignore[arg-type]
    return digest.digest()
