"""The layout of messages: their sizes, and every value in exactly one place, however the gradient
is divided."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dat.distributed.quantizers import (
    BITS,
    DENSE,
    QUANTIZERS,
    Buckets,
    PerTensor,
    Quantizer,
    WholeVector,
)
from dat.distributed.wire_format import Slot, Span, chunk_layouts, message_layout, spans
from dat.kernels.quantize.codec import Codec
from dat.kernels.quantize.layout import FLOAT, MessageLayout, Run
from tests.distributed.cases import (
    FEW_BITS,
    KEY,
    bits_of,
    decoded,
    encoded,
    layout_of,
    normal,
    slots_of,
)

SHAPES = ((7, 9), (64,), (3, 5, 11), (1, 1), (513, 2), (), (40,))
VALUES = sum(math.prod(shape) for shape in SHAPES)


def up(value: float) -> int:
    return math.ceil(value)


# ---------------------------------------------------------------------------------- sizes


@pytest.mark.parametrize("bits", FEW_BITS)
@pytest.mark.parametrize("values", [1, 7, 8, 9, 1000, 4096])
def test_a_vector_message_has_the_papers_size(bits: int, values: int) -> None:
    """32 + d + b d bits, with b bits in addition to the sign, rounded up to a byte."""
    b = bits - 1
    size = layout_of(WholeVector(bits=bits), (values,)).size
    assert size == 4 + up(values * bits / 8)
    assert 0 <= 8 * size - (32 + values + b * values) < 8


def test_a_vector_message_has_one_step_for_all_tensors() -> None:
    message = layout_of(WholeVector(bits=4), *SHAPES)
    assert message.runs == (Run(0, VALUES, VALUES, 0, 4, 0),)
    assert message.size == 4 + up(VALUES / 2)


@pytest.mark.parametrize("bits", FEW_BITS)
def test_a_step_for_every_tensor(bits: int) -> None:
    size = sum(4 + up(math.prod(shape) * bits / 8) for shape in SHAPES)
    assert layout_of(PerTensor(bits=bits), *SHAPES).size == size


@pytest.mark.parametrize("bits", FEW_BITS)
@pytest.mark.parametrize("bucket", [8, 64, 512, 1024])
def test_a_step_for_every_full_or_partial_bucket(bits: int, bucket: int) -> None:
    quantizer = Buckets(bits=bits, size=bucket, dense_vectors=False)
    lengths = [math.prod(shape) for shape in SHAPES]
    size = sum(4 * up(length / bucket) + up(length * bits / 8) for length in lengths)
    assert layout_of(quantizer, *SHAPES).size == size


@pytest.mark.parametrize(("values", "size"), [(1, 1), (2, 1), (3, 2), (8, 3), (9, 4), (512, 192)])
def test_three_bits_take_three_bits(values: int, size: int) -> None:
    assert layout_of(Buckets(bits=3), (1, values)).size == 4 + size


@pytest.mark.parametrize("name", QUANTIZERS)
def test_at_32_bits_a_message_holds_only_4_bytes_per_value(name: str) -> None:
    message = layout_of(QUANTIZERS[name](bits=32), *SHAPES)
    assert message.size == 4 * VALUES
    assert (message.steps, message.floats, message.codes) == (0, VALUES, 0)


def test_dense_tensors_take_4_bytes_per_value() -> None:
    vectors = layout_of(PerTensor(bits=8, dense_vectors=True), (5,), (3, 4), ())
    assert vectors.size == 4 * (5 + 1) + 4 + 12
    small = layout_of(PerTensor(bits=8, dense_below=12), (11,), (3, 4), (1, 11))
    assert small.size == 4 * (11 + 11) + 4 + 12


def test_buckets_send_vectors_dense_by_default() -> None:
    assert layout_of(Buckets(bits=8), (512,)).size == 4 * 512
    assert layout_of(Buckets(bits=8, dense_vectors=False), (512,)).size == 4 + 512


@pytest.mark.parametrize("name", QUANTIZERS)
def test_empty_tensors_take_nothing(name: str) -> None:
    for bits in (4, 32):
        quantizer = QUANTIZERS[name](bits=bits)
        assert layout_of(quantizer, (0, 3), (0,)).size == 0
        assert layout_of(quantizer).size == 0
        assert layout_of(quantizer, (0, 3), (2, 3), (0,)).size == layout_of(quantizer, (2, 3)).size


def test_the_order_is_steps_then_floats_then_codes() -> None:
    message = layout_of(Buckets(bits=4, size=8), (2, 5), (3,), (1, 17))
    assert message.runs == (
        Run(start=0, length=10, group=8, floats=0, codes=32, position=0),
        Run(start=10, length=3, group=0, floats=20, codes=37, position=10),
        Run(start=13, length=17, group=8, floats=8, codes=37, position=13),
    )
    assert (message.steps, message.floats, message.codes) == (5, 3, 5 + 9)


def test_the_kernels_table_holds_the_runs() -> None:
    message = layout_of(Buckets(bits=4, size=8), (2, 5), (3,))
    assert message.table.dtype == np.int64 and message.table.flags.c_contiguous
    assert [Run(*row) for row in message.table.tolist()] == list(message.runs)
    assert layout_of(Buckets(bits=4)).table.shape == (0, 6)


# ------------------------------------------------------------------------------------ chunks

shapes = st.lists(
    st.one_of(
        st.tuples(st.integers(0, 60)),
        st.tuples(st.integers(1, 30), st.sampled_from([1, 5, 8, 9, 64, 65])),
        st.just(()),
    ),
    min_size=1,
    max_size=12,
)
workers = st.sampled_from([1, 2, 3, 4, 5, 6, 7, 24])


@st.composite
def any_quantizer(draw: st.DrawFn, bits: Sequence[int] = BITS) -> Quantizer:
    cls = draw(st.sampled_from(list(QUANTIZERS.values())))
    values: dict[str, Any] = {"bits": draw(st.sampled_from(bits))}
    if not issubclass(cls, WholeVector):
        values["dense_vectors"] = draw(st.booleans())
        values["dense_below"] = draw(st.sampled_from([0, 20]))
    if issubclass(cls, Buckets):
        values["size"] = draw(st.sampled_from([8, 64, 512]))
    return cls(**values)


def check_offsets(message: MessageLayout, bits: int) -> None:
    """Steps, floats and codes fill their section of the message, without gaps or overlap."""
    bounds = [0, FLOAT * message.steps, FLOAT * (message.steps + message.floats), message.size]
    assert bounds[-1] - bounds[-2] == message.codes
    sections: list[list[tuple[int, int]]] = [[], [], []]
    for run in message.runs:
        if run.group:
            sections[0].append((run.floats, run.floats + FLOAT * run.groups))
            sections[2].append((run.codes, run.codes + up(run.length * bits / 8)))
        else:
            sections[1].append((run.floats, run.floats + FLOAT * run.length))
    for first, last, ranges in zip(bounds[:-1], bounds[1:], sections, strict=True):
        filled = first
        for start, end in sorted(ranges):
            assert start == filled < end
            filled = end
        assert filled == last


@settings(max_examples=150)
@given(shapes, any_quantizer(), workers)
def test_chunks_contain_every_value_exactly_once(
    shapes: list[tuple[int, ...]], quantizer: Quantizer, workers: int
) -> None:
    slots = slots_of(*shapes)
    messages = chunk_layouts(spans(slots, quantizer), quantizer, workers)
    assert len(messages) == workers
    for message in [*messages, message_layout(spans(slots, quantizer), quantizer.bits)]:
        check_offsets(message, quantizer.bits)
    runs = sorted(run for message in messages for run in message.runs)
    end = 0
    for run in runs:
        assert run.start == end and run.length > 0
        assert run.position == run.start  # the slots are in order
        end += run.length
    assert end == sum(slot.length for slot in slots)


def stretches(
    quantizer: Quantizer, workers: int, *shapes: tuple[int, ...]
) -> list[tuple[int, int]]:
    """Where the runs of all shares begin and end, in the order of the shares."""
    messages = chunk_layouts(spans(slots_of(*shapes), quantizer), quantizer, workers)
    return [(run.start, run.start + run.length) for message in messages for run in message.runs]


@settings(max_examples=200)
@given(shapes, any_quantizer(BITS), workers)
def test_each_share_follows_the_one_before_it(
    shapes: list[tuple[int, ...]], quantizer: Quantizer, workers: int
) -> None:
    """`hybrid` takes neighboring shares for one stretch of the bucket."""
    cuts = stretches(quantizer, workers, *shapes)
    assert [start for start, _ in cuts] == [0, *(end for _, end in cuts)][: len(cuts)]


def test_a_tensor_of_less_than_a_bucket_does_not_overtake_the_next_one() -> None:
    """A single value costs more than its share of a bucket does; it was put into the third share,
    and the values after it into the second."""
    cuts = stretches(Buckets(bits=8), 4, (40, 30), (7,), (513,), (3, 5, 7), (1, 1), (2, 1999))
    assert cuts == sorted(cuts)


@settings(max_examples=100)
@given(shapes, any_quantizer(FEW_BITS), workers, st.randoms(use_true_random=False))
def test_chunks_divide_neither_buckets_nor_bytes(
    shapes: list[tuple[int, ...]], quantizer: Quantizer, workers: int, shuffle: Any
) -> None:
    slots = slots_of(*shapes)
    if not quantizer.whole:
        shuffle.shuffle(slots)
    whole = spans(slots, quantizer)
    for message in chunk_layouts(whole, quantizer, workers):
        for run in message.runs:
            (span,) = [s for s in whole if s.start <= run.start < s.start + s.length]
            offset, end = run.start - span.start, run.start - span.start + run.length
            assert end <= span.length
            assert run.position == span.position + offset
            if not span.group:
                assert run.group == 0
                continue
            assert offset % quantizer.grain == 0
            assert end == span.length or end % quantizer.grain == 0
            assert run.group == quantizer.group(run.length)
            if isinstance(quantizer, Buckets):
                assert run.group == quantizer.size


def largest_grain(whole: Sequence[Span], quantizer: Quantizer) -> float:
    """Bytes of the largest piece that is not divided."""
    largest = 0.0
    for span in whole:
        bytes_per_value = quantizer.bits / 8 + FLOAT / span.group if span.group else FLOAT
        largest = max(largest, bytes_per_value * (quantizer.grain if span.group else 1))
    return largest


@settings(max_examples=150)
@given(shapes, any_quantizer(), workers)
def test_chunks_have_nearly_equal_sizes(
    shapes: list[tuple[int, ...]], quantizer: Quantizer, workers: int
) -> None:
    """Each end of a chunk is at most half a grain from its ideal place, and a run may take up to 5
    bytes more than its share: the step of an incomplete group, and part of a byte."""
    whole = spans(slots_of(*shapes), quantizer)
    messages = chunk_layouts(whole, quantizer, workers)
    sizes = [message.size for message in messages]
    runs = max(len(message.runs) for message in messages)
    assert max(sizes) - min(sizes) <= 2 * largest_grain(whole, quantizer) + 5 * runs


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5, 6, 7, 24])
@pytest.mark.parametrize("bits", BITS)
def test_chunks_of_a_network_differ_by_less_than_a_percent(bits: int, workers: int) -> None:
    """Convolutions and batch norms, as in a small ResNet."""
    layers: list[tuple[int, ...]] = [(64, 3, 3, 3), (64,), (64,)]
    for width in (64, 128, 256):
        layers += [(width, width, 3, 3), (width,), (width,)] * 4
    layers += [(10, 256), (10,)]
    quantizer = Buckets(bits=bits, size=64)
    whole = spans(slots_of(*layers), quantizer)
    sizes = [message.size for message in chunk_layouts(whole, quantizer, workers)]
    assert max(sizes) - min(sizes) <= 2 * largest_grain(whole, quantizer)
    assert max(sizes) < 1.01 * sum(sizes) / workers


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5, 6, 7, 24])
def test_full_buckets_are_divided_evenly(workers: int) -> None:
    """A chunk ends at most half a bucket from its ideal place."""
    quantizer = Buckets(bits=4, size=8)
    for tensors in ((1,), (2, 1), (3, 4), (10,), (5, 1, 1, 9), (24,), (40, 17), (1,) * 100):
        whole = spans(slots_of(*((buckets, 8) for buckets in tensors)), quantizer)
        steps = [message.steps for message in chunk_layouts(whole, quantizer, workers)]
        total = sum(tensors)
        assert sum(steps) == total
        for worker in range(workers):
            assert abs(sum(steps[:worker]) - total * worker / workers) <= 0.5 + 1e-9


def test_one_worker_gets_a_single_message() -> None:
    for quantizer in (Buckets(bits=4, size=8), PerTensor(bits=3), WholeVector(bits=8)):
        whole = spans(slots_of(*SHAPES), quantizer)
        assert chunk_layouts(whole, quantizer, 1) == [message_layout(whole, quantizer.bits)]


def test_with_more_workers_than_values_chunks_may_be_empty() -> None:
    quantizer = Buckets(bits=4, size=8)
    messages = chunk_layouts(spans(slots_of((1, 9)), quantizer), quantizer, 24)
    assert sorted(message.size for message in messages) == [0] * 22 + [5, 8]


# -------------------------------------------------- decoded values do not depend on the chunks


def through_chunks(
    x: Tensor, slots: Sequence[Slot], quantizer: Quantizer, workers: int, key: int = KEY
) -> Tensor:
    codec, out = Codec(quantizer), torch.full_like(x, torch.nan)
    for layout in chunk_layouts(spans(slots, quantizer), quantizer, workers):
        codec.decode(encoded(codec, x, layout, key), layout, out)
    return out


@pytest.mark.parametrize("rounding", ["random", "nearest"])
@pytest.mark.parametrize("norm", ["max", "l2"])
@pytest.mark.parametrize("bits", BITS)
def test_buckets_decode_to_the_same_values_with_any_number_of_chunks(
    bits: int, norm: str, rounding: str
) -> None:
    quantizer = Buckets(bits=bits, norm=norm, rounding=rounding, size=64)
    slots, x = slots_of(*SHAPES), normal(VALUES)
    once = through_chunks(x, slots, quantizer, 1)
    assert bits == DENSE or not torch.equal(once, x)
    for workers in (2, 3, 4, 5, 6, 7, 24):
        assert torch.equal(through_chunks(x, slots, quantizer, workers), once)


@settings(max_examples=40)
@given(
    shapes,
    st.sampled_from(FEW_BITS),
    st.sampled_from([8, 64, 512]),
    workers,
    st.integers(0, 2**63 - 1),
    st.randoms(use_true_random=False),
)
def test_buckets_decode_to_the_same_values_in_any_order(
    shapes: list[tuple[int, ...]], bits: int, size: int, workers: int, key: int, shuffle: Any
) -> None:
    """DDP passes tensors on in its own order, one bucket at a time."""
    quantizer = Buckets(bits=bits, size=size, dense_vectors=False)
    slots, x = slots_of(*shapes), normal(sum(math.prod(shape) for shape in shapes))
    once = through_chunks(x, slots, quantizer, 1, key)

    shuffle.shuffle(slots)
    middle = shuffle.randint(0, len(slots))
    for bucket in (slots[:middle], slots[middle:]):
        if bucket:
            slices = [slice(slot.position, slot.position + slot.length) for slot in bucket]
            values = torch.cat([x[part] for part in slices])
            decoded_bucket = through_chunks(values, bucket, quantizer, workers, key)
            assert torch.equal(decoded_bucket, torch.cat([once[part] for part in slices]))


@pytest.mark.parametrize("bits", FEW_BITS)
def test_tensors_decode_to_the_same_values_in_any_order(bits: int) -> None:
    quantizer, x = PerTensor(bits=bits), normal(VALUES)
    slots = slots_of(*SHAPES)
    once = through_chunks(x, slots, quantizer, 1).split([slot.length for slot in slots])
    parts = x.split([slot.length for slot in slots])
    reversed_order = through_chunks(torch.cat(parts[::-1]), slots[::-1], quantizer, 1)
    assert torch.equal(reversed_order, torch.cat(once[::-1]))


@pytest.mark.parametrize("name", QUANTIZERS)
def test_the_rounding_depends_on_the_position(name: str) -> None:
    """So the tests above would detect a wrong position."""
    quantizer, x = QUANTIZERS[name](bits=4), normal(VALUES)
    codec = Codec(quantizer)
    slots = Slot((VALUES, 1), 0), Slot((VALUES, 1), 8)
    first, second = (message_layout(spans([slot], quantizer), 4) for slot in slots)
    assert first.size == second.size
    assert not torch.equal(encoded(codec, x, first), encoded(codec, x, second))


def test_in_whole_finds_the_values_at_their_position() -> None:
    quantizer = Buckets(bits=8, size=8)
    slots = [Slot((5, 9), 200), Slot((6,), 20), Slot((2, 8), 100)]
    layout = message_layout(spans(slots, quantizer), 8)
    whole = layout.in_whole
    assert [run.start for run in whole.runs] == [200, 20, 100]
    assert replace(whole, runs=layout.runs) == layout
    assert [run._replace(start=0) for run in whole.runs] == [
        run._replace(start=0) for run in layout.runs
    ]
    assert [row[0] for row in whole.table.tolist()] == [200, 20, 100]

    x, codec = normal(67), Codec(quantizer)
    message = encoded(codec, x, layout)
    close, far = decoded(codec, message, layout, 67), decoded(codec, message, whole, 260)
    assert torch.equal(torch.cat([far[200:245], far[20:26], far[100:116]]), close)
    assert far.count_nonzero() == close.count_nonzero() > 0

    # encoding from there gives the same message
    assert torch.equal(encoded(codec, far, whole), encoded(codec, close, layout))


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("name", QUANTIZERS)
def test_32_bits_are_lossless(name: str, workers: int) -> None:
    x = normal(VALUES)
    x[:6] = torch.tensor([-0.0, torch.nan, torch.inf, -torch.inf, 1e-45, 3.4e38])
    out = through_chunks(x, slots_of(*SHAPES), QUANTIZERS[name](bits=32), workers)
    assert torch.equal(bits_of(out), bits_of(x))
