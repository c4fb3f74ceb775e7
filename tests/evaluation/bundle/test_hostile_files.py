"""Damaged and hostile files are one line, and cost nothing."""

from __future__ import annotations

import hashlib
import json
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch import nn

from dat.data import ImageData
from dat.evaluation import Bundle, verify
from dat.evaluation.bundle import container
from tests.evaluation.bundle.forging import Tensors, Written, forged


def test_every_flipped_byte_is_found(written: Written, tmp_path: Path) -> None:
    data, path = written[0].read_bytes(), tmp_path / "flipped"
    step = max(len(data) // 300, 1)
    for position in (*range(0, len(data), step), *range(len(data) - 40, len(data))):
        flipped = bytearray(data)
        flipped[position] ^= 1 << position % 8
        path.write_bytes(flipped)
        with pytest.raises(ValueError, match="flipped: damaged, or not an evidence bundle"):
            Bundle.read(path)


@pytest.mark.parametrize("kept", [0, 5, 31, 32, 33, 500])
def test_truncated_files_are_found(kept: int, written: Written, tmp_path: Path) -> None:
    path = tmp_path / "short"
    path.write_bytes(written[0].read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"short: (damaged|not an evidence bundle)"):
        Bundle.read(path)


def sealed(data: bytes) -> bytes:
    return data + hashlib.sha256(data).digest()


def with_claim(text: bytes) -> bytes:
    """The bytes of a file before its digest."""
    digest = torch.zeros(32, dtype=torch.uint8)
    return save({"claim": container.as_tensor(text), "sha256": digest})[:-32]


HEADER = json.dumps(
    {"claim": {"dtype": "U8", "shape": [2**60], "data_offsets": [0, 2**60]}}
).encode()
HOSTILE = {
    "nothing": sealed(b""),
    "no safetensors": sealed(b"PK\3\4 a zip of something else" * 9),
    "huge header": sealed((2**62).to_bytes(8, "little") + b"{}"),
    "huge tensor": sealed(len(HEADER).to_bytes(8, "little") + HEADER),
    "no claim": sealed(save({"sha256": torch.zeros(32, dtype=torch.uint8)})[:-32]),
    "no object": sealed(with_claim(b"[1]")),
    "deep claim": sealed(with_claim(b"[" * 100_000)),
    "not text": sealed(with_claim(b"\xff\xfe")),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_files_are_one_line(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "hostile"
    path.write_bytes(HOSTILE[kind])
    with pytest.raises(ValueError, match=r"hostile: .*not an? (valid )?evidence bundle") as raised:
        Bundle.read(path)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 400


def many_images(claim: Any, tensors: Tensors) -> None:
    claim["images"] = 10**15


def large_images(claim: Any, tensors: Tensors) -> None:
    claim["shape"] = [10**6, 10**6, 10**6]


def unknown_attack(claim: Any, tensors: Tensors) -> None:
    tensors["broken_by.0"] = tensors["broken_by.0"] + 100


def floats(claim: Any, tensors: Tensors) -> None:
    tensors["correct"] = tensors["correct"].float()


def one_more(claim: Any, tensors: Tensors) -> None:
    tensors["../../a"] = torch.zeros(1)


def control_characters(claim: Any, tensors: Tensors) -> None:
    claim["suites"][0]["name"] = "\x1b[2Jautoattack"


def twice(claim: Any, tensors: Tensors) -> None:
    tensors["indices"] = torch.zeros_like(tensors["indices"])


def not_a_threat(claim: Any, tensors: Tensors) -> None:
    claim["threat"]["eps"] = float("nan")


def no_suites(claim: Any, tensors: Tensors) -> None:
    claim["suites"] = {"a": 1}


def other_format(claim: Any, tensors: Tensors) -> None:
    claim["format"] = "dat evidence bundle 2"


INVALID = (
    *(many_images, unknown_attack, floats, one_more, control_characters, twice, not_a_threat),
    *(no_suites, other_format),
)


@pytest.mark.parametrize("change", INVALID, ids=lambda it: it.__name__)
def test_invalid_claims_are_one_line(change: Any, written: Written, tmp_path: Path) -> None:
    path = forged(written, tmp_path, change)
    with pytest.raises(ValueError, match="forged: not a valid evidence bundle") as raised:
        Bundle.read(path)
    assert "\n" not in str(raised.value) and "\x1b" not in str(raised.value)


def test_nothing_of_the_claimed_size_is_allocated(
    written: Written, model: nn.Module, small_data: ImageData, tmp_path: Path
) -> None:
    result = verify(forged(written, tmp_path, large_images), model, small_data)
    assert "images" in result.failed


def bomb(claim: Any, tensors: Tensors) -> None:
    tensors["coded.0"] = container.as_tensor(zlib.compress(bytes(2**24), 9))


def test_a_bomb_is_not_unpacked(
    written: Written, model: nn.Module, small_data: ImageData, tmp_path: Path
) -> None:
    result = verify(forged(written, tmp_path, bomb), model, small_data)
    details = [check.detail for check in result.checks if not check.passed]
    assert details == ["there are more adversarial examples than broken images"]
