"""The Triton quantizer, run by Triton's interpreter, gives the bits of the native kernel (of the
reference, where that is missing). No GPU is involved."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dat.core import devices
from dat.distributed.quantizers import Buckets, PerTensor, Quantizer
from dat.distributed.wire_format import Slot, chunk_layouts, message_layout, spans
from dat.kernels.quantize import codec as kernel
from dat.kernels.quantize import reference
from dat.kernels.quantize.codec import Codec, library
from dat.kernels.quantize.layout import FLOAT, MessageLayout, Run
from tests.distributed.cases import (
    FEW_BITS,
    KEY,
    bits_of,
    layout_of,
    normal,
    quantizers,
    slots_of,
    steps_of,
)
from tests.kernels.test_quantize import (
    GUARD,
    LARGEST,
    MODES,
    ROUNDINGS,
    SPECIAL,
    VALUES,
    Guarded,
    cases,
)
from tests.kernels.triton_tools import interpreted

KERNELS = "dat.kernels.quantize.triton_kernels"
LAUNCH = "dat.kernels.quantize.triton_launch"
SHAPES = ((3, 5), (17,), (1, 1), (43, 2), ())
LENGTH = 15 + 17 + 1 + 86 + 1


@pytest.fixture(scope="module", autouse=True)
def maybe_no_native() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library()


@pytest.fixture(scope="module")
def triton_launch() -> Iterator[Any]:
    with interpreted(KERNELS, LAUNCH) as module:
        yield module


def message_of(
    triton_launch: Any, codec: Codec, x: Tensor, layout: MessageLayout, key: int = KEY
) -> Tensor:
    message = Guarded(layout.size, 0xA5)
    triton_launch.encode(
        x,
        layout,
        bits=codec.bits,
        levels=codec.levels,
        norm=codec._norm,
        random=codec._random,
        key=key,
        message=message.inside,
    )
    message.check()
    return message.inside


def check_same(
    triton_launch: Any,
    quantizer: Quantizer,
    x: Tensor,
    layout: MessageLayout,
    *,
    key: int = KEY,
    levels: int | None = None,
    modes: tuple[str, ...] = MODES,
    count: int = 1,
) -> None:
    """Encode once, and decode `count` messages; rows of an odd stride are not aligned."""
    codec = Codec(quantizer, levels=levels, threads=1)
    messages = torch.full((count, layout.size + 3), 0x5A, dtype=torch.uint8)[:, : layout.size]
    for number, message in enumerate(messages):
        codec.encode(x * (1 + number), layout, message, key + number)
    assert torch.equal(message_of(triton_launch, codec, x, layout, key), messages[0])
    for mode in modes:
        start = normal(len(x) + 2 * GUARD, seed=1)
        mine, theirs = start.clone(), start.clone()
        triton_launch.decode(messages, layout, bits=codec.bits, mode=mode, out=mine[GUARD:-GUARD])
        codec._decode(messages, layout, theirs[GUARD:-GUARD], mode)
        assert torch.equal(bits_of(mine), bits_of(theirs))


# --------------------------------------------------------------------------- same bits


@pytest.mark.parametrize("bits", FEW_BITS)
@pytest.mark.parametrize("name", ["tensor", "max-8", "l2-64"])
def test_messages_and_sums_are_those_of_the_native_kernel(
    triton_launch: Any, name: str, bits: int
) -> None:
    for rounding, mode in zip(ROUNDINGS, ("set", "subtract"), strict=True):
        quantizer = quantizers(bits, rounding)[name]
        layout = layout_of(quantizer, *SHAPES)
        check_same(triton_launch, quantizer, normal(LENGTH), layout, modes=(mode,), count=3)


@pytest.mark.parametrize("size", [520, 1032])
@pytest.mark.parametrize("norm", ["max", "l2"])
def test_groups_of_several_tiles_and_parts_of_them(
    triton_launch: Any, norm: str, size: int
) -> None:
    quantizer = Buckets(bits=5, norm=norm, size=size)
    check_same(
        triton_launch, quantizer, normal(2 * size + 13), layout_of(quantizer, (2 * size + 13, 1))
    )


@pytest.mark.parametrize("bits", [3, 8, 16])
def test_short_messages_at_every_length(triton_launch: Any, bits: int) -> None:
    for length in range(1, 26, 3):
        quantizer = Buckets(bits=bits, size=16)
        layout = layout_of(quantizer, (length, 1))
        check_same(triton_launch, quantizer, normal(length), layout, modes=("add",))


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("name", ["max-64", "l2-64"])
def test_special_values(triton_launch: Any, name: str, values: str) -> None:
    x = VALUES[values][-100:]
    for bits, rounding in zip((2, 8, 16), (*ROUNDINGS, "random"), strict=True):
        quantizer = quantizers(bits, rounding)[name]
        check_same(triton_launch, quantizer, x, layout_of(quantizer, (len(x), 1)), modes=("set",))


@pytest.mark.parametrize("broken", [torch.nan, -torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("norm", ["max", "l2"])
def test_groups_with_nan_and_infinity(triton_launch: Any, norm: str, broken: float) -> None:
    for bits in (4, 16):
        quantizer = Buckets(bits=bits, size=64, norm=norm)
        x = normal(200)
        x[[70, 127, 199]] = broken
        check_same(triton_launch, quantizer, x, layout_of(quantizer, (200, 1)), count=2)


def test_floats_are_sent_as_they_are(triton_launch: Any) -> None:
    quantizer = Buckets(bits=4, size=8, dense_vectors=True, dense_below=6)
    x = normal(38)
    x[:6] = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0, 1e-45, LARGEST])
    check_same(
        triton_launch, quantizer, x, layout_of(quantizer, (11,), (3, 7), (1, 5), ()), count=2
    )


@pytest.mark.parametrize("key", [0, 2**31, 2**32 - 1, 2**63 - 1])
@pytest.mark.parametrize("position", [2**31 - 3, 2**32 - 20, 2**33 + 5])
def test_keys_and_positions_may_be_large(triton_launch: Any, key: int, position: int) -> None:
    quantizer = Buckets(bits=4, size=64)
    layout = message_layout(spans([Slot((50, 1), position)], quantizer), 4)
    check_same(triton_launch, quantizer, normal(50), layout, key=key, modes=())


def test_squares_are_added_in_the_same_order(triton_launch: Any) -> None:
    """2^54 + 1 is 2^54 in double: how many of the ones are lost depends on the order."""
    quantizer = PerTensor(bits=2)
    for length in (40, 513, 1500):
        x = torch.ones(length)
        x[0] = 2.0**27
        check_same(triton_launch, quantizer, x, layout_of(quantizer, (length, 1)), modes=())


def test_step_sizes_that_workers_agree_on(triton_launch: Any) -> None:
    """A ring measures first, and encodes by the largest steps of all workers."""
    quantizer, levels = Buckets(bits=8, size=64), 42
    codec = Codec(quantizer, levels=levels, threads=1)
    layout, x = layout_of(quantizer, (100, 2), (9,)), normal(209)
    mine, theirs = Guarded(layout.size, 0), Guarded(layout.size, 0)
    triton_launch.measure(x, layout, levels, "max", mine.inside)
    codec.measure(x, layout, theirs.inside)
    mine.check()
    assert torch.equal(mine.inside, theirs.inside)
    steps = 1.7 * steps_of(mine.inside, layout)
    for message in (mine.inside, theirs.inside):
        message[: FLOAT * layout.steps] = steps.view(torch.uint8)
    codec.encode(x, layout, theirs.inside, KEY, measured=True)
    triton_launch.encode(
        x, layout, bits=8, levels=levels, norm="given", random=True, key=KEY, message=mine.inside
    )
    assert torch.equal(mine.inside, theirs.inside)


def test_a_part_of_a_gradient_touches_nothing_else(triton_launch: Any) -> None:
    quantizer = Buckets(bits=3, size=8)
    slots = slots_of((30, 3), (70,), (90, 1))
    for layout in chunk_layouts(spans(slots, quantizer), quantizer, 3):
        check_same(triton_launch, quantizer, normal(250), layout, modes=("add",))


def test_an_empty_message_changes_nothing(triton_launch: Any) -> None:
    layout, out = layout_of(Buckets(bits=4)), torch.ones(3)
    check_same(triton_launch, Buckets(bits=4), out, layout)


@settings(max_examples=15)
@given(
    case=cases(),
    scale=st.sampled_from([1.0, 1e-30, 1e-38, 1e-42, 1e37]),
    special=st.lists(st.tuples(st.integers(0, 10**6), st.sampled_from(SPECIAL)), max_size=3),
    key=st.integers(0, 2**63 - 10),
    count=st.integers(1, 3),
)
def test_any_combination(
    triton_launch: Any,
    case: tuple[Quantizer, list[Slot], int],
    scale: float,
    special: list[tuple[int, float]],
    key: int,
    count: int,
) -> None:
    quantizer, slots, workers = case
    x = normal(sum(slot.length for slot in slots), scale=scale)
    for place, value in special:
        if len(x):
            x[place % len(x)] = value
    layout = chunk_layouts(spans(slots, quantizer), quantizer, workers)[0]
    check_same(triton_launch, quantizer, x, layout, key=key, modes=("subtract",), count=count)


# ---------------------------------------------------------------- codes do not overflow

TOP_DITHER = 4572620
"""A position whose random bits, with key 0, start with 21 ones: the largest dither of all bits."""


def overlaid(count: int, bits: int) -> MessageLayout:
    """Groups of eight values that all stand at the position with the largest dither."""
    runs = tuple(
        Run(8 * i, 8, 8, FLOAT * i, FLOAT * count + bits * i, TOP_DITHER) for i in range(count)
    )
    return MessageLayout(runs, steps=count, floats=0, codes=bits * count)


def extremes(count: int) -> Tensor:
    """Rows of eight, whose largest value comes first. In most it is the largest float, or up to 13
    units in the last place below, or minus that: there the inverse of a step has fewer digits."""
    x = normal(8 * count).view(count, 8)
    x[:, 0] = x.abs().amax(1) * x[:, 0].sign()
    huge = (torch.tensor(LARGEST).view(torch.int32) - torch.arange(14, dtype=torch.int32)).view(
        torch.float32
    )
    x[:14, 0], x[14:28, 0] = huge, -huge
    return x.flatten()


@pytest.mark.parametrize("bits", [2, 3, 8])
def test_the_largest_dither_does_not_overflow_the_largest_value(
    triton_launch: Any, bits: int
) -> None:
    weyl = torch.tensor(TOP_DITHER * reference.WEYL & reference.MASK)
    assert int(reference._mix(weyl, 0)) >> 11 == 2**21 - 1
    quantizer, layout, x = Buckets(bits=bits, size=8), overlaid(32, bits), extremes(32)
    check_same(triton_launch, quantizer, x, layout, key=0, modes=("set",))
    codec = Codec(quantizer, threads=1)
    message, out = torch.zeros(layout.size, dtype=torch.uint8), torch.zeros(len(x))
    codec.encode(x, layout, message, 0)
    codec.decode(message, layout, out)
    first = out.nan_to_num().view(-1, 8)[:, 0]  # the highest level may be above the largest float
    codes = (first.double() / steps_of(message, layout)).round()
    below = quantizer.levels - codes * x.view(-1, 8)[:, 0].sign()
    assert ((below == 0) | (below == 1)).all()  # a step is rounded up: a value may be just below


@pytest.mark.parametrize("bits", [2, 8])
def test_an_inexact_step_does_not_overflow_a_code(triton_launch: Any, bits: int) -> None:
    """As if a device divided inexactly: steps that are two units in the last place too small."""
    quantizer, layout, x = Buckets(bits=bits, size=8), overlaid(32, bits), extremes(32)
    codec = Codec(quantizer, threads=1)
    message = torch.zeros(layout.size, dtype=torch.uint8)
    codec.measure(x, layout, message)
    message[: 4 * layout.steps] = (steps_of(message, layout).view(torch.int32) - 2).view(
        torch.uint8
    )
    for encode in (triton_launch.encode, reference.encode):
        encode(
            x,
            layout,
            bits=bits,
            levels=quantizer.levels,
            norm="given",
            random=True,
            key=0,
            message=message,
        )
        out = torch.zeros(len(x))
        codec.decode(message, layout, out)
        assert (out * x >= 0).all() and (out.view(-1, 8)[:, 0] != 0).all()


# ------------------------------------------------------------------------------ dispatch


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """The CPU passes for an accelerator."""
    monkeypatch.delenv(kernel.DISABLE_VARIABLE, raising=False)
    kernel.triton_quantizer.cache_clear()
    monkeypatch.setattr(devices, "is_accelerator", lambda device: True)
    yield monkeypatch
    kernel.triton_quantizer.cache_clear()


def results(quantizer: Quantizer) -> list[Tensor]:
    codec, layout = Codec(quantizer), layout_of(quantizer, *SHAPES)
    x, found = normal(LENGTH), list[Tensor]()
    messages = torch.zeros(2, layout.size, dtype=torch.uint8)
    codec.measure(x, layout, messages[0])
    found.append(messages.clone())
    for number, message in enumerate(messages):
        codec.encode(x, layout, message, number)
    out, total = normal(LENGTH, seed=1), torch.zeros(LENGTH)
    codec.decode(messages[0], layout, out, "subtract")
    codec.add_up(messages, layout, total)
    return [*found, messages, out, total]


@pytest.mark.parametrize("name", ["max-64", "vector"])
def test_accelerators_use_the_triton_kernels(
    triton_launch: Any, on_gpu: pytest.MonkeyPatch, name: str
) -> None:
    quantizer = quantizers(4)[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "is_accelerator", lambda device: False)
        kernel.triton_quantizer.cache_clear()
        wanted = results(quantizer)
    kernel.triton_quantizer.cache_clear()
    on_gpu.setattr(devices, "supports_triton", lambda device: True)
    on_gpu.setitem(sys.modules, LAUNCH, triton_launch)
    on_gpu.setattr(reference, "encode", None)
    on_gpu.setattr(reference, "decode", None)
    assert all(map(torch.equal, results(quantizer), wanted))


@pytest.mark.parametrize("name", ["max-64", "vector"])
def test_accelerators_without_triton_use_torch_and_report_it_once(
    on_gpu: pytest.MonkeyPatch, name: str
) -> None:
    quantizer = quantizers(4)[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "is_accelerator", lambda device: False)
        wanted = results(quantizer)
    kernel.triton_quantizer.cache_clear()
    with pytest.warns(UserWarning, match="no Triton quantizer.*does not support this CPU") as told:
        assert all(map(torch.equal, results(quantizer), wanted))
    assert len(told) == 1


def test_missing_triton_is_reported_with_the_reason(on_gpu: pytest.MonkeyPatch) -> None:
    on_gpu.setattr(devices, "supports_triton", lambda device: True)
    on_gpu.setitem(sys.modules, LAUNCH, None)
    with pytest.warns(UserWarning, match=r"no Triton quantizer: .*slower.*Install triton"):
        assert kernel.triton_quantizer(torch.device("cpu")) is None


def test_other_workers_are_silent(on_gpu: pytest.MonkeyPatch) -> None:
    on_gpu.setenv("RANK", "1")
    assert kernel.triton_quantizer(torch.device("cpu")) is None


def test_disabled_kernels_are_not_reported(on_gpu: pytest.MonkeyPatch) -> None:
    on_gpu.setenv(kernel.DISABLE_VARIABLE, "1")
    assert kernel.triton_quantizer(torch.device("cpu")) is None


def test_devices_that_triton_compiles_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability, supported in (((6, 1), False), ((7, 0), True), ((9, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        assert devices.supports_triton(torch.device("cuda", 0)) is supported
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", None)
    assert devices.supports_triton(torch.device("cuda", 0))
    assert not any(devices.supports_triton(torch.device(kind)) for kind in ("cpu", "mps", "xpu"))


@pytest.mark.parametrize("quantizer", [PerTensor(bits=2), Buckets(bits=2, norm="l2", size=64)])
@pytest.mark.parametrize("length", [40, 40_000])
def test_sums_keep_their_order_on_other_devices(
    monkeypatch: pytest.MonkeyPatch, quantizer: Quantizer, length: int
) -> None:
    """The reference adds few terms one by one there, and many on the CPU."""
    layout = layout_of(quantizer, (length, 1))
    x = normal(length) * 10.0 ** (torch.arange(length) % 9)
    found = []
    for elsewhere in (False, True):
        monkeypatch.setattr(devices, "is_accelerator", lambda _, e=elsewhere: e)
        found.append(torch.zeros(layout.size, dtype=torch.uint8))
        reference.measure(x, layout, 1, "l2", found[-1])
    assert torch.equal(*found)
