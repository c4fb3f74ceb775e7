"""What an evaluation has found so far, on disk, so that an interrupted one goes on where it was.

A folder with `about.json`, which says what is evaluated and how, and one small file for every batch
that was finished. Each is written beside its place and renamed, so there are only whole ones. As no
verdict depends on the workers or the batch, both may be others when it goes on.
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

from dat.comm import World
from dat.data import ImageData, chunks
from dat.files import partial, write_whole

ABOUT = "about.json"
VERDICTS = "verdicts.json"
FIGURES = "figures.json"


class Cost(NamedTuple):
    """What attacks took."""

    seconds: float = 0.0
    """Added up over the workers."""
    forwards: int = 0
    """Samples that went through the network."""
    backwards: int = 0


class Part(NamedTuple):
    """A batch after a round."""

    round: int
    rows: Tensor
    fell: Tensor
    cost: Cost
    examples: Tensor | None = None
    """Of those that fell."""


class Kept(NamedTuple):
    """A file of a notebook."""

    path: Path
    tensors: dict[str, Tensor]
    notes: dict[str, str]


class Notebook:
    """A folder that fills up while an evaluation runs."""

    def __init__(self, folder: Path, about: dict[str, Any]) -> None:
        self.folder, self.about = folder, about

    def open(self) -> None:
        """Begin, or find what was begun; for one worker to call before the others go on."""
        path = self.folder / ABOUT
        text = json.dumps(self.about, indent=2) + "\n"
        if not path.exists():
            leftover = partial(path)  # of one that was interrupted at once
            if self.folder.exists() and any(it != leftover for it in self.folder.iterdir()):
                raise ValueError(f"{self.folder} is in use, and not by an evaluation")
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(path, text.encode())
            return
        try:
            before = dict(json.loads(path.read_text()))
        except (TypeError, ValueError):
            raise ValueError(f"{path}: not whole; remove {self.folder} to begin anew") from None
        now = json.loads(text)
        differs = sorted(key for key in {*before, *now} if before.get(key) != now.get(key))
        if differs:
            raise ValueError(
                f"{self.folder} holds another evaluation (differs in {', '.join(differs)}): "
                "choose another folder, or remove it"
            )

    def listing(self) -> str:
        """What is there, in short: workers that share the folder see the same."""
        names = sorted(path.name for path in self.folder.glob("*.safetensors"))
        names += [ABOUT] * (self.folder / ABOUT).exists()
        return hashlib.blake2b("/".join(names).encode(), digest_size=7).hexdigest()

    def shared(self, world: World) -> None:
        """Open it for all workers, which must all see the same folder."""
        world.together(lambda: self.open() if world.first else None)
        seen = world.gather(torch.tensor(int(self.listing(), 16)))
        if (seen != seen[0]).any():
            raise ValueError(
                f"{self.folder}: not the same for all workers; choose a folder that they share"
            )

    def keep(self, kind: str, tensors: dict[str, Tensor], notes: dict[str, str]) -> None:
        """One more file, whole from the start."""
        name = f"{kind}-{uuid.uuid4().hex}.safetensors"
        write_whole(self.folder / name, save(tensors, notes))

    def kept(self) -> Iterator[Kept]:
        """What is there, kind by kind."""
        for path in sorted(self.folder.glob("*.safetensors")):
            with telling(path), safe_open(path, framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                kept = Kept(path, tensors, file.metadata() or {})
            yield kept


@contextmanager
def telling(path: Path) -> Iterator[None]:
    """Whatever is wrong inside is wrong with that file."""
    try:
        yield
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: not a part of an evaluation ({error})") from None


class Journal(Notebook):
    """The rounds of a suite of attacks, batch by batch."""

    def write(self, part: Part) -> None:
        tensors = {"rows": part.rows, "fell": part.fell.to(torch.uint8)}
        if part.examples is not None:
            tensors["examples"] = part.examples
        cost = {name: repr(value) for name, value in part.cost._asdict().items()}
        self.keep(f"{part.round:03d}", tensors, cost)

    def conclude(self, fell: dict[str, list[int]], figures: dict[str, float]) -> None:
        """Leave the verdicts in a form that people can read: which images fell to what, and what
        that comes to."""
        write_whole(self.folder / VERDICTS, (json.dumps(fell) + "\n").encode())
        write_whole(self.folder / FIGURES, (json.dumps(figures) + "\n").encode())

    def read(self) -> Iterator[Part]:
        """What is there, round by round."""
        for path, tensors, said in self.kept():
            with telling(path):
                part = Part(
                    round=int(path.name.partition("-")[0]),
                    rows=tensors["rows"],
                    fell=tensors["fell"].bool(),
                    cost=Cost(
                        float(said["seconds"]), int(said["forwards"]), int(said["backwards"])
                    ),
                    examples=tensors.get("examples"),
                )
            yield part


def fingerprint(model: nn.Module, data: ImageData, answers: Tensor) -> dict[str, str]:
    """What tells one evaluation's subject from another's: the weights, the images, and what the
    model makes of some of them, as its code is in no state dict. Of the logits only the class
    counts, which no rounding moves."""
    classes = answers.argmax(1).tolist()
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
    """What tells a model's weights from others."""
    weights = hashlib.blake2b(digest_size=16)
    for name, value in model.state_dict().items():
        if isinstance(value, Tensor):
            weights.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
            weights.update(_bytes(value))
    return weights.hexdigest()


def _bytes(value: Tensor) -> memoryview:
    plain = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return memoryview(plain.numpy())  # type: ignore[arg-type]
