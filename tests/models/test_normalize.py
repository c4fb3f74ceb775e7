"""Normalization inside the model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dat.models import Normalize, build_model, normalized

MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.25, 0.5)


def test_each_channel_gets_zero_mean_and_unit_deviation() -> None:
    mean, std = torch.tensor(MEAN), torch.tensor(STD)
    x = torch.stack((mean, mean + std, mean - 2 * std)).reshape(3, 3, 1, 1)
    expected = torch.tensor((0.0, 1.0, -2.0)).reshape(3, 1, 1, 1).expand_as(x)
    torch.testing.assert_close(Normalize(MEAN, STD)(x), expected)


def test_gradient_is_with_respect_to_the_pixels() -> None:
    x = torch.rand(2, 3, 4, 4, requires_grad=True)
    (gradient,) = torch.autograd.grad(Normalize(MEAN, STD)(x).sum(), x)
    torch.testing.assert_close(gradient[0, :, 0, 0], 1 / torch.tensor(STD))


def test_state_dict_names_the_parts_and_carries_the_statistics() -> None:
    net = normalized(build_model("cnn", 3, width=2), MEAN, STD)
    assert {key.split(".")[0] for key in net.state_dict()} == {"normalize", "net"}
    other = normalized(build_model("cnn", 3, width=2, seed=1), (0.0,) * 3, (1.0,) * 3)
    other.load_state_dict(net.state_dict())
    x = torch.rand(2, 3, 8, 8)
    torch.testing.assert_close(other(x), net(x))


def test_whole_numbers_are_accepted() -> None:
    x = torch.rand(2, 1, 4, 4)
    torch.testing.assert_close(normalized(nn.Identity(), [0], [1])(x), x)


def test_repr_shows_the_statistics() -> None:
    assert repr(Normalize((0.5,), (0.25,))) == "Normalize(mean=[0.5], std=[0.25])"


@pytest.mark.parametrize(
    ("mean", "std", "message"),
    [((0.5,), (0.2, 0.2), "one number per channel"), ((0.5,), (0.0,), "must be above 0")],
)
def test_impossible_statistics_are_refused(
    mean: tuple[float, ...], std: tuple[float, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Normalize(mean, std)
