"""Examples are restored bit for bit, and damaged ones are refused."""

from __future__ import annotations

import zlib

import pytest
import torch
from torch import Tensor

from dat.attacks import APGD, FAB, PGD, Attack, AttackTarget, Square
from dat.core.threat import ThreatModel
from dat.data import ImageData
from dat.evaluation.bundle import coding
from tests.evaluation.cases import everything

EPS = 8 / 255


def round_trip(x_adv: Tensor, x: Tensor, eps: float = EPS) -> Tensor:
    (decoded,) = coding.decode(coding.encode([(x_adv, x)], eps), [x], eps)
    return decoded


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.view(torch.int32), b.view(torch.int32))


@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize(
    "attack", [PGD(steps=2), APGD(steps=2), FAB(steps=2, targets=2), Square(queries=10)], ids=str
)
def test_attacks_are_restored(
    attack: Attack, norm: str, model: torch.nn.Module, small_data: ImageData
) -> None:
    x, y = everything(small_data)
    threat = ThreatModel(norm=norm, eps=0.1 if norm == "linf" else 1.0)
    x_adv = attack(AttackTarget(model, y), x, threat)
    assert same_bits(round_trip(x_adv, x, threat.eps), x_adv)


def test_any_float_is_restored() -> None:
    x = torch.rand(5, 1, 3, 3)
    x_adv = torch.randn(5, 1, 3, 3)
    x_adv[0] = torch.tensor([float("nan"), float("inf"), -float("inf")]).repeat(3, 1)
    x_adv[1] = torch.tensor([0.0, -0.0, 1e-45]).repeat(3, 1)
    assert same_bits(round_trip(x_adv, x), x_adv)


def test_pixels_moved_by_eps_take_two_bits() -> None:
    random = torch.Generator().manual_seed(0)
    x = torch.randint(256, (50, 3, 16, 16), generator=random) / 255
    signs = torch.randint(2, x.shape, generator=random) * 2 - 1
    x_adv = ThreatModel(eps=EPS).project(x + signs, x)
    assert 8 * len(coding.encode([(x_adv, x)], EPS)) < 2 * x.numel()


def test_chunks_are_coded_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coding, "CHUNK", 9 * 4)
    rows = list(coding.chunks(torch.arange(10), 9))
    assert [len(chunk) for chunk in rows] == [4, 4, 2]
    x, x_adv = torch.rand(10, 1, 3, 3), torch.rand(10, 1, 3, 3)
    coded = coding.encode(((x_adv[chunk], x[chunk]) for chunk in rows), EPS)
    decoded = torch.cat(list(coding.decode(coded, (x[chunk] for chunk in rows), EPS)))
    assert same_bits(decoded, x_adv)
    assert list(coding.chunks(torch.arange(0), 9)) == []


@pytest.mark.parametrize(
    ("coded", "message"),
    [
        (b"", "end too early"),
        (b"not zlib", "cannot be decompressed"),
        (zlib.compress(b"\0"), "end too early"),
        (zlib.compress(bytes(10**6)), "more adversarial examples than broken images"),
        (zlib.compress(bytes(3)) + b"more", "more adversarial examples than broken images"),
    ],
)
def test_damaged_examples_are_refused(coded: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        list(coding.decode(coded, [torch.zeros(1, 1, 3, 3)], EPS))


def test_no_more_is_decompressed_than_needed() -> None:
    """A gigabyte of zeros, compressed to a megabyte, is not unpacked."""
    bomb = zlib.compress(bytes(2**24), 9)
    stream = coding._Stream(bomb)
    assert stream.read(10) == bytes(10)
    with pytest.raises(ValueError, match="more adversarial"):
        stream.close()
