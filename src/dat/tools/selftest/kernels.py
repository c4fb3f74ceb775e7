"""Kernels against references, through the classes that training uses: whatever these choose on this
device is tested."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dat.core import devices
from dat.core.rng import Streams
from dat.distributed import Buckets, PerTensor, Quantizer
from dat.distributed.quantizers import BITS
from dat.distributed.wire_format import Slot, message_layout, spans
from dat.kernels import convolve
from dat.kernels.quantize import codec, reference
from dat.kernels.quantize.layout import MessageLayout
from dat.optim import OPTIMIZERS
from dat.tools.selftest.result import Context, Result, failed, passed, skipped

PHILOX_ZERO = (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
"""Philox4x32-10 of counter 0 and key 0, from the test vectors of its authors (Random123)."""


def rng(context: Context) -> Result:
    """The random streams give the published numbers, and the same ones as on the CPU."""
    index = torch.tensor([0, 1, 2**32 - 1, 2**32, 2**40 + 7])
    key, shape = context.key("rng"), torch.Size((5, 3, 11, 7))
    for dtype in (torch.float32, torch.float64):
        if dtype == torch.float64 and not devices.has_float64(context.device):
            continue
        first = Streams(0, torch.zeros(1, dtype=torch.int64, device=context.device))
        numbers = first.uniform(torch.Size((1, 4)), dtype).cpu().flatten()
        published = torch.tensor([(word >> 8) * 2.0**-24 for word in PHILOX_ZERO], dtype=dtype)
        if not torch.equal(numbers, published):
            return failed(f"{dtype}: not the published numbers of Philox4x32-10")
        own = Streams(key, index.to(context.device)).uniform(shape, dtype).cpu()
        expected = Streams(key, index).uniform(shape, dtype)
        if not torch.equal(own, expected):
            wrong = int((own != expected).sum())
            return failed(f"{dtype}: {wrong} of {own.numel()} numbers differ from the CPU's")
    return passed("Philox4x32-10: published numbers, equal to the CPU's")


class _Case(NamedTuple):
    name: str
    quantizer: Quantizer


def _quantizers() -> Iterator[_Case]:
    for bits in BITS:
        yield _Case(f"bucket, {bits} bits", Buckets(bits=bits, dense_vectors=False))
        yield _Case(f"tensor, {bits} bits", PerTensor(bits=bits))
    for bits in (4, 8):
        yield _Case(f"bucket, {bits} bits, l2", Buckets(bits=bits, norm="l2"))
        nearest = Buckets(bits=bits, rounding="nearest")
        yield _Case(f"bucket, {bits} bits, nearest", nearest)


SHAPES = ((3, 700), (5,), (1, 1), (2, 333), (513,))
"""Shapes of tensors in a message; their lengths are not multiples of a group, nor of 8."""


def quantizer(context: Context) -> Result:
    """Messages and decoded values equal the torch reference's on the CPU to the last bit."""
    on_cpu = not devices.is_accelerator(context.device)
    if on_cpu and codec.library() is None:
        return skipped("without the C kernel, the torch reference itself is used on the CPU")
    slots, position = [], 0
    for shape in SHAPES:
        slots.append(Slot(shape, position))
        position += slots[-1].length
    x = _values(context, position)
    wrong, count = {}, 0
    for name, chosen in _quantizers():
        layout = message_layout(spans(slots, chosen), chosen.bits)
        count += 1
        try:
            difference = _compare(context, chosen, layout, x)
        except Exception as error:  # the others may still work: report all that do not
            difference = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        if difference:
            wrong[name] = difference
    if wrong:
        name, difference = next(iter(wrong.items()))
        return failed(f"{len(wrong)} of {count} cases differ; {name}: {difference}", wrong=wrong)
    return passed(f"{count} quantizers: messages, values and sums equal the reference's bits")


def _values(context: Context, length: int) -> Tensor:
    """Values of many magnitudes, with zeros and denormals, and the extremes at the ends."""
    generator = context.generator("quantizer")
    magnitude = 10.0 ** (6 * torch.rand(length, generator=generator) - 4)
    x = torch.randn(length, generator=generator) * magnitude
    x[600:1200] = 0.0
    x[1200:1210] = 1e-42
    x[0], x[-1] = -900.0, 900.0
    return x


def _compare(context: Context, chosen: Quantizer, layout: MessageLayout, x: Tensor) -> str:
    """The first difference between the codec on this device and the reference on the CPU."""
    own = codec.Codec(chosen)
    device, rows = context.device, 3
    messages = torch.zeros(rows, layout.size, dtype=torch.uint8)
    on_device = messages.to(device, copy=True)
    for row in range(rows):
        key, scaled = context.key("quantizer", row), x * (row + 1)
        reference.encode(
            scaled,
            layout,
            bits=chosen.bits,
            levels=chosen.levels,
            norm=chosen.scale,
            random=chosen.rounding == "random",
            key=key,
            message=messages[row],
        )
        own.encode(scaled.to(device), layout, on_device[row], key)
        if difference := _first_difference(on_device[row].cpu(), messages[row]):
            return f"encode: {difference}"
    for mode in ("set", "add", "subtract"):
        expected, out = x.clone(), x.to(device, copy=True)
        reference.decode(messages[0], layout, bits=chosen.bits, mode=mode, out=expected)
        own.decode(messages[0].to(device), layout, out, mode)
        if difference := _first_difference(out.cpu().view(torch.int32), expected.view(torch.int32)):
            return f"decode, {mode}: {difference}"
    expected, out = x.clone(), x.to(device, copy=True)
    for row in range(rows):
        mode = "add" if row else "set"
        reference.decode(messages[row], layout, bits=chosen.bits, mode=mode, out=expected)
    own.add_up(messages.to(device), layout, out)
    difference = _first_difference(out.cpu().view(torch.int32), expected.view(torch.int32))
    return f"sum: {difference}" if difference else ""


