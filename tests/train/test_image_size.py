"""Smaller training images first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dat.attacks import PGD
from dat.core.settings import SettingError
from dat.data import ImageData
from dat.distributed import World
from dat.models import build_model
from dat.objectives import Smooth
from dat.optim import SGD
from dat.train import Trainer
from dat.train.image_size import ImageSize, scaled
from tests.trainers import make_trainer


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World.join(device="cpu", threads=1) as joined:
        yield joined


class Pooled(nn.Module):
    """Takes images of any size, and records it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 4, 3, padding=1), nn.Linear(4, 3)
        self.sizes = list[tuple[int, int]]()

    def forward(self, x: Tensor) -> Tensor:
        self.sizes.append((x.shape[2], x.shape[3]))
        logits: Tensor = self.head(self.conv(x).relu().mean((2, 3)))
        return logits


def trainer(world: World, **settings: Any) -> Trainer:
    images = torch.rand(24, 1, 8, 12, generator=torch.Generator().manual_seed(0))
    data = ImageData.of(images, torch.arange(24) % 3)
    plain: dict[str, Any] = {"model": Pooled(), "attack": PGD(steps=2), "epochs": 4, "batch": 12}
    optimizer = SGD(lr=0.01)
    return make_trainer(
        data=data, holdout=data, optimizer=optimizer, world=world, **plain | settings
    )


def test_sizes_follow_the_schedule() -> None:
    phases = ImageSize(sizes=(84, 112), until=(80, 95))
    assert [phases.size(epoch) for epoch in (0, 79, 80, 94, 95, 99)] == [
        84,
        84,
        112,
        112,
        None,
        None,
    ]
    assert ImageSize().size(0) is None


def test_attack_and_update_see_small_images_and_evaluation_full_ones(world: World) -> None:
    made = trainer(world, resize=(4, 6), resize_until=(1, 3))
    for epoch, size in enumerate([(4, 6), (6, 9), (6, 9), (8, 12)]):
        made._join() if epoch == 0 else None
        batch = made.worker.draw(epoch, 0)
        assert tuple(batch.x.shape[2:]) == size
        assert made.worker.perturb(batch, epoch, 0).shape == batch.x.shape
    model = made.model
    assert isinstance(model, Pooled)
    model.sizes.clear()
    made.fit()
    sizes = [
        size
        for number, size in enumerate(model.sizes)
        if [size] != model.sizes[number - 1 : number]
    ]
    full = (8, 12)
    assert sizes == [full, (4, 6), full, (6, 9), full, (6, 9), full]


def test_images_are_scaled_as_by_torch_within_their_range() -> None:
    x = torch.rand(3, 3, 9, 15, generator=torch.Generator().manual_seed(0))
    small = scaled(x, 3)
    assert small.shape == (3, 3, 3, 5)
    # with a factor of 3, the antialiased filter is a triangle of five pixels in each direction
    triangle = torch.tensor([1.0, 2, 3, 2, 1]) / 9
    inner = torch.einsum("ncij,i,j->nc", x[:, :, 2:7, 5:10], triangle, triangle)
    torch.testing.assert_close(small[:, :, 1, 2], inner)
    assert scaled(x, 9) is x
    white = scaled(torch.ones(1, 1, 7, 11), 5)
    assert white.min() > 0.999 and white.max() <= 1


def test_noise_has_the_size_of_the_images(world: World) -> None:
    objective = Smooth(copies=2, votes=1)
    made = trainer(world, objective=objective, resize=(4,), resize_until=(1,), epochs=2)
    assert len(made.fit()) == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"resize": (4,)}, "train.resize = 4: train.resize and .* the same length, not 1 and 0"),
        ({"resize_until": (2,)}, "train.resize_until = 2: .* the same length, not 0 and 1"),
        ({"resize": (4, 6), "resize_until": (2, 2)}, "train.resize_until = 2, 2: must increase"),
        ({"resize": (4,), "resize_until": (4,)}, "resize_until = 4: must be below train.epochs"),
        ({"resize": (9,), "resize_until": (1,)}, "train.resize = 9: images are only 8 pixels"),
        (
            {"resize": (4,), "resize_until": (1,), "attack": PGD(carry=True)},
            "train.resize = 4: attack.carry needs images of one size",
        ),
        (
            {
                "resize": (4,),
                "resize_until": (1,),
                "model": nn.Sequential(nn.Flatten(), nn.Linear(96, 3)),
            },
            r"train.resize = 4: the network does not take images of 4 x 6 pixels \(mat1",
        ),
    ],
)
def test_wrong_settings_are_refused(world: World, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        trainer(world, **settings)


@pytest.mark.parametrize("name", ["preact-resnet18", "vit-4", "wrn-28-10"])
def test_our_networks_take_any_size(world: World, name: str) -> None:
    model = build_model(name, 3, channels=1, width=8 if name != "wrn-28-10" else 1)
    trainer(world, model=model, resize=(5, 7), resize_until=(1, 2))
