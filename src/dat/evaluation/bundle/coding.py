"""Lossless compression of adversarial examples, given the clean images.

Most pixels of an adversarial example are the clean pixel, or that pixel moved by exactly eps. Two
bits per pixel say which; the remaining pixels follow as differences of their bit patterns. Both are
compressed with zlib, some images at a time. Decoding restores every float32 bit for bit.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray[Any, np.dtype[Any]]
CHUNK = 2**22
"""Pixel values that are coded at a time."""
OTHER = 3
"""The code of a pixel that is none of the candidates."""
LEVEL = 6


def chunks(rows: Tensor, pixels: int) -> Iterator[Tensor]:
    """Rows that are coded together, as many as CHUNK allows."""
    yield from rows.split(max(CHUNK // pixels, 1)) if len(rows) else ()


def encode(pairs: Iterable[tuple[Tensor, Tensor]], eps: float) -> bytes:
    """Compress pairs of adversarial examples and clean images, one pair per chunk."""
    compressor = zlib.compressobj(LEVEL)
    parts = [
        compressor.compress(part)
        for x_adv, x in pairs
        for part in _code(_pixels(x_adv), _pixels(x), eps)
    ]
    return b"".join([*parts, compressor.flush()])


def decode(coded: bytes, images: Iterable[Tensor], eps: float) -> Iterator[Tensor]:
    """The adversarial examples of each chunk of clean images. Reads no more than these need."""
    stream = _Stream(coded)
    for x in images:
        yield torch.from_numpy(_restore(stream, _pixels(x), eps)).reshape(x.shape)
    stream.close()


def _pixels(x: Tensor) -> Array:
    pixels: Array = x.detach().cpu().float().contiguous().numpy().reshape(-1)
    return pixels


def _candidates(x: Array, eps: float) -> tuple[Array, Array, Array]:
    """What most pixels of an adversarial example are: the pixel itself, or moved by eps."""
    radius = np.float32(eps)
    return x, np.clip(x - radius, 0, 1), np.clip(x + radius, 0, 1)


def _code(x_adv: Array, x: Array, eps: float) -> tuple[bytes, bytes]:
    bits = x_adv.view(np.uint32)
    codes = np.full(len(x), OTHER, np.uint8)
    for code, candidate in reversed(list(enumerate(_candidates(x, eps)))):
        codes[bits == candidate.view(np.uint32)] = code
    other = codes == OTHER
    difference = (bits[other] - x.view(np.uint32)[other]).view(np.int32)
    zigzag = (difference << 1) ^ (difference >> 31)  # small differences of either sign: small codes
    return _pack(codes), zigzag.astype("<i4").view(np.uint8).reshape(-1, 4).T.tobytes()


def _restore(stream: _Stream, x: Array, eps: float) -> Array:
    codes = _unpack(stream.read(-(-len(x) // 4)), len(x))
    x_adv = np.choose(np.minimum(codes, 2), _candidates(x, eps))
    other = codes == OTHER
    planes = np.frombuffer(stream.read(4 * int(other.sum())), np.uint8).reshape(4, -1)
    zigzag = np.ascontiguousarray(planes.T).view("<u4").reshape(-1).astype(np.uint32)
    difference = (zigzag >> 1) ^ (0 - (zigzag & 1)).astype(np.uint32)
    x_adv[other] = (x.view(np.uint32)[other] + difference).view(np.float32)
    return x_adv


def _pack(codes: Array) -> bytes:
    """Four codes per byte."""
    padded = np.zeros(-(-len(codes) // 4) * 4, np.uint8)
    padded[: len(codes)] = codes
    quarters = padded.reshape(-1, 4) << np.array([0, 2, 4, 6], np.uint8)
    packed: Array = np.bitwise_or.reduce(quarters, axis=1)
    return packed.tobytes()


def _unpack(packed: bytes, count: int) -> Array:
    quarters = np.frombuffer(packed, np.uint8)[:, None] >> np.array([0, 2, 4, 6], np.uint8)
    return (quarters & OTHER).reshape(-1)[:count]


class _Stream:
    """Reads from compressed data exactly as many bytes as requested."""

    def __init__(self, coded: bytes) -> None:
        self.rest, self.decompressor = coded, zlib.decompressobj()

    def read(self, count: int) -> bytes:
        data = bytearray()
        try:
            while len(data) < count:
                part = self.decompressor.decompress(self.rest, count - len(data))
                self.rest = self.decompressor.unconsumed_tail
                if not part:
                    raise ValueError("the adversarial examples end too early")
                data += part
        except zlib.error:
            raise ValueError("the adversarial examples cannot be decompressed") from None
        return bytes(data)

    def close(self) -> None:
        """Raise if anything is left."""
        try:
            left = self.decompressor.decompress(self.rest, 1)
        except zlib.error:
            left = b"?"
        if left or not self.decompressor.eof or self.decompressor.unused_data:
            raise ValueError("there are more adversarial examples than broken images")
