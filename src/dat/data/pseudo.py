"""Pseudo-labels: a file that says what a model took images without labels for."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dat.data.images import ImageData
from dat.data.stored import chunks
from dat.files import write_whole

ARRAYS = ("labels", "confidences", "images")


class PseudoLabels(NamedTuple):
    """One for each image, in order."""

    labels: Tensor
    confidences: Tensor
    """The model's probability of the label."""

    def save(self, path: Path, data: ImageData) -> None:
        """An .npz file that knows which images it is about."""
        held = io.BytesIO()
        np.savez(
            held,
            labels=self.labels.numpy(),
            confidences=self.confidences.numpy(),
            images=np.frombuffer(_digest(data), dtype=np.uint8),
        )
        write_whole(path, held.getvalue())

    @classmethod
    def read(cls, path: Path, data: ImageData) -> PseudoLabels:
        """Those of these images; a file about others is refused."""
        where = f"data.pseudo_labels = {path}"
        if not path.is_file():
            raise ValueError(f"{where}: no such file; make it with dat label")
        try:
            with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
                labels, confidences, images = (np.ascontiguousarray(file[it]) for it in ARRAYS)
                found = cls(
                    torch.from_numpy(labels.astype(np.int64)),
                    torch.from_numpy(confidences.astype(np.float32)),
                )
        except Exception as error:  # whatever a broken zip or an odd array makes numpy raise
            raise ValueError(f"{where}: not a file of dat label ({error})") from None
        if len(found.labels) != len(data) or images.tobytes() != _digest(data):
            raise ValueError(f"{where}: labels other images; make it anew with dat label")
        return found

    def applied(self, data: ImageData, confidence: float = 0.0) -> ImageData:
        """The images with these labels, without those that the model was less sure of."""
        sure = (self.confidences >= confidence).nonzero().squeeze(1)
        if len(sure) == 0:
            most = float(self.confidences.max())
            raise ValueError(
                f"data.confidence = {confidence:g}: leaves no image; the highest is {most:.3g}"
            )
        return data.take(sure).labelled(self.labels[sure])


def _digest(data: ImageData) -> bytes:
    images = data.images
    digest = hashlib.blake2b(f"{tuple(images.shape)} {images.dtype}".encode(), digest_size=16)
    for chunk in chunks(images):
        digest.update(memoryview(chunk.reshape(-1).view(torch.uint8).numpy()))  # type: ignore[arg-type]
    return digest.digest()
