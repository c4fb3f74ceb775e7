"""The kernel for weight gradients, against torch's own in double precision."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dat.convolve import available, faster, takes, weight_gradient

LAST = torch.channels_last
pytestmark = pytest.mark.skipif(not available(), reason="no kernel, or a CPU that needs none")


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


@settings(max_examples=80, deadline=None)
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
    found = weight_gradient(x, gradient, weight, stride, padding)
    assert found.is_contiguous(memory_format=LAST)
    wanted = by_torch(x, gradient, weight, stride, padding)
    scale = (images * rows * columns) ** 0.5
    torch.testing.assert_close(found.double() / scale, wanted / scale, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("size", "channels"), [(40, 16), (4, 64)])
def test_the_number_of_threads_does_not_matter(size: int, channels: int, threads: None) -> None:
    x, gradient = numbers(9, channels, size, size), numbers(9, 32, size, size, seed=1)
    found = []
    for count in (1, 2, 3, 5):
        torch.set_num_threads(count)
        found.append(weight_gradient(x, gradient, numbers(32, channels, 3, 3), 1, 1))
    assert all(torch.equal(found[0], other) for other in found[1:])


def last(layer: nn.Module) -> nn.Module:
    return layer.to(memory_format=LAST)  # type: ignore[call-overload,no-any-return]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    first, second = nn.Conv2d(8, 16, 3, padding=1), nn.Conv2d(16, 32, 3, stride=2, bias=False)
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), nn.Flatten(), nn.LazyLinear(4))


def test_a_network_learns_the_same() -> None:
    net, x = network(), numbers(5, 8, 9, 9).requires_grad_()
    net(x)  # the last layer gets its size
    last(net)
    convolutions = [it for it in net if takes(it)]
    assert len(convolutions) == 2
    values = [x, *net.parameters()]
    wanted = torch.autograd.grad(net(x).square().sum(), values)
    with faster(convolutions):
        loss = net(x).square().sum()
    assert "forward" not in vars(convolutions[0])
    found = torch.autograd.grad(loss, values)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_second_derivatives() -> None:
    """As GradAlign takes them."""
    net, x = network(), numbers(3, 8, 7, 7).requires_grad_()
    net(x)
    last(net)

    def found() -> tuple[Tensor, ...]:
        (first,) = torch.autograd.grad(net(x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), list(net.parameters()), allow_unused=True)

    wanted = found()
    with faster(it for it in net if takes(it)):
        mine = found()
    for one, other in zip(mine, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(8, 16, 1),
        nn.Conv2d(8, 24, 3),
        nn.Conv2d(4, 16, 3),
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
    assert takes(last(nn.Conv2d(8, 16, 3)))
    assert not takes(last(layer))
