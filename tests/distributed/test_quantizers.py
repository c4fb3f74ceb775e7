"""The guarantees of every quantizer: unbiased, noise within its bound, an error of at most one
step. Every registered quantizer is tested."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import scipy.stats
import torch
from torch import Tensor

from dat.core.rng import derive
from dat.core.settings import SettingError
from dat.distributed.quantizers import BITS, QUANTIZERS, Buckets, PerTensor, Quantizer, WholeVector
from dat.kernels.quantize.codec import Codec
from dat.kernels.quantize.layout import MessageLayout
from tests.distributed.cases import (
    FEW_BITS,
    KEY,
    decoded,
    encoded,
    layout_of,
    normal,
    step_of_each_value,
    steps_of,
)

ROUNDINGS = ("random", "nearest")
SHAPES = ((11, 40), (4, 40))
VALUES = 600
DRAWS = 2000


def make(name: str, bits: int, **values: Any) -> Quantizer:
    """A quantizer by its registered name, or `bucket-l2` for buckets with the L2 norm. Buckets are
    small, so that there are several."""
    cls = QUANTIZERS[name.removesuffix("-l2")]
    if issubclass(cls, Buckets):
        values = {"size": 64, "norm": "l2" if name.endswith("-l2") else "max"} | values
    return cls(bits=bits, **values)


NAMES = [*QUANTIZERS, "bucket-l2"]


def gradient() -> Tensor:
    """Large and small values in the same group; some are zero."""
    x = normal(VALUES)
    x[::3] *= 0.01
    x[::50] = 0.0
    return x


class Noise(NamedTuple):
    """The rounding of one gradient, in closed form: a value lies between two multiples of its step
    and is rounded up with probability `fraction`."""

    step: Tensor
    fraction: Tensor

    @classmethod
    def of(cls, x: Tensor, message: Tensor, layout: MessageLayout) -> Noise:
        step = step_of_each_value(message, layout, len(x))
        ratio = x.double() / step
        return cls(step, ratio - ratio.floor())

    @property
    def variance(self) -> Tensor:
        return self.step.square() * self.fraction * (1 - self.fraction)


def slack(x: Tensor, step: Tensor, bits: int) -> Tensor:
    """The error of float32 arithmetic: the rounding of the inverse, the product and the result and,
    with up to 8 bits, the precision of the fraction."""
    precision = 2.0**-24 if bits == 16 else 2.0 ** -(24 - bits)
    return 3 * 2.0**-24 * x.double().abs() + precision * step


def draws_of(codec: Codec, x: Tensor, layout: MessageLayout, count: int) -> Tensor:
    """The decoded gradient for `count` different keys, one per row."""
    rows = torch.zeros(count, len(x))
    message = torch.zeros(layout.size, dtype=torch.uint8)
    for step, row in enumerate(rows):
        codec.encode(x, layout, message, derive(0, "quantize", step))
        codec.decode(message, layout, row)
    return rows


# -------------------------------------------------------------------------------- unbiased


@pytest.mark.parametrize("bits", FEW_BITS)
@pytest.mark.parametrize("name", NAMES)
def test_random_rounding_is_unbiased_and_as_noisy_as_the_closed_form(name: str, bits: int) -> None:
    quantizer, x = make(name, bits), gradient()
    codec, layout = Codec(quantizer), layout_of(quantizer, *SHAPES)
    noise = Noise.of(x, encoded(codec, x, layout), layout)
    errors = draws_of(codec, x, layout, DRAWS).double() - x.double()

    mean, spread = errors.mean(0), (noise.variance / DRAWS).sqrt()
    assert (mean.abs() <= 6 * spread + slack(x, noise.step, bits)).all()

    noisy = noise.fraction * (1 - noise.fraction) > 0.02
    assert noisy.sum() > 100
    z = mean[noisy] / spread[noisy]
    assert abs(z.square().mean().item() - 1) < 6 * math.sqrt(2 / len(z))  # chi-squared's spread
    assert abs(z.mean().item()) < 6 / math.sqrt(len(z))

    squares = errors.square_()
    energy, expected = squares.sum(1), noise.variance.sum()
    error_of_mean = energy.std() / math.sqrt(DRAWS)
    assert (energy.mean() - expected).abs() < 6 * error_of_mean + 1e-3 * expected
    assert (squares.mean(0)[noisy] / noise.variance[noisy] - 1).abs().max() < 0.75


@pytest.mark.parametrize("bits", FEW_BITS)
@pytest.mark.parametrize("name", NAMES)
def test_random_rounding_is_unbiased_over_positions_too(name: str, bits: int) -> None:
    """One key and one value at all positions; the largest value comes first in every bucket."""
    length, total, count = 64 * 313, 0.0, 0
    quantizer = make(name, bits)
    codec, layout = Codec(quantizer), layout_of(quantizer, (313, 64))
    for value in (0.1, -0.37, 0.77):
        x = torch.full((length,), value)
        x[::64] = 1.0
        message = encoded(codec, x, layout, derive(0, "position", bits))
        noise = Noise.of(x, message, layout)
        error = decoded(codec, message, layout, length).double() - x.double()
        inner = torch.arange(length) % 64 > 0
        z = error[inner].sum() / noise.variance[inner].sum().sqrt()
        bias = slack(x, noise.step, bits)[inner].sum() / noise.variance[inner].sum().sqrt()
        assert z.abs() < 5 + bias
        total, count = total + z.item() ** 2, count + 1
    assert total > 1e-6  # the rounding is random


@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.9])
def test_adjacent_values_are_rounded_independently(fraction: float) -> None:
    up = rounded_up(fraction, KEY)
    for lag in (1, 2, 3, 4, 7, 8, 16, 64, 512):
        assert abs(correlation(up[:-lag], up[lag:])) < 5


@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.9])
def test_keys_are_independent(fraction: float) -> None:
    """Keys of other steps, workers and seeds, and consecutive keys. Two keys with the same lower
    half would not be independent, but keys are hashes."""
    keys = [derive(0, "quantize", 0, 0, 0), derive(0, "quantize", 0, 1, 0), KEY, KEY + 1, KEY + 2]
    keys += [derive(0, "quantize", 0, 0, 1), derive(1, "quantize", 0, 0, 0)]
    ups = [rounded_up(fraction, key) for key in keys]
    for first, second in itertools.combinations(ups, 2):
        assert abs(correlation(first, second)) < 5
        assert abs(correlation(first[1:], second[:-1])) < 5


def test_random_draws_are_uniform() -> None:
    """With the same draw, fractions 1/64, 2/64, ... are rounded up with their own probability."""
    values = torch.arange(1, 64).double() / 64
    ups = torch.stack([rounded_up(float(value), KEY) for value in values])
    assert (ups[1:] >= ups[:-1]).all()  # a draw that rounds a fraction up rounds up any larger one
    highest = ups.sum(0)
    counts = torch.bincount(highest.long(), minlength=64)
    assert scipy.stats.chisquare(counts.numpy()).pvalue > 1e-6


def rounded_up(fraction: float, key: int, length: int = 8192) -> Tensor:
    """1 where a value of `fraction` steps is rounded up, 0 elsewhere."""
    quantizer = Buckets(bits=8, size=length, norm="max")
    x = torch.full((length,), fraction)
    x[0] = quantizer.levels  # makes the step 1
    layout = layout_of(quantizer, (length, 1))
    codec = Codec(quantizer)
    up = decoded(codec, encoded(codec, x, layout, key), layout, length)[1:]
    assert ((up == 0) | (up == 1)).all()
    return up


def correlation(first: Tensor, second: Tensor) -> float:
    """In units of its standard deviation under independence."""
    pearson: float = scipy.stats.pearsonr(first.numpy(), second.numpy()).statistic
    return pearson * math.sqrt(len(first))


# ----------------------------------------------------------------------------------- noise


@pytest.mark.parametrize("bits", FEW_BITS)
@pytest.mark.parametrize("name", NAMES)
def test_every_quantizer_satisfies_the_bound_of_qsgd(name: str, bits: int) -> None:
    """E |Q(x) - x|^2 is at most min(n / s^2, sqrt(n) / s) |x|^2, in every group of n values. The
    bound is proven for the L2 norm; the step size of the max norm is even smaller."""
    quantizer, s = make(name, bits), 2 ** (bits - 1) - 1
    for length, power in itertools.product((1, 10, 64, 5000), (1.0, 3.0)):
        codec, layout = Codec(quantizer), layout_of(quantizer, (length, 1))
        x = normal(length).sign() * normal(length).abs() ** power
        noise = Noise.of(x, encoded(codec, x, layout), layout)
        (run,) = layout.runs
        for start in range(0, length, run.group):
            part = slice(start, min(start + run.group, length))
            n = part.stop - part.start
            bound = min(n / s**2, math.sqrt(n) / s) * x[part].double().square().sum()
            assert noise.variance[part].sum() <= bound * (1 + 1e-5)


@pytest.mark.parametrize("bits", FEW_BITS)
def test_the_max_norm_adds_no_more_noise_than_l2(bits: int) -> None:
    for power in (1.0, 2.0, 4.0):
        x = normal(4096).sign() * normal(4096).abs() ** power
        variances = []
        for norm in ("max", "l2"):
            quantizer = Buckets(bits=bits, norm=norm, size=512)
            layout = layout_of(quantizer, (4096, 1))
            noise = Noise.of(x, encoded(Codec(quantizer), x, layout), layout)
            variances.append(noise.variance.sum())
        assert variances[0] <= variances[1]


@pytest.mark.parametrize("bits", FEW_BITS)
def test_smaller_groups_add_less_noise(bits: int) -> None:
    """Our quantizer, that of the paper's code, and that of the paper's text, in this order."""
    x = torch.cat([normal(4096), normal(4096, scale=0.1, seed=1)])
    quantizers: Sequence[Quantizer] = (
        Buckets(bits=bits, size=512),
        PerTensor(bits=bits),
        WholeVector(bits=bits),
    )
    variances = []
    for quantizer in quantizers:
        layout = layout_of(quantizer, (64, 64), (64, 64))
        noise = Noise.of(x, encoded(Codec(quantizer), x, layout), layout)
        variances.append(noise.variance.sum())
    assert variances[0] < variances[1] < variances[2]


# --------------------------------------------------------------------------- largest error


SCALES = (1.0, 1e-42, 1e-30, 1e30)


@pytest.mark.parametrize("bits", FEW_BITS)
@pytest.mark.parametrize("name", NAMES)
def test_the_error_of_random_rounding_is_less_than_a_step(name: str, bits: int) -> None:
    quantizer = make(name, bits)
    codec, layout = Codec(quantizer), layout_of(quantizer, *SHAPES)
    for key, scale in enumerate(SCALES):
        x = (gradient().double() * scale).float()
        message = encoded(codec, x, layout, key)
        step = step_of_each_value(message, layout, VALUES)
        error = (decoded(codec, message, layout, VALUES).double() - x.double()).abs()
        assert (error <= step + slack(x, step, bits)).all()
        if step.min() > 1e-44:  # smaller steps leave nothing to round
            assert (error > step / 2).any()  # not the nearest


@pytest.mark.parametrize("bits", FEW_BITS)
@pytest.mark.parametrize("name", NAMES)
def test_the_error_of_nearest_rounding_is_at_most_half_a_step(name: str, bits: int) -> None:
    quantizer = make(name, bits, rounding="nearest")
    codec, layout = Codec(quantizer), layout_of(quantizer, *SHAPES)
    for scale in SCALES:
        x = (gradient().double() * scale).float()
        message = encoded(codec, x, layout)
        step = step_of_each_value(message, layout, VALUES)
        error = (decoded(codec, message, layout, VALUES).double() - x.double()).abs()
        assert (error <= step / 2 + slack(x, step, bits)).all()
        assert torch.equal(
            encoded(codec, x, layout, KEY + 1), message
        )  # does not depend on the key


@pytest.mark.parametrize("bits", FEW_BITS)
@pytest.mark.parametrize("name", NAMES)
def test_the_norm_lies_on_the_highest_level(name: str, bits: int) -> None:
    """Hence no value exceeds it, and no step is larger than necessary."""
    quantizer, x = make(name, bits), gradient()
    layout = layout_of(quantizer, *SHAPES)
    steps = steps_of(encoded(Codec(quantizer), x, layout), layout)
    order = torch.inf if quantizer.scale == "max" else 2
    groups: list[Tensor] = []
    for run in layout.runs:
        groups += x[run.start : run.start + run.length].split(run.group)
    for step, group in zip(steps.double(), groups, strict=True):
        exact = torch.linalg.vector_norm(group.double(), order) / (2 ** (bits - 1) - 1)
        assert exact * (1 - 1e-12) <= step <= exact * (1 + 2.0**-23)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("name", NAMES)
def test_zeros_stay_zeros(name: str, bits: int) -> None:
    x = torch.zeros(VALUES)
    x[::2] = -0.0
    for rounding in ROUNDINGS:
        quantizer = make(name, bits, rounding=rounding)
        codec, layout = Codec(quantizer), layout_of(quantizer, *SHAPES)
        message = encoded(codec, x, layout)
        assert not decoded(codec, message, layout, VALUES).any()
        assert bits == 32 or not message.any()


@pytest.mark.parametrize("value", [1.0, -0.3, 1e-45, -1e-40, 3e38])
@pytest.mark.parametrize("name", NAMES)
def test_a_single_value_is_recovered(name: str, value: float) -> None:
    """It is the norm of its group, so it lies on the highest level or slightly below."""
    for bits, rounding in itertools.product(BITS, ROUNDINGS):
        quantizer, x = make(name, bits, rounding=rounding), torch.tensor([value])
        codec, layout = Codec(quantizer), layout_of(quantizer, (1, 1))
        message = encoded(codec, x, layout)
        out = decoded(codec, message, layout, 1)
        if bits == 32:
            assert torch.equal(out, x)
        elif abs(value) > 1e-38:
            assert out.item() == pytest.approx(x.item(), rel=1e-6)
        else:  # among subnormal numbers a step is rounded up by a lot
            step = step_of_each_value(message, layout, 1)
            assert (out.double() - x.double()).abs() < step


@pytest.mark.parametrize("name", NAMES)
def test_the_sign_is_kept(name: str) -> None:
    """A value that is rounded at random keeps its sign or becomes zero."""
    for bits in FEW_BITS:
        quantizer, x = make(name, bits), gradient()
        codec, layout = Codec(quantizer), layout_of(quantizer, *SHAPES)
        out = decoded(codec, encoded(codec, x, layout), layout, VALUES)
        assert (out * x >= 0).all() and (out != 0).any()


# --------------------------------------------------------------------------------- settings


@pytest.mark.parametrize("name", QUANTIZERS)
def test_levels_and_the_sign_fill_the_bits(name: str) -> None:
    levels = {bits: QUANTIZERS[name](bits=bits).levels for bits in FEW_BITS}
    assert levels == {2: 1, 3: 3, 4: 7, 5: 15, 6: 31, 7: 63, 8: 127, 16: 32767}


@pytest.mark.parametrize("name", QUANTIZERS)
def test_only_32_bits_are_dense_and_they_are_the_default(name: str) -> None:
    cls = QUANTIZERS[name]
    assert cls().bits == 32
    assert [bits for bits in BITS if cls(bits=bits).dense] == [32]


@pytest.mark.parametrize("bits", [-8, 0, 1, 9, 10, 12, 15, 17, 24, 31, 33, 64])
@pytest.mark.parametrize("name", QUANTIZERS)
def test_other_bits_are_rejected(name: str, bits: int) -> None:
    allowed = "must be one of 2, 3, 4, 5, 6, 7, 8, 16, 32"
    with pytest.raises(SettingError, match=rf"\w+\.bits = {bits}: {allowed}"):
        QUANTIZERS[name](bits=bits)
    with pytest.raises(SettingError, match=rf"^bits = {bits}: {allowed}$"):
        QUANTIZERS[name].read({"bits": bits})
    with pytest.raises(SettingError, match=rf"^comm\.quantizer\.bits = {bits}: {allowed}$"):
        QUANTIZERS[name].read({"bits": bits}, "comm.quantizer")


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("rounding", "up", "random, nearest"),
        ("rounding", "Random", "did you mean random"),
        ("error_feedback", "maybe", "true or false"),
        ("dense_below", -1, "at least 0"),
        ("bits", "a few", "whole number"),
        ("bits", 4.5, "whole number"),
        ("bits", True, "whole number"),
    ],
)
@pytest.mark.parametrize("name", QUANTIZERS)
def test_errors_name_the_wrong_setting(name: str, field: str, value: object, text: str) -> None:
    with pytest.raises(SettingError, match=rf"{field} = .*{text}"):
        QUANTIZERS[name].read({field: value})


@pytest.mark.parametrize("size", [9, 12, 100, 511, 513])
def test_bucket_sizes_are_multiples_of_8(size: int) -> None:
    with pytest.raises(SettingError, match=rf"size = {size}: must be a multiple of 8"):
        Buckets(bits=4, size=size)


@pytest.mark.parametrize("size", [-8, 0, 7])
def test_bucket_sizes_are_at_least_8(size: int) -> None:
    with pytest.raises(SettingError, match=rf"size = {size}: must be at least 8"):
        Buckets(bits=4, size=size)


def test_buckets_support_two_norms() -> None:
    with pytest.raises(SettingError, match=r"norm = 'l1': must be one of max, l2"):
        Buckets(bits=4, norm="l1")


@pytest.mark.parametrize("values", [{"dense_vectors": True}, {"dense_below": 10}])
def test_the_vector_quantizer_sends_nothing_dense(values: dict[str, Any]) -> None:
    (field,) = values
    with pytest.raises(SettingError, match=rf"{field}.*bucket or tensor"):
        WholeVector(bits=8, **values)


@pytest.mark.parametrize("name", QUANTIZERS)
def test_read_inverts_dump(name: str) -> None:
    quantizer = QUANTIZERS[name](bits=4, rounding="nearest", error_feedback=True)
    assert QUANTIZERS[name].read(quantizer.dump()) == quantizer


def test_the_registry_has_our_quantizer_and_the_papers() -> None:
    assert list(QUANTIZERS) == ["bucket", "tensor", "vector"]
    assert [QUANTIZERS[name]().scale for name in QUANTIZERS] == ["max", "l2", "l2"]
    assert [QUANTIZERS[name]().whole for name in QUANTIZERS] == [False, False, True]
