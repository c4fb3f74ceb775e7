"""Ghost batch normalization against torch's batch norm applied to each group."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from dat.distributed import ScopedBatchNorm, WorkerSubgroup, World


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World.join(device="cpu", threads=1) as joined:
        yield joined


def norm(momentum: float | None = 0.1) -> nn.BatchNorm2d:
    layer = nn.BatchNorm2d(3, momentum=momentum).double()
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([0.5, -1.0, 2.0]))
        layer.running_mean.fill_(0.5)  # type: ignore[union-attr]
    return layer


def images(count: int) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    x = torch.rand(count, 3, 4, 4, generator=generator, dtype=torch.float64)
    return x * torch.arange(1, count + 1).reshape(-1, 1, 1, 1)


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize(
    ("count", "group", "sizes"), [(12, 4, (4, 4, 4)), (11, 4, (3, 4, 4)), (5, 4, (2, 3))]
)
@pytest.mark.parametrize("copies", [1, 2, 3])
def test_each_group_is_normalised_by_itself(
    world: World,
    momentum: float | None,
    count: int,
    group: int,
    sizes: tuple[int, ...],
    copies: int,
) -> None:
    """Groups of at most `group` images, each with all copies of its images."""
    x = images(copies * count).contiguous(memory_format=torch.channels_last)
    x.requires_grad_(True)
    grouped, plain = norm(momentum), norm(momentum)
    with ScopedBatchNorm(WorkerSubgroup(world), group=group).patch(grouped, count):
        y = grouped(x)
    weight = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).reshape(y.shape)
    x_gradient, weight_gradient = torch.autograd.grad((y * weight).sum(), (x, grouped.weight))
    expected_y, means, variances = torch.empty_like(y), [], []
    expected_x_gradient, expected_weight_gradient = torch.zeros_like(x), torch.zeros(3).double()
    for images_of_group in torch.arange(count).split(sizes):
        rows = torch.cat([images_of_group + copy * count for copy in range(copies)])
        x_group = x[rows].detach().requires_grad_(True)
        out = plain(x_group)
        expected_y[rows] = out.detach()
        expected_x_gradient[rows], group_gradient = torch.autograd.grad(
            (out * weight[rows]).sum(), (x_group, plain.weight)
        )
        expected_weight_gradient += group_gradient
        means.append(x_group.detach().mean((0, 2, 3)))
        variances.append(x_group.detach().var((0, 2, 3)))
    torch.testing.assert_close(y, expected_y, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(x_gradient, expected_x_gradient, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(weight_gradient, expected_weight_gradient, rtol=1e-10, atol=1e-10)
    share = torch.tensor(sizes).double().unsqueeze(1) / count
    mean = (share * torch.stack(means)).sum(0)
    between = (share * (torch.stack(means) - mean).square()).sum(0)
    variance = (share * torch.stack(variances)).sum(0) + between
    batch_weight = 0.1 if momentum else 1.0
    assert grouped.running_mean is not None and grouped.running_var is not None
    start = torch.full((3,), 0.5, dtype=torch.float64)
    torch.testing.assert_close(grouped.running_mean, start.lerp(mean, batch_weight))
    one = torch.ones(3, dtype=torch.float64)
    torch.testing.assert_close(grouped.running_var, one.lerp(variance, batch_weight))
    assert grouped.num_batches_tracked == 1


def test_a_share_of_one_group_uses_torchs_batch_norm(world: World) -> None:
    layer, plain, x = norm(), norm(), images(4)
    norms = ScopedBatchNorm(WorkerSubgroup(world), group=4)
    with norms.patch(layer, 4):
        assert "forward" not in vars(layer)
        assert torch.equal(layer(x), plain(x))
    with norms.patch(layer, 2):
        assert "forward" not in vars(layer)


def test_in_eval_mode_nothing_is_grouped(world: World) -> None:
    layer, plain, x = norm().eval(), norm().eval(), images(6)
    with ScopedBatchNorm(WorkerSubgroup(world), group=2).patch(layer, 6):
        assert torch.equal(layer(x), plain(x))
    assert layer.num_batches_tracked == 0


def test_half_precision_is_preserved(world: World) -> None:
    layer, x = nn.BatchNorm2d(3), images(6).float()
    with ScopedBatchNorm(WorkerSubgroup(world), group=2).patch(layer, 6):
        expected, half = layer(x), layer(x.bfloat16())
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), expected, rtol=0.02, atol=0.02)


def test_rows_that_belong_to_no_image_are_rejected(world: World) -> None:
    with (
        ScopedBatchNorm(WorkerSubgroup(world), group=2).patch(layer := norm(), 4),
        pytest.raises(ValueError, match=r"train.bn = ghost: a batch norm got 6 rows for 4 images"),
    ):
        layer(images(6))
    assert "forward" not in vars(layer)
