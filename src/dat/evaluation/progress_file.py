"""Progress of an evaluation on disk, so that an interrupted one can resume.

A folder with `about.json`, which describes the evaluation, and one small file per finished batch.
Files are written under a temporary name and renamed, so all of them are complete. As no result
depends on the number of workers or the batch size, both may change when the evaluation resumes.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from dat.core.files import atomic_write, partial
from dat.data import ImageData, chunks
from dat.distributed import World

ABOUT = "about.json"
VERDICTS = "verdicts.json"
FIGURES = "figures.json"


class Cost(NamedTuple):
    """The cost of attacks."""

    seconds: float = 0.0
    """Summed over the workers."""
    forwards: int = 0
    """Samples in forward passes."""
    backwards: int = 0


class EvaluationPart(NamedTuple):
    """The result of one batch in one round."""

    round: int
    rows: Tensor
    broken: Tensor
    """Which of the rows the attack broke."""
    cost: Cost
    examples: Tensor | None = None
    """Adversarial examples of the broken images."""


class StoredFile(NamedTuple):
    """A file in a progress store."""

    path: Path
    tensors: dict[str, Tensor]
    metadata: dict[str, str]


class ProgressStore:
    """A folder that an evaluation appends files to while it runs."""

    def __init__(self, folder: Path, about: dict[str, Any]) -> None:
        self.folder, self.about = folder, about

    def open(self) -> None:
        """Create the folder, or check that it belongs to the same evaluation; for one worker."""
        path = self.folder / ABOUT
        text = json.dumps(self.about, indent=2) + "\n"
        if not path.exists():
            leftover = partial(path)  # of an evaluation that was interrupted immediately
            if self.folder.exists() and any(file != leftover for file in self.folder.iterdir()):
                raise ValueError(f"{self.folder} exists and contains no evaluation")
            self.folder.mkdir(parents=True, exist_ok=True)
            atomic_write(path, text.encode())
            return
        try:
            before = dict(json.loads(path.read_text()))
        except (TypeError, ValueError):
            raise ValueError(f"{path}: not valid; remove {self.folder} to start over") from None
        now = json.loads(text)
        differs = sorted(key for key in {*before, *now} if before.get(key) != now.get(key))
        if differs:
            raise ValueError(
                f"{self.folder} contains another evaluation (differs in {', '.join(differs)}): "
                "choose another folder, or remove it"
            )

    def digest(self) -> str:
        """Hash of the file names, equal for all workers that share the folder."""
        names = sorted(path.name for path in self.folder.glob("*.safetensors"))
        names += [ABOUT] * (self.folder / ABOUT).exists()
        return hashlib.blake2b("/".join(names).encode(), digest_size=7).hexdigest()

    def open_shared(self, world: World) -> None:
        """Open it for all workers, which must share the folder."""
        world.run_or_fail_together(lambda: self.open() if world.first else None)
        digests = world.gather(torch.tensor(int(self.digest(), 16)))
        if (digests != digests[0]).any():
            raise ValueError(
                f"{self.folder}: differs between workers; choose a folder that they share"
            )

    def append(self, kind: str, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
        """Add a file, atomically."""
        name = f"{kind}-{uuid.uuid4().hex}.safetensors"
        atomic_write(self.folder / name, save(tensors, metadata))

    def files(self) -> Iterator[StoredFile]:
        """All files, sorted by kind."""
        for path in sorted(self.folder.glob("*.safetensors")):
            with errors_of(path), safe_open(path, framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                stored = StoredFile(path, tensors, file.metadata() or {})
            yield stored


@contextmanager
def errors_of(path: Path) -> Iterator[None]:
    """Attribute errors inside the block to that file."""
    try:
        yield
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: not a file of an evaluation ({error})") from None


class SuiteProgress(ProgressStore):
    """The finished batches of a suite of attacks, round by round."""

    def write(self, batch: EvaluationPart) -> None:
        tensors = {"rows": batch.rows, "fell": batch.broken.to(torch.uint8)}
        if batch.examples is not None:
            tensors["examples"] = batch.examples
        cost = {name: repr(value) for name, value in batch.cost._asdict().items()}
        self.append(f"{batch.round:03d}", tensors, cost)

    def conclude(self, broken: dict[str, list[int]], figures: dict[str, float]) -> None:
        """Write the final results as JSON: which attack broke which images, and TA and RA."""
        atomic_write(self.folder / VERDICTS, (json.dumps(broken) + "\n").encode())
        atomic_write(self.folder / FIGURES, (json.dumps(figures) + "\n").encode())

    def read(self) -> Iterator[EvaluationPart]:
        """The finished batches, round by round."""
        for path, tensors, metadata in self.files():
            with errors_of(path):
                batch = EvaluationPart(
                    round=int(path.name.partition("-")[0]),
                    rows=tensors["rows"],
                    broken=tensors["fell"].bool(),
                    cost=Cost(
                        float(metadata["seconds"]),
                        int(metadata["forwards"]),
                        int(metadata["backwards"]),
                    ),
                    examples=tensors.get("examples"),
                )
            yield batch


def fingerprint(model: nn.Module, data: ImageData, logits: Tensor) -> dict[str, str]:
    """Hashes of the weights, of the images, and of the predicted classes of some images.

    The predictions stand for the model's code, which is in no state dict; unlike logits, they do
    not change with rounding.
    """
    classes = logits.argmax(1).tolist()
    images = hashlib.blake2b(digest_size=16)
    for value in (data.images, data.labels):
        images.update(f"{tuple(value.shape)} {value.dtype}".encode())
        for chunk in chunks(value):
            images.update(_bytes(chunk))
    return {
        "weights": weights_of(model),
        "images": images.hexdigest(),
        "answers": hashlib.blake2b(bytes(str(classes), "ascii"), digest_size=16).hexdigest(),
    }


def weights_of(model: nn.Module) -> str:
    """Hash of a model's weights."""
    weights = hashlib.blake2b(digest_size=16)
    for name, value in model.state_dict().items():
        if isinstance(value, Tensor):
            weights.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
            weights.update(_bytes(value))
    return weights.hexdigest()


def _bytes(value: Tensor) -> memoryview:
    raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return memoryview(raw.numpy())  # type: ignore[arg-type]
