"""Philox against its published vectors, and the streams made of it."""

from __future__ import annotations

import hashlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from dat.core.rng import MASK, Streams, derive, generator, philox

KNOWN_ANSWERS = """
00000000 00000000 00000000 00000000  00000000 00000000  6627e8d5 e169c58d bc57ac4c 9b00dbd8
ffffffff ffffffff ffffffff ffffffff  ffffffff ffffffff  408f276d 41c83b0e a20bc7c6 6d5451fd
243f6a88 85a308d3 13198a2e 03707344  a4093822 299f31d0  d16cfe09 94fdcceb 5001e420 24126ea1
"""
"""Counter, key and output: Random123's kat_vectors for philox4x32 with 10 rounds."""
ODD_INDICES = [0, 1, -1, 2**31, 2**32 - 1, 2**32, -(2**32), 2**40, 2**63 - 1, -(2**63)]


def streams(count: int, *, key: int = 1) -> Streams:
    return Streams(key, torch.arange(count))


def correlation(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack((a.flatten(), b.flatten())))[0, 1])


@pytest.mark.parametrize("line", KNOWN_ANSWERS.strip().splitlines())
def test_philox_gives_the_published_words(line: str) -> None:
    words = [int(word, 16) for word in line.split()]
    c0, c1, c2, c3 = (torch.tensor([word]) for word in words[:4])
    output = philox((c0, c1, c2, c3), (words[4], words[5]))
    assert [int(word) for word in output] == words[6:]


def test_a_stream_is_philox_of_the_block_and_the_sample_number() -> None:
    key, index = 0x0123_4567_89AB_CDEF, 0x0F00_0000_0000_0007
    row = Streams(key, torch.tensor([index])).uniform(torch.Size((1, 6)), torch.float64)[0]
    expected: list[int] = []
    for block in (0, 1):
        words = (block, 0, index & MASK, index >> 32)
        c0, c1, c2, c3 = (torch.tensor([word]) for word in words)
        expected += [int(word) for word in philox((c0, c1, c2, c3), (key & MASK, key >> 32))]
    assert row.tolist() == [(word >> 8) / 2**24 for word in expected[:6]]


def test_uniform_numbers_are_uniform() -> None:
    values = streams(1000).uniform(torch.Size((1000, 3, 7)), torch.float64)
    assert stats.kstest(values.flatten().numpy(), "uniform").pvalue > 0.01
    for column in values.flatten(1).unbind(1):
        assert stats.kstest(column.numpy(), "uniform").pvalue > 1e-4


def test_normal_numbers_are_normal() -> None:
    values = streams(1000).normal(torch.Size((1000, 3, 7)), torch.float64)
    assert stats.kstest(values.flatten().numpy(), "norm").pvalue > 0.01
    for column in values.flatten(1).unbind(1):
        assert stats.kstest(column.numpy(), "norm").pvalue > 1e-4


@pytest.mark.parametrize("kind", ["uniform", "normal"])
def test_streams_are_uncorrelated(kind: str) -> None:
    def draw(draws: Streams) -> Tensor:
        shape, double = torch.Size((2000, 40)), torch.float64
        return draws.normal(shape, double) if kind == "normal" else draws.uniform(shape, double)

    values, bound = draw(streams(2000)), 5 / (2000 * 40) ** 0.5
    assert abs(correlation(values[:-1], values[1:])) < bound  # neighboring samples
    assert abs(correlation(values[:, :-1], values[:, 1:])) < bound  # neighboring numbers
    assert abs(correlation(values[:, :20], values[:, 20:])) < bound  # halves: Box-Muller's pairs
    assert abs(correlation(values, draw(streams(2000).fork("radius")))) < bound
    assert abs(correlation(values, draw(streams(2000, key=2)))) < bound


@settings(max_examples=40)
@given(
    index=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=5),
    key=st.integers(0, 2**63 - 1),
    short=st.integers(1, 9),
    more=st.integers(0, 9),
)
def test_a_longer_draw_starts_with_the_shorter_one(
    index: list[int], key: int, short: int, more: int
) -> None:
    draws, n = Streams(key, torch.tensor(index)), len(index)
    long = draws.uniform(torch.Size((n, short + more)))
    assert torch.equal(long[:, :short], draws.uniform(torch.Size((n, short))))
    assert long.min() >= 0 and long.max() < 1


