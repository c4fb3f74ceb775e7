"""Evidence bundles: what a claimed accuracy consists of, in one file that anybody can check."""

from __future__ import annotations

import hashlib
import importlib
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dat.attacks.suites import Suite
from dat.data import ImageData
from dat.evaluation.bundle import coding, container
from dat.evaluation.bundle.claim import Claim, SuiteClaim
from dat.evaluation.runner import Runner, SuiteResult

CPU = torch.device("cpu")
HASHED = 512
"""Images that are read at a time."""


@dataclass(frozen=True)
class Bundle:
    """The content of a bundle."""

    claim: Claim
    indices: Tensor
    """Of the images in the full test set, ascending."""
    images: Tensor
    """SHA-256 of each image and its label, 32 bytes per row."""
    correct: Tensor
    """Which images are classified correctly without an attack."""
    broken_by: tuple[Tensor, ...]
    """For each suite and image, as in `SuiteResult`."""
    coded: tuple[Tensor, ...]
    """For each suite, the compressed adversarial examples of the broken images."""
    digest: str = ""
    """SHA-256 of the file, as sha256sum prints it."""

    def write(self, path: Path) -> None:
        tensors = {
            "indices": self.indices,
            "images": self.images,
            "correct": self.correct.to(torch.uint8),
        }
        for number, (broken_by, coded) in enumerate(zip(self.broken_by, self.coded, strict=True)):
            tensors[f"broken_by.{number}"] = broken_by.to(torch.int16)
            tensors[f"coded.{number}"] = coded
        container.write(path, self.claim.dump(), tensors)

    @classmethod
    def read(cls, path: Path) -> Bundle:
        """Read a file that may come from anybody; raises a `ValueError` if it is not a bundle."""
        contents = container.read(path)
        try:
            claim = Claim.read(contents.claim)
            return cls._of(claim, contents.tensors, contents.digest)
        except ValueError as error:
            raise ValueError(f"{path}: not a valid evidence bundle ({error})") from None

    @classmethod
    def _of(cls, claim: Claim, tensors: dict[str, Tensor], digest: str) -> Bundle:
        def take(name: str, dtype: torch.dtype, *shape: int) -> Tensor:
            tensor = tensors.pop(name, None)
            if tensor is None or tensor.dtype != dtype or (shape and tensor.shape != shape):
                raise ValueError(f"{name}: missing, or of another type or size")
            return tensor

        n = claim.images
        if n == 0 or len(claim.shape) != 3:
            raise ValueError("no images")
        bundle = cls(
            claim,
            indices=take("indices", torch.int64, n),
            images=take("images", torch.uint8, n, container.DIGEST_BYTES),
            correct=take("correct", torch.uint8, n).bool(),
            broken_by=tuple(
                take(f"broken_by.{i}", torch.int16, n).long() for i in range(len(claim.suites))
            ),
            coded=tuple(take(f"coded.{i}", torch.uint8) for i in range(len(claim.suites))),
            digest=digest,
        )
        if tensors:
            raise ValueError(f"{min(tensors)[:50]!r} is not part of a bundle")
        if bundle.indices[0] < 0 or not (bundle.indices.diff() > 0).all():
            raise ValueError("the indices of the images do not ascend")
        for suite, broken_by in zip(claim.suites, bundle.broken_by, strict=True):
            if not -1 <= int(broken_by.min()) <= int(broken_by.max()) <= len(suite.attacks):
                raise ValueError(f"{suite.name}: images broken by an attack that it does not have")
        return bundle

    def images_of(self, data: ImageData) -> ImageData:
        """The images of the bundle, from a dataset that contains them."""
        numbers = data.number(torch.arange(len(data)))
        rows = torch.searchsorted(numbers, self.indices).clamp_max(len(data) - 1)
        missing = int((numbers[rows] != self.indices).sum())
        if missing:
            raise ValueError(
                f"{missing} of {len(rows)} are not in the dataset, which has {len(data)}"
            )
        return data.take(rows)

    def examples(self, number: int, data: ImageData) -> Iterator[tuple[Tensor, Tensor]]:
        """The adversarial examples of a suite, chunk by chunk: rows of `data`, which has the
        bundle's images, and an example for each."""
        chunks = list(coding.chunks(broken_rows(self.broken_by[number]), _pixels(data)))
        images = (data.batch(rows, CPU)[0] for rows in chunks)
        decoded = coding.decode(
            container.as_bytes(self.coded[number]), images, self.claim.threat.eps
        )
        return zip(chunks, decoded, strict=True)


