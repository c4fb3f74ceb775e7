"""What holds of every objective of the registry: to register is to be tested."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from dat.attacks import PGD
from dat.fields import SettingError
from dat.objectives import OBJECTIVES, Adversarial, Batch, Objective
from dat.threat import ThreatModel

CLASSES = 4


class Counted(nn.Module):
    """A small network that counts how often it is called."""

    def __init__(self) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(0)
        self.first = nn.Parameter(torch.randn(9, 8, generator=random, dtype=torch.float64))
        self.second = nn.Parameter(torch.randn(8, CLASSES, generator=random, dtype=torch.float64))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return torch.tanh(x.flatten(1) @ self.first) @ self.second


def variants() -> list[Objective]:
    """Each objective as it comes, and with each number half a point higher."""
    found = []
    for kind in OBJECTIVES.values():
        objective = kind()
        found.append(objective)
        for field in dataclasses.fields(kind):
            value = getattr(objective, field.name)
            if isinstance(value, float):
                with_more = {field.name: value + 0.5}
                found.append(dataclasses.replace(objective, **with_more))
    return found


every_objective = pytest.mark.parametrize("objective", variants(), ids=repr)


def batch(n: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    """Clean images, images near them, labels."""
    random = torch.Generator().manual_seed(1)
    x = torch.rand(n, 1, 3, 3, generator=random, dtype=torch.float64)
    noise = torch.rand(n, 1, 3, 3, generator=random, dtype=torch.float64) - 0.5
    return x, (x + 0.2 * noise).clamp(0, 1), torch.randint(CLASSES, (n,), generator=random)


@every_objective
def test_loss_calls_the_network_once(objective: Objective) -> None:
    net = Counted()
    x, x_adv, y = batch()
    objective.loss(net, Batch.of(x, y), x_adv)
    assert net.calls == 1


@every_objective
def test_outcome_has_one_loss_each_and_the_logits_of_the_adversarial_images(
    objective: Objective,
) -> None:
    net, (x, x_adv, y) = Counted(), batch()
    outcome = objective.loss(net, Batch.of(x, y), x_adv)
    assert outcome.loss.shape == (6,)
    assert outcome.loss.isfinite().all()
    assert outcome.logits.shape == (6, CLASSES)
    if isinstance(objective, Adversarial):
        torch.testing.assert_close(outcome.logits, net(x_adv))


@every_objective
def test_loss_of_a_sample_ignores_its_companions(objective: Objective) -> None:
    net, (x, x_adv, y) = Counted(), batch()
    rows = torch.tensor([4, 1, 2])
    everybody = Batch.of(x, y)
    together = objective.loss(net, everybody, x_adv).loss[rows]
    few = objective.loss(net, everybody.pick(rows), x_adv[rows]).loss
    torch.testing.assert_close(few, together)


@every_objective
def test_gradient_reaches_every_parameter(objective: Objective) -> None:
    net = Counted()
    x, x_adv, y = batch()
    objective.loss(net, Batch.of(x, y), x_adv).loss.sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in net.parameters())


@every_objective
def test_phi_is_one_number_each_that_depends_on_its_own_image_alone(objective: Objective) -> None:
    net, (x, x_adv, y) = Counted(), batch()
    x_adv.requires_grad_(True)
    phi = objective.phi(net, Batch.of(x, y))(x_adv)
    assert phi.shape == (6,)
    (gradient,) = torch.autograd.grad(phi[2], x_adv)
    touched = gradient.flatten(1).abs().sum(1) > 0
    assert touched.nonzero().flatten().tolist() == [2]


@every_objective
def test_ascending_phi_raises_phi_and_the_loss(objective: Objective) -> None:
    net, (x, _, y) = Counted(), batch()
    everybody = Batch.of(x, y)
    phi = objective.phi(net, everybody)
    x_adv = PGD(random_start=False)(phi, x, ThreatModel(eps=0.02))
    assert (phi(x_adv) > phi(x)).all()
    higher, before = (objective.loss(net, everybody, it).loss.sum() for it in (x_adv, x))
    assert higher > before


@every_objective
def test_repr_shows_every_hyperparameter(objective: Objective) -> None:
    for field in dataclasses.fields(objective):
        assert f"{field.name}={getattr(objective, field.name)!r}" in repr(objective)


@pytest.mark.parametrize("kind", OBJECTIVES.values(), ids=OBJECTIVES)
def test_wrong_settings_are_refused(kind: type[Objective]) -> None:
    for field in dataclasses.fields(kind):
        with pytest.raises(SettingError, match=rf"{kind.__name__}\.{field.name} = 'no number'"):
            kind(**{field.name: "no number"})
