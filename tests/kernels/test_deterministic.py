"""The deterministic backward passes give torch's own gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from dat.kernels import deterministic

LAYERS: dict[str, Callable[[Tensor], Tensor]] = {
    "pool to 4 x 4": lambda x: F.adaptive_avg_pool2d(x, 4),
    "pool to 3 x 5": lambda x: F.adaptive_avg_pool2d(x, (3, 5)),
    "pool to more": lambda x: F.adaptive_avg_pool2d(x, 11),
    "bilinear": lambda x: F.interpolate(x, size=(13, 17), mode="bilinear"),
    "bilinear by a factor": lambda x: F.interpolate(x, scale_factor=1.7, mode="bilinear"),
    "bicubic": lambda x: F.interpolate(x, size=(5, 4), mode="bicubic"),
    "bicubic, corners aligned": lambda x: F.interpolate(
        x, scale_factor=(0.6, 2.3), mode="bicubic", align_corners=True
    ),
}


@pytest.fixture
def registered() -> Iterator[None]:
    """On the CPU, where torch has kernels to compare with."""
    deterministic.register("CPU")
    yield
    deterministic.unregister("CPU")


def gradient(layer: Callable[[Tensor], Tensor]) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 7, 9, dtype=torch.float64, generator=generator, requires_grad=True)
    y = layer(x)
    weights = torch.randn(y.shape, dtype=torch.float64, generator=generator)
    return torch.autograd.grad((y * weights).sum(), x)[0]


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_agree_with_torchs(name: str, request: pytest.FixtureRequest) -> None:
    expected = gradient(LAYERS[name])
    request.getfixturevalue("registered")
    actual = gradient(LAYERS[name])
    assert not torch.equal(actual, expected)  # ours were used, which round differently
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_torchs_own_kernels_come_back() -> None:
    layer = LAYERS["bilinear"]
    expected = gradient(layer)
    deterministic.register("CPU")
    deterministic.register("CPU")
    deterministic.unregister("CPU")
    assert torch.equal(gradient(layer), expected)