@pytest.mark.parametrize("kind", ["uniform", "normal"])
def test_random_numbers_of_a_sample_do_not_depend_on_its_batch(kind: str) -> None:
    draws = Streams(9, torch.tensor([40, 3, -5, 17]))
    rows = torch.tensor([3, 0])

    def draw(streams: Streams) -> Tensor:
        return getattr(streams, kind)(torch.Size((len(streams.index), 2, 5)))  # type: ignore[no-any-return]

    assert torch.equal(draw(draws)[rows], draw(draws.select(rows)))
    assert torch.equal(draw(draws)[3:], draw(Streams(9, torch.tensor([17]))))
    assert draws.select(rows).index.tolist() == [17, 40]


def test_shape_does_not_change_the_numbers() -> None:
    flat = streams(3).uniform(torch.Size((3, 24)))
    assert torch.equal(streams(3).uniform(torch.Size((3, 2, 3, 4))), flat.reshape(3, 2, 3, 4))
    assert torch.equal(streams(3).uniform(torch.Size((3,))), flat[:, 0])


def test_small_types_of_index_give_the_same_streams() -> None:
    shape = torch.Size((3, 4))
    narrow = Streams(1, torch.arange(3, dtype=torch.int32))
    assert torch.equal(narrow.uniform(shape), streams(3).uniform(shape))


def test_every_index_has_a_stream_of_its_own() -> None:
    values = Streams(1, torch.tensor(ODD_INDICES)).uniform(torch.Size((len(ODD_INDICES), 4)))
    assert len({tuple(row) for row in values.tolist()}) == len(ODD_INDICES)


def test_all_bits_of_the_key_count() -> None:
    rows = [streams(1, key=1 << bit).uniform(torch.Size((1, 4))) for bit in range(63)]
    assert len({tuple(row[0].tolist()) for row in rows}) == 63


def test_a_fork_gives_other_numbers_to_the_same_samples() -> None:
    draws, shape = streams(4), torch.Size((4, 8))
    forks = [draws.fork("restart", 1), draws.fork("restart", 2), draws.fork("radius")]
    values = [each.uniform(shape) for each in (draws, *forks)]
    assert all(torch.equal(fork.index, draws.index) for fork in forks)
    assert len({tuple(value.flatten().tolist()) for value in values}) == 4
    assert torch.equal(values[1], draws.fork("restart", 1).uniform(shape))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("word", "expected"), [(MASK, 1 - 2.0**-24), (0, 0.0)])
def test_uniform_is_in_the_half_open_interval(
    word: int, expected: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    def words(draws: Streams, blocks: int) -> Tensor:
        return torch.full((len(draws.index), blocks, 4), word)

    monkeypatch.setattr(Streams, "_words", words)
    shape = torch.Size((2, 5))
    assert torch.equal(streams(2).uniform(shape, dtype), torch.full(shape, expected, dtype=dtype))
    assert streams(2).normal(shape, dtype).isfinite().all()


def test_dtypes_are_as_requested() -> None:
    shape = torch.Size((2, 3))
    assert streams(2).uniform(shape).dtype == streams(2).normal(shape).dtype == torch.float32
    assert streams(2).uniform(shape, torch.float64).dtype == torch.float64
    assert streams(2).normal(shape, torch.float64).dtype == torch.float64


def test_derive_never_changes() -> None:
    digest = hashlib.blake2b(b"3/shuffle/7/1", digest_size=8).digest()
    assert derive(3, "shuffle", 7, 1) == int.from_bytes(digest, "big") // 2 == 8340202274295678298


def test_derive_tells_every_coordinate_apart() -> None:
    places = [(0, "a"), (1, "a"), (0, "b"), (0, "a", 0), (0, "a", 1), (0, "a", 0, 0)]
    places += [(0, "a", 1, 2), (0, "a", 2, 1), (0, "a", 12), (10, "a"), (-1, "a")]
    keys = {derive(*place) for place in places}  # type: ignore[arg-type]
    assert len(keys) == len(places)
    assert all(0 <= key < 2**63 for key in keys)


def test_draws_of_a_purpose_have_the_derived_key() -> None:
    index = torch.arange(2)
    assert Streams.of(4, "attack", 1, 2, index=index).key == derive(4, "attack", 1, 2)


def test_generator_is_reproducible_and_apart_from_the_global_one() -> None:
    before = torch.get_rng_state()
    first, again, other = (
        torch.randperm(100, generator=generator(0, "shuffle", epoch)) for epoch in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    streams(3).normal(torch.Size((3, 3)))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("blocks", [1, 3, 770])
def test_native_random_words_agree_with_torch(blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    index = torch.tensor([0, 1, 17, MASK, MASK + 1, 2**40 + 5, 2**62])
    draws = Streams(derive(3, "words"), index)
    native = draws._words(blocks)
    monkeypatch.setattr("dat.kernels.native._library", lambda: None)
    assert torch.equal(native, draws._words(blocks))