def _first_difference(actual: Tensor, expected: Tensor) -> str:
    wrong = (actual != expected).nonzero().flatten()
    if not len(wrong):
        return ""
    first = int(wrong[0])
    return f"{len(wrong)} of {len(actual)} entries, first at {first}"


OPTIMIZER_TOLERANCE = 1e-5
"""Largest error of a weight, relative to its layer's largest; measured on a CPU: 1e-7."""


def optimizer(context: Context) -> Result:
    """Three steps of each optimizer, against torch's foreach functions in float64 on the CPU."""
    worst, errors = 0.0, {}
    for name, kind in OPTIMIZERS.items():
        errors[name] = error = _step_error(context, kind)
        worst = max(worst, error) if error == error else error
    if not worst <= OPTIMIZER_TOLERANCE:
        names = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
        return failed(f"relative errors of weights: {names}", errors=errors)
    names = ", ".join(errors)
    return passed(f"{names}: largest relative error of a weight {worst:.1e}", errors=errors)


def _step_error(context: Context, kind: type) -> float:
    """The largest relative error of a weight after three steps."""
    with context.seeded("optimizer"):
        net = nn.Sequential(nn.Conv2d(9, 17, 3), nn.BatchNorm2d(17), nn.Linear(33, 65))
    exact = copy.deepcopy(net).double()
    net = net.to(context.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    steps = [kind(lr=0.1, weight_decay=1e-2)(model) for model in (net, exact)]
    generator = context.generator("optimizer")
    for _ in range(3):
        for own, other in zip(net.parameters(), exact.parameters(), strict=True):
            gradient = torch.randn(own.shape, generator=generator)
            own.grad = torch.empty_like(own).copy_(gradient)
            other.grad = gradient.double()
        for step in steps:
            step.step()
    pairs = zip(net.parameters(), exact.parameters(), strict=True)
    errors = [_relative(own, other) for own, other in pairs]
    return max(errors) if all(error == error for error in errors) else float("nan")


LAYERS = (
    ("few channels", (3, 16, 3, 1, 1), 16),
    ("3 x 3", (32, 48, 3, 1, 1), 17),
    ("strided", (16, 32, 3, 2, 1), 16),
    ("5 x 5", (8, 16, 5, 1, 2), 11),
)
"""Layers by the kernels that they use: channels in and out, kernel, stride, padding; image size."""
CONVOLUTION_ERROR, CONVOLUTION_TF32_ERROR = 1e-5, 5e-3
"""Largest relative errors; measured with torch's kernels on a CPU: 1e-6."""


def convolution(context: Context) -> Result:
    """Forward pass and both gradients of convolutions as updates compute them."""
    errors: dict[str, float] = {}
    native = 0
    for number, (name, sizes, side) in enumerate(LAYERS):
        layer_errors, ours = _convolution_errors(context, number, sizes, side)
        native += ours
        errors |= {f"{name}: {part}": error for part, error in layer_errors.items()}
    limit = context.tolerance(CONVOLUTION_ERROR, CONVOLUTION_TF32_ERROR)
    wrong = {name: error for name, error in errors.items() if not error <= limit}
    whose = f"{native} of {len(LAYERS)} layers by DAT's kernels" if native else "torch's kernels"
    if wrong:
        name, error = next(iter(wrong.items()))
        return failed(f"{name}: relative error {error:.1e}, above {limit:.0e}", errors=errors)
    return passed(f"largest relative error {max(errors.values()):.1e} ({whose})", errors=errors)


def _convolution_errors(
    context: Context, number: int, sizes: tuple[int, ...], side: int
) -> tuple[dict[str, float], bool]:
    """The errors of a layer's outputs and gradients, and whether a kernel of ours computes it."""
    generator = context.generator("convolution", number)
    ins, outs, kernel, stride, padding = sizes
    layer = nn.Conv2d(ins, outs, kernel, stride, padding)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    x = torch.randn(8, sizes[0], side, side, generator=generator)
    exact = copy.deepcopy(layer).double()
    expected = exact(x64 := x.double().requires_grad_(True))
    weights = torch.randn(expected.shape, generator=generator)
    (expected * weights.double()).sum().backward()
    layer = layer.to(context.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = x.to(context.device).contiguous(memory_format=torch.channels_last).requires_grad_(True)
    with convolve.native_convolutions([layer]):
        out = layer(x)
        out.backward(weights.to(context.device))
    pairs = {
        "output": (out, expected),
        "input gradient": (x.grad, x64.grad),
        "weight gradient": (layer.weight.grad, exact.weight.grad),
        "bias gradient": (layer.bias.grad, exact.bias.grad),  # type: ignore[union-attr]
    }
    return {name: _relative(*pair) for name, pair in pairs.items()}, any(
        convolve.native_passes(layer)
    )


def _relative(actual: Tensor | None, expected: Tensor | None) -> float:
    assert actual is not None and expected is not None
    error = (actual.detach().cpu().double() - expected.detach()).abs().max()
    return float(error / expected.detach().abs().max())
