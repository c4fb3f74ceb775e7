"""The native kernel and its reference in torch give the same bits, whatever they are given."""

from __future__ import annotations

import ctypes
import importlib.util
import itertools
import math
import warnings
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from dat.core.rng import generator
from dat.distributed.quantizers import Buckets, PerTensor, Quantizer, WholeVector
from dat.distributed.wire_format import Slot, chunk_layouts, message_layout, spans
from dat.kernels.quantize import codec as kernel
from dat.kernels.quantize import reference
from dat.kernels.quantize.codec import Codec, library
from dat.kernels.quantize.layout import FLOAT, MessageLayout
from tests.distributed.cases import (
    FEW_BITS,
    KEY,
    bits_of,
    decoded,
    encoded,
    layout_of,
    normal,
    quantizers,
    slots_of,
    step_of_each_value,
    steps_of,
)

LENGTHS = (1, 7, 8, 9, 511, 512, 513, 8191, 8192, 8193, 20011)
MODES = ("set", "add", "subtract")
ROUNDINGS = ("random", "nearest")
LARGEST = torch.finfo(torch.float32).max
GUARD = 64
NAMES = list(quantizers(8))


@pytest.fixture(scope="session")
def native() -> ctypes.CDLL:
    """The kernel; where it could not be built there is nothing to compare."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = library()
    if found is None:
        pytest.skip("no native kernel here")
    return found


@pytest.fixture
def plain(native: ctypes.CDLL) -> Iterator[ctypes.CDLL]:
    """The kernel; afterwards AVX2 is on again."""
    yield native
    native.dat_plain(0)


class Guarded:
    """A buffer with bytes around it that nobody may write, and none of its own written yet."""

    def __init__(self, size: int, filled: int) -> None:
        self._all = torch.full((size + 2 * GUARD,), filled, dtype=torch.uint8)
        self._filled = filled
        self.inside = self._all[GUARD : GUARD + size]

    def check(self) -> None:
        assert (self._all[:GUARD] == self._filled).all()
        assert (self._all[GUARD + len(self.inside) :] == self._filled).all()


def native_message(codec: Codec, x: Tensor, layout: MessageLayout, key: int = KEY) -> Tensor:
    message = Guarded(layout.size, 0xA5)
    codec.encode(x, layout, message.inside, key)
    message.check()
    return message.inside


def reference_message(
    quantizer: Quantizer,
    x: Tensor,
    layout: MessageLayout,
    key: int = KEY,
    levels: int | None = None,
) -> Tensor:
    message = Guarded(layout.size, 0x5A)
    reference.encode(
        x,
        layout,
        bits=quantizer.bits,
        levels=levels or quantizer.levels,
        norm=quantizer.scale,
        random=quantizer.rounding == "random",
        key=key,
        message=message.inside,
    )
    message.check()
    return message.inside


def check_alike(
    quantizer: Quantizer,
    x: Tensor,
    layout: MessageLayout,
    *,
    key: int = KEY,
    levels: int | None = None,
    threads: int = 1,
    modes: tuple[str, ...] = MODES,
) -> Tensor:
    """Encode and decode by both; gives the decoded values."""
    codec = Codec(quantizer, levels=levels, threads=threads)
    message = native_message(codec, x, layout, key)
    assert torch.equal(message, reference_message(quantizer, x, layout, key, levels))
    for mode in modes:
        start = normal(len(x) + 2 * GUARD, seed=1)
        mine, theirs = start.clone(), start.clone()
        codec.decode(message, layout, mine[GUARD:-GUARD], mode)
        reference.decode(message, layout, bits=quantizer.bits, mode=mode, out=theirs[GUARD:-GUARD])
        assert torch.equal(bits_of(mine), bits_of(theirs))
        for edge in (slice(GUARD), slice(-GUARD, None)):
            assert torch.equal(mine[edge], start[edge])
    return decoded(codec, message, layout, len(x))


# ------------------------------------------------------------------------------- same bits


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("bits", FEW_BITS)
@pytest.mark.parametrize("name", NAMES)
def test_kernel_and_reference_agree_at_every_length(name: str, bits: int) -> None:
    for number, length in enumerate(LENGTHS):
        if length < 1000 or bits in (3, 8, 16):
            quantizer = quantizers(bits, ROUNDINGS[number % 2])[name]
            layout, modes = layout_of(quantizer, (length, 1)), MODES[number % 3 :][:1]
            check_alike(quantizer, normal(length), layout, key=number, modes=modes)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("bits", FEW_BITS)
@pytest.mark.parametrize("name", NAMES)
def test_kernel_and_reference_agree_on_several_tensors(name: str, bits: int) -> None:
    shapes = ((3, 5), (17,), (1, 1), (600, 2), (), (8, 8))
    for rounding, mode in zip(ROUNDINGS, ("add", "subtract"), strict=True):
        quantizer, x = quantizers(bits, rounding)[name], normal(15 + 17 + 1 + 1200 + 1 + 64)
        check_alike(quantizer, x, layout_of(quantizer, *shapes), modes=(mode,))


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("size", [520, 8192, 8200, 16384])
@pytest.mark.parametrize("norm", ["max", "l2"])
def test_buckets_of_odd_and_of_huge_sizes(norm: str, size: int) -> None:
    """Not whole tiles, and too large for one thread to do alone."""
    for bits in (3, 8, 16):
        quantizer = Buckets(bits=bits, norm=norm, size=size)
        layout = layout_of(quantizer, (3 * size + 13, 1))
        check_alike(quantizer, normal(3 * size + 13), layout, threads=2, modes=("set",))


COUNT = torch.arange(600.0)
VALUES: dict[str, Tensor] = {
    "zeros": torch.zeros(600),
    "negative zeros": torch.full((600,), -0.0),
    "subnormals": normal(600, scale=1e-42),
    "the smallest": torch.where(COUNT == 577, 1e-45, 0.0),
    "near the smallest normal": normal(600, scale=1e-38),
    "where steps are raised": normal(600, scale=2.0**-97),
    "huge": normal(600, scale=1e37).clamp(-1e38, 1e38),
    "the largest": LARGEST * normal(600).sign(),
    "of every size": normal(600) * 10.0 ** (COUNT % 76 - 38),
    "on the levels": COUNT % 255 - 127,
    "halves": (COUNT % 255 - 127) / 2,
    "powers of two": 2.0 ** -(COUNT % 40),
}


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("name", ["max-64", "l2-64", "tensor"])
def test_kernel_and_reference_agree_on_special_values(name: str, values: str) -> None:
    for bits, rounding in itertools.product(FEW_BITS, ROUNDINGS):
        quantizer, x = quantizers(bits, rounding)[name], VALUES[values]
        check_alike(quantizer, x, layout_of(quantizer, (len(x), 1)), modes=("set",))


@pytest.mark.parametrize("bits", FEW_BITS)
def test_the_smallest_number_is_not_lost(bits: int) -> None:
    """Its step is not rounded down to zero."""
    quantizer, x = Buckets(bits=bits, size=8), torch.zeros(8)
    x[3] = 1e-45
    layout = layout_of(quantizer, (1, 8))
    codec = Codec(quantizer)
    message = encoded(codec, x, layout)
    assert torch.equal(steps_of(message, layout), torch.tensor([1e-45]))
    assert torch.equal(decoded(codec, message, layout, 8), x)


# ---------------------------------------------------------------------- NaN and infinities


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("broken", [torch.nan, -torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("bits", FEW_BITS)
@pytest.mark.parametrize("name", ["max-64", "l2-64"])
def test_broken_values_decode_to_nan_and_affect_only_their_bucket(
    name: str, bits: int, broken: float
) -> None:
    for rounding in ROUNDINGS:
        quantizer = quantizers(bits, rounding)[name]
        layout = layout_of(quantizer, (300, 1))
        healthy = normal(300)
        x = healthy.clone()
        x[[70, 127, 299]] = broken
        out = check_alike(quantizer, x, layout)
        assert out.isnan().nonzero().flatten().tolist() == [70, 127, 299]
        spoilt = torch.zeros(300, dtype=torch.bool)
        spoilt[64:128] = spoilt[256:300] = True
        assert (out[spoilt & ~out.isnan()] == 0).all()
        assert torch.equal(out[~spoilt], check_alike(quantizer, healthy, layout, modes=())[~spoilt])


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("length", [300, 9000])
@pytest.mark.parametrize("bits", FEW_BITS)
def test_broken_values_affect_their_tensor_or_the_whole_vector(bits: int, length: int) -> None:
    shapes = ((length, 1), (50, 1))
    x = normal(length + 50)
    x[[length - 7, length - 3]] = torch.tensor([torch.inf, torch.nan])
    for quantizer in (PerTensor(bits=bits), WholeVector(bits=bits)):
        out = check_alike(quantizer, x, layout_of(quantizer, *shapes), threads=2, modes=("set",))
        assert out.isnan().nonzero().flatten().tolist() == [length - 7, length - 3]
        assert out.nan_to_num()[:length].count_nonzero() == 0
        assert out[length:].any() == isinstance(quantizer, PerTensor)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("mode", MODES)
def test_broken_groups_do_not_affect_other_groups(mode: str) -> None:
    """Also a negative zero: both sides do the same with it."""
    quantizer = Buckets(bits=4, size=8)
    layout = layout_of(quantizer, (2, 8))
    codec, x = Codec(quantizer), torch.ones(16)
    x[3] = torch.inf
    message = encoded(codec, x, layout)
    start = torch.tensor([5.0, -0.0, 0.0, 1.0, -2.0, 1e-45, 3e38, -0.0] * 2)
    mine, theirs = start.clone(), start.clone()
    codec.decode(message, layout, mine, mode)
    reference.decode(message, layout, bits=4, mode=mode, out=theirs)
    assert mine[3].isnan() and mine.isnan().sum() == 1
    others = torch.tensor([0, 1, 2, 4, 5, 6, 7])
    assert torch.equal(mine[others], torch.zeros(7) if mode == "set" else start[others])
    assert torch.equal(bits_of(mine), bits_of(theirs))


# --------------------------------------------------------------------- what the bytes mean


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("bits", FEW_BITS)
def test_codes_are_twos_complement_from_the_lowest_bit(bits: int, rounding: str) -> None:
    """Read by hand: the format is what peers of another version would have to know."""
    quantizer = Buckets(bits=bits, size=16, rounding=rounding)
    length = 45
    x, layout = normal(length), layout_of(quantizer, (length, 1))
    codec = Codec(quantizer)
    message = encoded(codec, x, layout)
    steps = step_of_each_value(message, layout, length)
    packed = int.from_bytes(bytes(message[FLOAT * layout.steps :].tolist()), "little")
    codes = [packed >> (bits * i) & (2**bits - 1) for i in range(length)]
    assert packed >> (bits * length) == 0  # what fills the last byte
    signed = [code - 2**bits if code >= 2 ** (bits - 1) else code for code in codes]
    assert max(map(abs, signed)) == quantizer.levels

    out = decoded(codec, message, layout, length)
    assert torch.equal(out, torch.tensor(signed).float() * steps.float())
    for code, value, step in zip(signed, x.tolist(), steps.tolist(), strict=True):
        places = abs(value / step) * 2.0**-22 + 2.0 ** -(23 - min(bits, 8))
        reach = (1.0 if rounding == "random" else 0.5) + places
        assert abs(code - value / step) <= reach


def test_the_key_decides_the_rounding_by_both_of_its_halves() -> None:
    quantizer = Buckets(bits=4)
    codec, x, layout = Codec(quantizer), normal(512), layout_of(quantizer, (512, 1))
    first = encoded(codec, x, layout, 7)
    assert torch.equal(encoded(codec, x, layout, 7), first)
    for other in (6, 8, 7 + (1 << 31), 7 + (1 << 32), 7 + (1 << 62)):
        assert not torch.equal(encoded(codec, x, layout, other), first)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("key", [0, 1, 2**31, 2**32 - 1, 2**32, 2**62, 2**63 - 1])
@pytest.mark.parametrize("position", [0, 1, 2**31 - 3, 2**32 - 100, 2**32, 2**33 + 5])
def test_keys_and_positions_may_be_large(key: int, position: int) -> None:
    for bits in (4, 16):
        quantizer = Buckets(bits=bits, size=64)
        layout = message_layout(spans([Slot((300, 1), position)], quantizer), bits)
        check_alike(quantizer, normal(300), layout, key=key, modes=("set",))


# -------------------------------------------------------------------- what a message leaves


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("bits", FEW_BITS)
def test_nothing_is_written_beyond_a_short_message(bits: int) -> None:
    for length in range(1, 26):
        quantizer = Buckets(bits=bits, size=16)
        check_alike(quantizer, normal(length), layout_of(quantizer, (length, 1)), modes=("set",))


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("name", ["bucket", "tensor", "vector"])
@pytest.mark.parametrize("bits", FEW_BITS)
def test_a_share_touches_its_own_values_alone(name: str, bits: int) -> None:
    quantizer = quantizers(bits)[name]
    slots = slots_of((30, 31), (700,), (9000, 1))
    x = normal(30 * 31 + 700 + 9000)
    codec = Codec(quantizer, threads=2)
    for layout in chunk_layouts(spans(slots, quantizer), quantizer, 3):
        message = native_message(codec, x, layout)
        others = torch.ones(len(x), dtype=torch.bool)
        for run in layout.runs:
            others[run.start : run.start + run.length] = False
        for mode in MODES:
            out = normal(len(x), seed=2)
            codec.decode(message, layout, out, mode)
            assert torch.equal(out[others], normal(len(x), seed=2)[others])
            assert not torch.equal(out[~others], normal(len(x), seed=2)[~others])

        # and nothing else of x is read
        x[others] = torch.nan
        assert torch.equal(native_message(codec, x, layout), message)
        x[others] = normal(len(x))[others]


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("mode", MODES)
def test_floats_are_sent_as_they_are(mode: str) -> None:
    quantizer = Buckets(bits=4, size=8, dense_vectors=True, dense_below=6)
    layout = layout_of(quantizer, (11,), (3, 7), (1, 5), ())
    assert (layout.steps, layout.floats) == (3, 17)
    x = normal(38)
    x[:6] = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0, 1e-45, LARGEST])
    check_alike(quantizer, x, layout)
    dense = torch.ones(38, dtype=torch.bool)
    dense[11:32] = False

    codec, start = Codec(quantizer), normal(38, seed=1)
    out = start.clone()
    codec.decode(encoded(codec, x, layout), layout, out, mode)
    wanted = {"set": x, "add": start + x, "subtract": start - x}[mode]
    assert torch.equal(bits_of(out[dense]), bits_of(wanted[dense]))


def test_add_and_subtract_are_what_set_gives_and_undo_each_other() -> None:
    quantizer = Buckets(bits=5, size=64)
    codec, x, layout = Codec(quantizer), normal(300), layout_of(quantizer, (300, 1))
    message = encoded(codec, x, layout)
    once = decoded(codec, message, layout, 300)
    start = normal(300, seed=1)
    for mode, wanted in (("add", start + once), ("subtract", start - once)):
        out = start.clone()
        codec.decode(message, layout, out, mode)
        assert torch.equal(out, wanted)
    out = once.clone()
    codec.decode(message, layout, out, "subtract")
    assert not out.any()


def test_an_empty_message_changes_nothing() -> None:
    for quantizer in (Buckets(bits=4), PerTensor(bits=8), WholeVector(bits=2), Buckets()):
        layout, codec, out = layout_of(quantizer), Codec(quantizer), torch.ones(3)
        codec.decode(encoded(codec, torch.zeros(3), layout), layout, out)
        assert torch.equal(out, torch.ones(3))


@pytest.mark.parametrize(
    "x", [torch.zeros(16, dtype=torch.float64), torch.zeros(2, 8), torch.zeros(32)[::2]]
)
def test_invalid_kernel_inputs_are_refused(x: Tensor) -> None:
    quantizer = Buckets(bits=4, size=8)
    layout = layout_of(quantizer, (2, 8))
    with pytest.raises(AssertionError):
        encoded(Codec(quantizer), x, layout)


# ---------------------------------------------------------------- steps that workers agree on


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize(
    ("name", "workers"),
    [*itertools.product(["max-64", "l2-64", "tensor", "vector"], [1, 2, 6]), ("max-64", 127)],
)
def test_a_ring_adds_codes_without_loss(name: str, workers: int) -> None:
    """Measure, take the largest steps of all, encode by these: sums stay within 8 bits."""
    quantizer = quantizers(8)[name]
    levels = quantizer.levels // workers
    codec, layout = Codec(quantizer, levels=levels), layout_of(quantizer, (300, 2), (90,))
    first, second = FLOAT * layout.steps, FLOAT * (layout.steps + layout.floats)
    gradients = [normal(690, seed=seed, scale=1 + seed % 3) for seed in range(workers)]
    messages = []
    for x in gradients:
        mine, theirs = Guarded(layout.size, 0xA5), Guarded(layout.size, 0xA5)
        codec.measure(x, layout, mine.inside)
        reference.measure(x, layout, levels, quantizer.scale, theirs.inside)
        for guarded in (mine, theirs):
            guarded.check()
            assert (guarded.inside[second:] == 0xA5).all()  # no codes yet
        assert torch.equal(mine.inside, theirs.inside)
        messages.append(mine.inside.clone())
    steps = torch.stack([steps_of(message, layout) for message in messages]).amax(0)

    total = torch.zeros(len(messages[0]) - second, dtype=torch.int64)
    sums = torch.zeros(690, dtype=torch.float64)
    for number, (x, message) in enumerate(zip(gradients, messages, strict=True)):
        message[:first] = steps.view(torch.uint8)
        theirs_too = message.clone()
        codec.encode(x, layout, message, number, measured=True)
        reference.encode(
            x,
            layout,
            bits=8,
            levels=levels,
            norm="given",
            random=True,
            key=number,
            message=theirs_too,
        )
        assert torch.equal(message, theirs_too)
        assert torch.equal(steps_of(message, layout), steps)
        codes = message[second:].view(torch.int8)
        assert codes.abs().max() <= levels
        total += codes
        sums += decoded(codec, message, layout, 690).double()
        floats = message[first:second].clone().view(torch.float32)
        assert torch.equal(floats, x[600:] if layout.floats else x[:0])

    added = messages[0].clone()
    added[second:] = total.to(torch.int8).view(torch.uint8)
    quantized = slice(0, 600 if layout.floats else 690)
    found = decoded(codec, added, layout, 690)[quantized].double()
    torch.testing.assert_close(found, sums[quantized], rtol=1e-6, atol=1e-5)
    assert total.abs().max() <= 127


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("bits", FEW_BITS)
def test_fewer_levels_than_the_bits_could_hold(bits: int) -> None:
    quantizer = Buckets(bits=bits, size=64)
    for levels in {1, max(quantizer.levels // 3, 1), quantizer.levels}:
        layout = layout_of(quantizer, (300, 1))
        check_alike(quantizer, normal(300), layout, levels=levels, modes=("set",))


def test_measuring_first_gives_the_same_message() -> None:
    for name, quantizer in quantizers(4).items():
        codec, x, layout = Codec(quantizer), normal(2000), layout_of(quantizer, (900, 2), (200,))
        message = torch.full((layout.size,), 0xFF, dtype=torch.uint8)
        codec.measure(x, layout, message)
        codec.encode(x, layout, message, KEY, measured=True)
        assert torch.equal(message, encoded(codec, x, layout)), name


# ------------------------------------------------------------------------ threads, machines


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("bits", [3, 8, 16])
@pytest.mark.parametrize("name", ["max-8", "max-512", "l2-64", "l2-1024", "tensor", "vector"])
def test_results_do_not_depend_on_threads(name: str, bits: int) -> None:
    quantizer = quantizers(bits)[name]
    x, layout = normal(20011 + 8192 + 100), layout_of(quantizer, (20011, 1), (8192, 1), (100,))
    results = []
    for threads in (1, 2, 3):
        codec = Codec(quantizer, threads=threads)
        measured = Guarded(layout.size, 0)
        codec.measure(x, layout, measured.inside)
        message = native_message(codec, x, layout)
        out = normal(len(x), seed=1)
        codec.decode(message, layout, out, "add")
        results.append((measured.inside, message, out))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("length", [16, 40, 512, 8191, 20011])
@pytest.mark.parametrize("share", [1.0, 0.5, 0.1, 0.0])
def test_squares_are_added_in_a_fixed_order(plain: ctypes.CDLL, share: float, length: int) -> None:
    """2^54 + 1 is 2^54 in double: how much is lost of the many ones depends on the order, and with
    one level the step shows it, as it is rounded up."""
    quantizer = PerTensor(bits=2)
    layout = layout_of(quantizer, (length, 1))
    x = (torch.rand(length, generator=generator(0, "ones")) < share).float()
    x[512::512] = 1.0  # one a tile, at least
    x[0] = 2.0**27
    wanted = reference_message(quantizer, x, layout)
    exact = math.sqrt(2**54 + x[1:].sum().item())
    assert 2.0**27 <= steps_of(wanted, layout).item() <= exact * (1 + 2.0**-23)
    for threads, on in itertools.product((1, 2, 3), (0, 1)):
        plain.dat_plain(on)
        assert torch.equal(native_message(Codec(quantizer, threads=threads), x, layout), wanted)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("bits", FEW_BITS)
@pytest.mark.parametrize("name", ["max-512", "l2-64", "tensor"])
def test_results_do_not_depend_on_avx2(
    plain: ctypes.CDLL, name: str, bits: int, rounding: str
) -> None:
    if not plain.dat_has_avx2():
        pytest.skip("no AVX2 here")
    quantizer = quantizers(bits, rounding)[name]
    x = normal(1511)
    x[:1000:100] = torch.tensor([1e-45, 1e38, -1e38, 0.0, -0.0, 1e-40, 3e-39, 1e10, 1.0, 7.0])
    x[1400:1402] = torch.tensor([torch.nan, -torch.inf])
    layout = layout_of(quantizer, (1024, 1), (487, 1))
    codec, results = Codec(quantizer), []
    for on in (0, 1):
        plain.dat_plain(on)
        assert plain.dat_has_avx2() == 1 - on
        message = native_message(codec, x, layout)
        outs = [normal(1511, seed=1) for _ in MODES]
        for out, mode in zip(outs, MODES, strict=True):
            codec.decode(message, layout, out, mode)
        results.append([message, *map(bits_of, outs)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# --------------------------------------------------------------------------- any combination


@st.composite
def cases(draw: st.DrawFn) -> tuple[Quantizer, list[Slot], int]:
    bits, rounding = draw(st.sampled_from(FEW_BITS)), draw(st.sampled_from(ROUNDINGS))
    quantizer = quantizers(bits, rounding)[draw(st.sampled_from(NAMES))]
    shape = st.one_of(
        st.tuples(st.integers(0, 40)),
        st.tuples(st.integers(1, 4), st.sampled_from([1, 5, 63, 511, 512, 513])),
        st.just(()),
    )
    slots = slots_of(*draw(st.lists(shape, min_size=1, max_size=4)))
    return quantizer, slots, draw(st.integers(1, 3))


SPECIAL = (0.0, -0.0, 1e-45, -1e-40, 1e38, LARGEST, -LARGEST, torch.nan, torch.inf, -torch.inf)


@pytest.mark.usefixtures("native")
@settings(
    max_examples=80,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    case=cases(),
    scale=st.sampled_from([1.0, 1e-3, 1e-30, 1e-38, 1e-42, 1e37]),
    special=st.lists(st.tuples(st.integers(0, 10**6), st.sampled_from(SPECIAL)), max_size=3),
    key=st.integers(0, 2**63 - 1),
    threads=st.integers(1, 3),
)
def test_kernel_and_reference_agree(
    case: tuple[Quantizer, list[Slot], int],
    scale: float,
    special: list[tuple[int, float]],
    key: int,
    threads: int,
) -> None:
    quantizer, slots, workers = case
    x = normal(sum(slot.length for slot in slots), scale=scale)
    for place, value in special:
        if len(x):
            x[place % len(x)] = value
    for layout in chunk_layouts(spans(slots, quantizer), quantizer, workers):
        check_alike(quantizer, x, layout, key=key, threads=threads)


MUCH = 1.5 * 2.0**127


@settings(max_examples=100)
@given(
    st.lists(st.floats(-MUCH, MUCH, width=32), min_size=1, max_size=70),
    st.sampled_from(FEW_BITS),
    st.sampled_from(["max-8", "max-64", "l2-8", "tensor", "vector"]),
    st.sampled_from(ROUNDINGS),
    st.integers(0, 2**63 - 1),
)
def test_decoded_values_are_within_one_step(
    values: list[float], bits: int, name: str, rounding: str, key: int
) -> None:
    quantizer, x = quantizers(bits, rounding)[name], torch.tensor(values)
    codec, layout = Codec(quantizer), layout_of(quantizer, (len(x), 1))
    message = encoded(codec, x, layout, key)
    out, step = decoded(codec, message, layout, len(x)), step_of_each_value(message, layout, len(x))
    reach = step * (0.5 if rounding == "nearest" else 1.0)
    slack = 2.0**-21 * x.double().abs() + step * 2.0 ** -(23 - min(bits, 8))
    assert ((out.double() - x.double()).abs() <= reach + slack).all()


# --------------------------------------------------------------------------- other machines


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("name", NAMES)
def test_without_the_kernel_the_same_bytes_are_sent(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for bits in (3, 8, 16):
        quantizer = quantizers(bits)[name]
        layout, x = layout_of(quantizer, (70, 9), (20,)), normal(650)
        codec, results = Codec(quantizer), []
        for missing in (False, True):
            with monkeypatch.context() as patch:
                if missing:
                    patch.setattr(kernel, "library", lambda: None)
                measured = torch.zeros(layout.size, dtype=torch.uint8)
                codec.measure(x, layout, measured)
                given_steps = measured.clone()
                codec.encode(x, layout, given_steps, KEY, measured=True)
                message = encoded(codec, x, layout)
                outs = [normal(650, seed=1) for _ in MODES]
                for out, mode in zip(outs, MODES, strict=True):
                    codec.decode(message, layout, out, mode)
                results.append([measured, given_steps, message, *outs])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """The kernel is looked for again, in this test and after it."""
    monkeypatch.delenv(kernel.DISABLE_VARIABLE, raising=False)
    library.cache_clear()
    yield monkeypatch
    library.cache_clear()


def found_at(origin: str | None) -> Any:
    return lambda name: ModuleSpec(name, None, origin=origin)


def test_a_missing_kernel_is_reported_once_and_torch_is_used(fresh: pytest.MonkeyPatch) -> None:
    fresh.setattr(importlib.util, "find_spec", lambda name: None)
    wanted = r"no native quantizer \(.*no C compiler.*\): .*slower.*Install gcc"
    with pytest.warns(UserWarning, match=wanted) as told:
        assert library() is None
    assert len(told) == 1

    quantizer = Buckets(bits=4)  # from now on silently: a warning would be an error here
    codec, layout = Codec(quantizer), layout_of(quantizer, (9, 9))
    message = encoded(codec, normal(81), layout)
    assert torch.equal(message, reference_message(quantizer, normal(81), layout))


def test_a_kernel_that_cannot_be_loaded_is_reported_with_the_reason(
    fresh: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "_kernel.so"
    file.write_text("not a library")
    fresh.setattr(importlib.util, "find_spec", found_at(str(file)))
    with pytest.warns(UserWarning, match=r"no native quantizer \(.*_kernel\.so.*\): falling back"):
        assert library() is None


def test_a_disabled_kernel_is_not_reported(fresh: pytest.MonkeyPatch) -> None:
    fresh.setenv(kernel.DISABLE_VARIABLE, "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert library() is None
    assert kernel.DISABLE_VARIABLE == "DAT_NO_KERNEL"


def test_the_kernel_is_loaded_once(fresh: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def find_spec(name: str) -> None:
        asked.append(name)

    fresh.setattr(importlib.util, "find_spec", find_spec)
    with pytest.warns(UserWarning, match="no native quantizer"):
        library()
    library()
    assert asked == ["dat.kernels.quantize._kernel"]


def test_levels_are_the_quantizers_unless_given() -> None:
    assert Codec(Buckets(bits=8)).levels == 127
    assert Codec(Buckets(bits=8), levels=21).levels == 21
