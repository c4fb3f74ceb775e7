"""Lower precisions: attacks must be as strong as in float32."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from dat.attacks import APGD, FAB, PGD, YOPO, Attack, AttackTarget, Square, TargetedAPGD
from dat.attacks.suites import suite_of
from dat.attacks.target import value_and_grad
from dat.core.precision import in_precision
from dat.core.threat import ThreatModel
from dat.data import ImageData
from dat.distributed import World
from dat.evaluation import assess
from tests.zoo import Autocasting, Halving

THREAT = ThreatModel(eps=0.1)
CONFIDENT = 6.0
"""The scale of the last layer, at which most cross-entropies are below 1e-10."""


@pytest.fixture(scope="module")
def world() -> World:
    return World.join(device="cpu")


@pytest.fixture(scope="module")
def digits() -> tuple[Tensor, Tensor]:
    bunch = load_digits()
    images = torch.from_numpy(bunch.images).float().unsqueeze(1) / 16
    return images, torch.from_numpy(bunch.target)


def fitted(make: Callable[[], nn.Sequential], x: Tensor, y: Tensor, steps: int) -> nn.Module:
    """A network whose answers are nearly certain."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = make()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(x[:1400]), y[:1400]).backward()
        optimizer.step()
    with torch.no_grad():
        for parameter in model[-1].parameters():
            parameter.mul_(CONFIDENT)
    return model.eval()


def perceptron() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def convolutional() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(64, 10)),
    )


@pytest.fixture(scope="module")
def confident(digits: tuple[Tensor, Tensor]) -> nn.Module:
    return fitted(perceptron, *digits, steps=150)


@pytest.fixture(scope="module")
def convolved(digits: tuple[Tensor, Tensor]) -> nn.Module:
    """With batch norms."""
    return fitted(convolutional, *digits, steps=40)


@pytest.fixture(scope="module")
def data(digits: tuple[Tensor, Tensor]) -> ImageData:
    x, y = digits
    return ImageData.of(x[1400:1600], y[1400:1600])


ATTACKS: dict[str, Attack] = {
    "pgd": PGD(steps=20),
    "apgd-ce": APGD(steps=5),
    "apgd-dlr": APGD(steps=5, loss="dlr"),
    "apgd-t": TargetedAPGD(steps=3, targets=3),
    "fab-t": FAB(steps=4, targets=3),
    "square": Square(queries=20),
    "yopo": YOPO(steps=3, inner=2),
}


@pytest.mark.parametrize("network", ["confident", "convolved"])
@pytest.mark.parametrize("name", ATTACKS)
def test_attacks_in_float16_agree_with_float32(
    request: pytest.FixtureRequest, data: ImageData, world: World, name: str, network: str
) -> None:
    """Within one image. Without a scale the cross-entropy's gradient is 0 for most images, and the
    attack fails. FAB stops just beyond a decision boundary, which rounding moves."""
    fell, model = {}, request.getfixturevalue(network)
    for precision in ("float32", "float16"):
        suite = suite_of(name, {name: ATTACKS[name]})
        assessment = assess(
            model, data, [suite], threat=THREAT, world=world, precision=precision, check=False
        )
        fell[precision] = int((assessment.suites[name].broken_by > 0).sum())
    assert fell["float32"] > 10
    assert abs(fell["float16"] - fell["float32"]) <= (5 if name == "fab-t" else 1)


@pytest.mark.parametrize("network", ["confident", "convolved"])
def test_robust_accuracy_under_all_parts_of_autoattack_is_that_of_float32(
    request: pytest.FixtureRequest, data: ImageData, world: World, network: str
) -> None:
    model, parts = request.getfixturevalue(network), ("apgd-ce", "apgd-t", "fab-t", "square")
    suite = suite_of("parts", {name: ATTACKS[name] for name in parts})
    ra = [
        assess(
            model, data, [suite], threat=THREAT, world=world, precision=precision, check=False
        ).ra("parts")
        for precision in ("float32", "float16")
    ]
    assert 0 < ra[0] < 90
    assert abs(ra[1] - ra[0]) <= 100 / len(data)


HALVING: dict[str, Callable[[nn.Module], nn.Module]] = {
    "weights": lambda net: net.half(),
    "casts": Halving,
    "casts back": lambda net: Halving(net, back=True),
    "autocasts": Autocasting,
}


@pytest.mark.parametrize("name", HALVING)
def test_models_in_float16_are_broken_as_in_float32(
    confident: nn.Module, data: ImageData, world: World, name: str
) -> None:
    """Whether they take images in float32 or not."""
    suite = suite_of("pgd", {"pgd": PGD(steps=10)})
    models = confident, HALVING[name](copy.deepcopy(confident))
    fell = [
        int(
            (
                assess(model, data, [suite], threat=THREAT, world=world).suites["pgd"].broken_by > 0
            ).sum()
        )
        for model in models
    ]
    assert fell[0] > 20
    assert abs(fell[1] - fell[0]) <= 2