def check_path(path: Path) -> None:
    """Raise before a long evaluation if the bundle could not be written."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ValueError(f"{path}: not a file in an existing folder")


def make_bundle(
    runner: Runner,
    model: nn.Module,
    correct: Tensor,
    suites: Sequence[Suite],
    by_name: Mapping[str, SuiteResult],
) -> Bundle:
    """The evidence of an evaluation whose adversarial examples were kept: which images are
    classified correctly without an attack, and the result of each suite."""
    data, attacked = runner.data, {suite.name: suite for suite in suites if suite.rounds}
    results = [(suite, by_name[name]) for name, suite in attacked.items()]
    coded = [_encode(result, data, runner.threat.eps) for _, result in results]
    claim = Claim(
        images=len(data),
        shape=data.shape,
        correct=int(correct.sum()),
        ta=percent(int(correct.sum()), len(data)),
        threat=runner.threat,
        seed=runner.seed,
        precision=runner.precision,
        batch=runner.batch,
        weights=weights_sha256(model),
        suites=tuple(
            SuiteClaim(
                name=suite.name,
                attacks=result.attacks,
                rounds=tuple(f"{turn.name}: {turn.attack!r}" for turn in suite.rounds),
                broken=result.counts(),
                ra=percent(int(result.robust.sum()), len(data)),
                examples=digest,
            )
            for (suite, result), (_, digest) in zip(results, coded, strict=True)
        ),
        versions=_versions(),
    )
    return Bundle(
        claim,
        indices=data.number(torch.arange(len(data))),
        images=image_digests(data),
        correct=correct,
        broken_by=tuple(result.broken_by for _, result in results),
        coded=tuple(container.as_tensor(data) for data, _ in coded),
    )


def percent(count: int, images: int) -> float:
    return 100.0 * count / images


def broken_rows(broken_by: Tensor) -> Tensor:
    """The images that an attack broke: only these have an adversarial example."""
    return (broken_by > 0).nonzero().squeeze(1)


def image_digests(data: ImageData) -> Tensor:
    """SHA-256 of each image, as float32 in [0, 1], followed by its label, as int64."""
    digests = bytearray()
    for rows in torch.arange(len(data)).split(HASHED):
        images, labels = data.batch(rows, CPU)
        for image, label in zip(images.float().numpy(), labels.numpy(), strict=True):
            digests += hashlib.sha256(image.tobytes() + label.tobytes()).digest()
    return container.as_tensor(bytes(digests)).reshape(len(data), container.DIGEST_BYTES)


def weights_sha256(model: nn.Module) -> str:
    """SHA-256 of a model's state dict, sorted by name: each tensor's name, dtype, shape, bytes."""
    weights = hashlib.sha256()
    state: dict[str, Any] = model.state_dict()
    for name, value in sorted(state.items()):
        if isinstance(value, Tensor):
            weights.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
            raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            weights.update(raw.numpy().tobytes())
    return weights.hexdigest()


def _versions() -> dict[str, str]:
    dat = importlib.import_module("dat")  # mypy cannot order the modules if this is an import
    torch_version = str(torch.__version__)
    return {"dat": dat.__version__, "torch": torch_version, "python": platform.python_version()}


def _pixels(data: ImageData) -> int:
    return torch.Size(data.shape).numel()


def _encode(result: SuiteResult, data: ImageData, eps: float) -> tuple[bytes, str]:
    """The compressed adversarial examples, and the SHA-256 of the examples themselves."""
    assert result.examples is not None
    examples, digest = result.examples, hashlib.sha256()

    def pairs() -> Iterator[tuple[Tensor, Tensor]]:
        for rows in coding.chunks(broken_rows(result.broken_by), _pixels(data)):
            x_adv = examples[rows] + 0.0  # no negative zeros: a sum over workers has none
            digest.update(x_adv.numpy().tobytes())
            yield x_adv, data.batch(rows, CPU)[0]

    return coding.encode(pairs(), eps), digest.hexdigest()
