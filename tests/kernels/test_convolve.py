"""The convolution kernels against torch in double precision."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dat.kernels.convolve import (
    NativeConv2d,
    NativePasses,
    convolve,
    input_gradient,
    native_convolutions,
    native_passes,
    supported,
    use_native_convolutions,
    weight_gradient,
)

LAST = torch.channels_last
pytestmark = pytest.mark.skipif(not supported(), reason="no kernel here")


@pytest.fixture(autouse=True, scope="module")
def used() -> Iterator[None]:
    """The kernels are used, also on a CPU with AVX-512, where torch's are as fast."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dat.kernels.convolve.layers.available", lambda: True)
        yield


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=random).to(memory_format=LAST)


def by_torch(x: Tensor, gradient: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
    weight = weight.double().requires_grad_()
    out = nn.functional.conv2d(x.double(), weight, None, stride, padding)
    return torch.autograd.grad(out, weight, gradient.double())[0]


@settings(max_examples=80)
@given(
    images=st.integers(1, 40),
    channels=st.integers(1, 40),
    filters=st.sampled_from([16, 32, 48]),
    size=st.tuples(st.integers(1, 19), st.integers(1, 19)),
    kernel=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    stride=st.integers(1, 3),
    padding=st.integers(0, 3),
)
def test_any_shape(
    images: int,
    channels: int,
    filters: int,
    size: tuple[int, int],
    kernel: tuple[int, int],
    stride: int,
    padding: int,
) -> None:
    rows, columns = (
        (side + 2 * padding - width) // stride + 1 for side, width in zip(size, kernel, strict=True)
    )
    if rows < 1 or columns < 1:
        return
    x = numbers(images, channels, *size)
    gradient = numbers(images, filters, rows, columns, seed=1)
    weight = numbers(filters, channels, *kernel)
    actual = weight_gradient(x, gradient, weight, stride, padding)
    assert actual.is_contiguous(memory_format=LAST)
    expected = by_torch(x, gradient, weight, stride, padding)
    places = x.double().requires_grad_()
    out = nn.functional.conv2d(places, weight.double(), None, stride, padding)
    (by_x,) = torch.autograd.grad(out, places, gradient.double())
    mine = input_gradient(x.shape, gradient, weight, stride, padding)
    assert mine.is_contiguous(memory_format=LAST)
    torch.testing.assert_close(mine.double(), by_x, rtol=1e-4, atol=1e-4)
    scale = (images * rows * columns) ** 0.5
    torch.testing.assert_close(actual.double() / scale, expected / scale, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("size", "channels"), [(40, 16), (4, 64)])
def test_results_do_not_depend_on_the_number_of_threads(
    size: int, channels: int, threads: None
) -> None:
    x, gradient = numbers(9, channels, size, size), numbers(9, 32, size, size, seed=1)
    gradients = []
    for count in (1, 2, 3, 5):
        torch.set_num_threads(count)
        gradients.append(weight_gradient(x, gradient, numbers(32, channels, 3, 3), 1, 1))
    assert all(torch.equal(gradients[0], other) for other in gradients[1:])


@settings(max_examples=60)
@given(
    images=st.integers(1, 30),
    ins=st.sampled_from([16, 32, 48]),
    outs=st.sampled_from([16, 32, 48]),
    size=st.tuples(st.integers(1, 13), st.integers(1, 13)),
    biased=st.booleans(),
)
def test_winograd_with_any_shape(
    images: int, ins: int, outs: int, size: tuple[int, int], biased: bool
) -> None:
    x, weight = numbers(images, ins, *size), numbers(outs, ins, 3, 3, seed=1)
    bias = torch.arange(outs, dtype=torch.float32) if biased else None
    actual = convolve(x, weight, bias)
    assert actual.is_contiguous(memory_format=LAST)
    wide = None if bias is None else bias.double()
    expected = nn.functional.conv2d(x.double(), weight.double(), wide, padding=1)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-4)
    gradient = numbers(images, outs, *size, seed=2)
    places = x.double().requires_grad_()
    out = nn.functional.conv2d(places, weight.double(), padding=1)
    (by_x,) = torch.autograd.grad(out, places, gradient.double())
    mine = convolve(gradient, weight, transposed=True)
    torch.testing.assert_close(mine.double(), by_x, rtol=1e-5, atol=1e-4)


