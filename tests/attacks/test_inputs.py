"""What attacks refuse: calls that would give wrong results without an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dat
from dat.core.settings import SettingError

THREAT = dat.ThreatModel(eps=0.1)
X = torch.rand(4, 3, 6, 6, generator=torch.Generator().manual_seed(0))
Y = torch.arange(4) % 3
NET = nn.Sequential(nn.Flatten(), nn.Linear(108, 3))
ATTACKS = [dat.PGD(steps=1), dat.FGSM(), dat.APGD(steps=1)]


def mean_loss(x: Tensor) -> Tensor:
    return F.cross_entropy(NET(x), Y)


def good(x: Tensor) -> Tensor:
    return F.cross_entropy(NET(x), Y, reduction="none")


def column(x: Tensor) -> Tensor:
    return good(x).unsqueeze(1)


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: type(attack).__name__)
@pytest.mark.parametrize(
    ("loss", "x", "threat", "message"),
    [
        (NET, X, Y, r"third argument is a Tensor.*\(dat.AttackTarget\(model, y\), x, threat\)"),
        (NET, X, 0.1, r"third argument is a float, must be a dat.ThreatModel"),
        (NET, X, THREAT, r"shape \(4, 3\) for 4 images.*write dat.AttackTarget\(model, y\)"),
        (mean_loss, X, THREAT, r"shape \(\) for 4 images: .* \(4,\); use reduction='none'"),
        (column, X, THREAT, r"shape \(4, 1\) for 4 images: .*\(4,\)"),
        (lambda x: 1.0, X, THREAT, "the loss returns a float: must be a tensor"),
        (dat.AttackTarget(NET, Y, loss=F.cross_entropy), X, THREAT, "use reduction='none'"),
        (good, 255 * X, THREAT, r"pixels from .*must be in \[0, 1\]; divide them by 255"),
        (good, (255 * X).byte(), THREAT, r"images are uint8: .*images.float\(\) / 255"),
        (good, X - 0.5, THREAT, r"pixels from -.*normalize inside the model"),
        (good, torch.full_like(X, float("nan")), THREAT, r"pixels from nan to nan"),
        (good, X.permute(0, 2, 3, 1), THREAT, r"\(4, 6, 6, 3\).*x.permute\(0, 3, 1, 2\)"),
        (good, torch.rand(4, 32, 20, 3), THREAT, r"\(4, 32, 20, 3\).*x.permute"),
        (good, X, dat.ThreatModel(norm="l2", eps=128), r"128: exceeds .* did you mean 128/255\?"),
    ],
)
def test_mistakes_are_refused(attack: Any, loss: Any, x: Any, threat: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attack(loss, x, threat)


@pytest.mark.parametrize("shape", [(2, 3, 8, 8), (2, 1, 1, 3), (2, 5, 4, 4), (2, 16, 4, 4), (2, 7)])
def test_usual_shapes_are_accepted(shape: tuple[int, ...]) -> None:
    x = torch.rand(shape)
    x_adv = dat.PGD(steps=1)(lambda images: images.flatten(1).sum(1), x, THREAT)
    assert x_adv.shape == x.shape


def test_channels_in_the_last_dimension_are_refused_everywhere() -> None:
    x = torch.rand(4, 32, 32, 3)
    message = r"\(4, 32, 32, 3\), which looks like .*; use x.permute\(0, 3, 1, 2\)$"
    for call in (
        lambda: dat.ImageData.of(x, Y),
        lambda: dat.evaluate(NET, (x, Y), threat=THREAT),
        lambda: dat.autoattack(NET, x, Y, eps=0.1),
        lambda: dat.certify(NET, x, Y, sigma=0.1),
        lambda: dat.Trainer(model=NET, data=(x, Y), threat=THREAT, epochs=1, batch=2),
        lambda: dat.attacks.on(NET, "pgd-2")(x, Y),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_radii_beyond_the_pixel_range() -> None:
    with pytest.raises(SettingError, match=r"eps = 8: exceeds .*\[0, 1\]; did you mean 8/255\?"):
        dat.ThreatModel(eps=8)
    with pytest.raises(SettingError, match=r"threat\.eps = 8: .* did you mean 8/255\?"):
        dat.ThreatModel.read({"eps": "8"}, "threat")
    with pytest.raises(SettingError, match=r"did you mean 8/255\?"):
        dat.autoattack(NET, X, Y, eps=8)
    assert dat.ThreatModel(eps=1).eps == 1
    large = dat.ThreatModel(norm="l2", eps=387.9)  # unlimited for 3 x 224 x 224
    large.check_shape((3, 224, 224))
    with pytest.raises(SettingError, match=r"exceeds the l2 distance .* 388"):
        dat.ThreatModel(norm="l2", eps=765).check_shape((3, 224, 224))