def test_gradients_in_float16_are_those_of_float32(confident: nn.Module, data: ImageData) -> None:
    """In magnitude too, over more orders of magnitude than float16 has."""
    x, y = data.batch(torch.arange(100), torch.device("cpu"))
    plain = value_and_grad(AttackTarget(confident, y), x).gradient.flatten(1)
    gradient = value_and_grad(
        AttackTarget(in_precision(confident, torch.float16), y), x
    ).gradient.flatten(1)
    sizes = plain.abs().amax(1)
    nonzero, reached = sizes > 1e-30, gradient.abs().amax(1)
    assert sizes[nonzero].min() < 1e-12 < 1e-2 < sizes.max()
    unit, other = plain[nonzero] / sizes[nonzero, None], gradient[nonzero] / reached[nonzero, None]
    assert F.cosine_similarity(unit, other).min() > 0.95
    assert (reached[nonzero] / sizes[nonzero]).log2().abs().max() < 3


def test_an_image_does_not_scale_another(confident: nn.Module, data: ImageData) -> None:
    x, y = data.batch(torch.arange(20), torch.device("cpu"))
    network = in_precision(confident, torch.float16)
    together = value_and_grad(AttackTarget(network, y), x).gradient
    alone = torch.cat(
        [
            value_and_grad(AttackTarget(network, y[i : i + 1]), x[i : i + 1]).gradient
            for i in range(20)
        ]
    )
    assert ((together == 0) == (alone == 0)).all()
    assert torch.allclose(together.sign(), alone.sign())


class Loud(nn.Module):
    """Out of the range of float16, in the forward or the backward pass."""

    def __init__(self, gain: float, damping: float) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.gain, self.damping = gain, damping

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x.flatten(1) * self.damping)
        return out * self.gain


@pytest.mark.parametrize(
    ("gain", "damping", "what"), [(1e6, 1.0, "logits"), (1.0, 1e6, "logits"), (6e4, 1e-3, "")]
)
def test_overflow_is_refused(gain: float, damping: float, what: str) -> None:
    x, y = torch.rand(5, 1, 2, 2), torch.zeros(5, dtype=torch.int64)
    network = in_precision(Loud(gain, damping), torch.float16)
    if what:
        with pytest.raises(ValueError, match=f"float16 overflow: {what} of 5 of 5 images are not"):
            value_and_grad(AttackTarget(network, y), x)
    else:
        assert value_and_grad(AttackTarget(network, y), x).gradient.isfinite().all()


def test_a_gradient_that_overflows_is_refused() -> None:
    class Steep(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            half = x.flatten(1).half()
            return ((half - half.detach()) * 6e4) * 6e4 + half.detach()

    x, y = torch.rand(5, 1, 2, 2), torch.zeros(5, dtype=torch.int64)
    with pytest.raises(
        ValueError, match="float16 overflow: gradients of 5 of 5 images are not finite"
    ):
        value_and_grad(AttackTarget(in_precision(Steep(), torch.float16), y), x)


def test_checks_see_what_the_attacks_see(data: ImageData, world: World) -> None:
    """The checks report gradients that vanish inside the network in float16 only."""

    class Faint(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 10)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layer(10 * x.flatten(1))
            return out.float() * 1e-9

    model = Faint()
    x, _ = data.batch(torch.arange(len(data)), torch.device("cpu"))
    with torch.no_grad():
        data = ImageData.of(x, model(x).argmax(1), classes=10)
    suite = [suite_of("pgd", {"pgd": PGD(steps=1)})]
    assessments = {
        precision: assess(model, data, suite, threat=THREAT, world=world, precision=precision)
        for precision in ("float32", "float16")
    }
    assert not any("gradients vanish" in warning for warning in assessments["float32"].warnings)
    assert any("gradients vanish" in warning for warning in assessments["float16"].warnings)


class OfTheBatch(nn.Module):
    """Normalizes by the batch in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.BatchNorm1d(16, track_running_stats=False)
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 16), norm, nn.ReLU(), nn.Linear(16, 10)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("make", "precision"),
    [(OfTheBatch, "float16"), (lambda: OfTheBatch().half(), "float32")],
    ids=["precision", "weights"],
)
def test_images_that_depend_on_each_other_are_refused_in_float16(
    make: Callable[[], nn.Module], precision: str, data: ImageData, world: World
) -> None:
    suite = [suite_of("pgd", {"pgd": PGD(steps=1)})]
    with pytest.raises(ValueError, match=r"depend on the other images .* use bfloat16 or float32"):
        assess(make(), data, suite, threat=THREAT, world=world, precision=precision)


def test_images_may_depend_on_each_other_in_bfloat16(data: ImageData, world: World) -> None:
    suite = [suite_of("pgd", {"pgd": PGD(steps=1)})]
    for precision in ("float32", "bfloat16"):
        assess(OfTheBatch(), data, suite, threat=THREAT, world=world, precision=precision)


def test_a_random_model_is_accepted_in_float16(data: ImageData, world: World) -> None:
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 10)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(F.dropout(x.flatten(1), 0.2, training=True))  # type: ignore[no-any-return]

    suite = [suite_of("pgd", {"pgd": PGD(steps=1)})]
    assess(Dropping(), data, suite, threat=THREAT, world=world, precision="float16")