def test_winograd_rounds_no_worse_than_the_direct_sum() -> None:
    x, weight = numbers(8, 128, 8, 8), numbers(128, 128, 3, 3, seed=1)
    exact = nn.functional.conv2d(x.double(), weight.double(), padding=1)
    mine = (convolve(x, weight) - exact).norm() / exact.norm()
    direct = (nn.functional.conv2d(x, weight, padding=1) - exact).norm() / exact.norm()
    assert mine < 2 * direct


def test_results_depend_on_neither_threads_nor_other_images(threads: None) -> None:
    x, weight = numbers(23, 32, 7, 9), numbers(48, 32, 3, 3, seed=1)
    expected = convolve(x, weight)
    for count in (1, 2, 3, 5):
        torch.set_num_threads(count)
        assert torch.equal(convolve(x, weight), expected)
    assert torch.equal(convolve(x[5:17], weight), expected[5:17])


def last(layer: nn.Module) -> nn.Module:
    return layer.to(memory_format=LAST)  # type: ignore[call-overload,no-any-return]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    first, second = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 32, 3, stride=2, bias=False)
    winograd = nn.Conv2d(32, 32, 3, padding=1)
    smooth = (nn.Tanh() for _ in range(3))
    layers = [
        layer for pair in zip((first, second, winograd), smooth, strict=True) for layer in pair
    ]
    return nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(4))


def ready(images: int) -> tuple[nn.Sequential, Tensor]:
    """An initialized network, and enough images for all kernels to be used."""
    net, x = network(), numbers(images, 3, 9, 9).requires_grad_()
    net(x)
    last(net)
    return net, x


def test_a_network_learns_the_same() -> None:
    net, x = ready(40)
    convolutions = [layer for layer in net if native_passes(layer) != NativePasses()]
    assert [native_passes(layer).winograd for layer in convolutions] == [False, False, True]
    values = [x, *net.parameters()]
    expected = torch.autograd.grad(net(x).square().sum(), values)
    with native_convolutions(convolutions):
        loss = net(x).square().sum()
    assert "forward" not in vars(convolutions[0])
    actual = torch.autograd.grad(loss, values)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
        assert one.stride() == other.stride()


def test_a_gradient_is_laid_out_as_its_weights() -> None:
    """Otherwise DDP copies it, with a warning."""
    layer = last(nn.Conv2d(1, 16, 4, stride=2, padding=1))
    with native_convolutions([layer]):
        layer(numbers(40, 1, 8, 8)).sum().backward()
    assert isinstance(layer, nn.Conv2d) and layer.weight.grad is not None
    assert layer.weight.grad.stride() == layer.weight.stride()


def test_second_derivatives() -> None:
    """GradAlign needs them."""
    net, x = ready(40)

    def derivatives() -> tuple[Tensor, ...]:
        (first,) = torch.autograd.grad(net(x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), list(net.parameters()), allow_unused=True)

    expected = derivatives()
    with native_convolutions(layer for layer in net if native_passes(layer) != NativePasses()):
        mine = derivatives()
    for one, other in zip(mine, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_a_frozen_network_is_changed_permanently() -> None:
    net, x = ready(40)
    net.requires_grad_(False)
    expected = net(x)
    (by_x,) = torch.autograd.grad(expected.square().sum(), x)
    assert use_native_convolutions(net) == 2 and isinstance(net[4], NativeConv2d)
    actual = net(x)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    (mine,) = torch.autograd.grad(actual.square().sum(), x)
    torch.testing.assert_close(mine, by_x, rtol=1e-4, atol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):  # torch's own, which has kernels for it
        assert net[4](numbers(40, 32, 4, 4)).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(8, 16, 1),
        nn.Conv2d(8, 24, 3),
        nn.Conv2d(5, 16, 3),
        nn.Conv2d(8, 16, 3, dilation=2),
        nn.Conv2d(16, 16, 3, groups=2),
        nn.Conv2d(8, 16, 3, stride=(1, 2)),
        nn.Conv2d(8, 16, 3, padding="same"),
        nn.Conv2d(8, 16, 3, padding_mode="reflect", padding=1),
        nn.Conv2d(8, 16, 3).double(),
        nn.Linear(8, 16),
    ],
    ids=str,
)
def test_others_are_left_to_torch(layer: nn.Module) -> None:
    assert native_passes(last(nn.Conv2d(8, 16, 3))).weight
    assert native_passes(last(layer)) == NativePasses()
