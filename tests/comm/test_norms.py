"""Batch normalisation in groups against torch's own on each group."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from dat.comm import Norms, Team, World


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World.join(device="cpu", threads=1) as joined:
        yield joined


def norm(momentum: float | None = 0.1) -> nn.BatchNorm2d:
    made = nn.BatchNorm2d(3, momentum=momentum).double()
    with torch.no_grad():
        made.weight.copy_(torch.tensor([0.5, -1.0, 2.0]))
        made.running_mean.fill_(0.5)  # type: ignore[union-attr]
    return made


def images(count: int) -> Tensor:
    random = torch.Generator().manual_seed(2)
    x = torch.rand(count, 3, 4, 4, generator=random, dtype=torch.float64)
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
    """Groups of at most that many images, each with all its copies."""
    x = images(copies * count).contiguous(memory_format=torch.channels_last)
    x.requires_grad_(True)
    grouped, plain = norm(momentum), norm(momentum)
    with Norms(Team(world), group=group).over(grouped, count):
        y = grouped(x)
    weight = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).reshape(y.shape)
    gradient, by_weight = torch.autograd.grad((y * weight).sum(), (x, grouped.weight))
    expected, means, variances, slopes = torch.empty_like(y), [], [], torch.zeros(3).double()
    wanted = torch.zeros_like(x)
    for rows in torch.arange(count).split(sizes):
        every = torch.cat([rows + it * count for it in range(copies)])
        some = x[every].detach().requires_grad_(True)
        out = plain(some)
        expected[every] = out.detach()
        wanted[every], slope = torch.autograd.grad(
            (out * weight[every]).sum(), (some, plain.weight)
        )
        slopes += slope
        means.append(some.detach().mean((0, 2, 3)))
        variances.append(some.detach().var((0, 2, 3)))
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, wanted, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(by_weight, slopes, rtol=1e-10, atol=1e-10)
    share = torch.tensor(sizes).double().unsqueeze(1) / count
    mean = (share * torch.stack(means)).sum(0)
    between = (share * (torch.stack(means) - mean).square()).sum(0)
    variance = (share * torch.stack(variances)).sum(0) + between
    weight_of_now = 0.1 if momentum else 1.0
    assert grouped.running_mean is not None and grouped.running_var is not None
    start = torch.full((3,), 0.5, dtype=torch.float64)
    torch.testing.assert_close(grouped.running_mean, start.lerp(mean, weight_of_now))
    one = torch.ones(3, dtype=torch.float64)
    torch.testing.assert_close(grouped.running_var, one.lerp(variance, weight_of_now))
    assert grouped.num_batches_tracked == 1


def test_a_share_that_is_one_group_is_left_to_torch(world: World) -> None:
    layer, plain, x = norm(), norm(), images(4)
    norms = Norms(Team(world), group=4)
    with norms.over(layer, 4):
        assert "forward" not in vars(layer)
        assert torch.equal(layer(x), plain(x))
    with norms.over(layer, 2):
        assert "forward" not in vars(layer)


def test_in_eval_mode_nothing_is_grouped(world: World) -> None:
    layer, plain, x = norm().eval(), norm().eval(), images(6)
    with Norms(Team(world), group=2).over(layer, 6):
        assert torch.equal(layer(x), plain(x))
    assert layer.num_batches_tracked == 0


def test_in_half_precision_it_stays_so(world: World) -> None:
    layer, x = nn.BatchNorm2d(3), images(6).float()
    with Norms(Team(world), group=2).over(layer, 6):
        expected, found = layer(x), layer(x.bfloat16())
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected, rtol=0.02, atol=0.02)


def test_rows_that_are_of_no_image_are_refused(world: World) -> None:
    with (
        Norms(Team(world), group=2).over(layer := norm(), 4),
        pytest.raises(ValueError, match=r"train.bn = ghost: a batch norm got 6 rows for 4 images"),
    ):
        layer(images(6))
    assert "forward" not in vars(layer)
