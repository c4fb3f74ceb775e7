"""PGD with early stopping, against a loop over single images."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dat.attacks import PGD, AttackTarget
from dat.core.losses import cross_entropy
from dat.core.rng import Streams
from dat.core.threat import ThreatModel
from dat.objectives import TRADES, Batch
from tests.attacks.cases import Network, answers, both_norms, images, wavy


def one_by_one(
    attack: PGD, network: Network, x: Tensor, y: Tensor, threat: ThreatModel
) -> tuple[Tensor, list[int]]:
    """Algorithm 1 of Zhang et al. 2020; also returns the number of gradients of each image."""
    draws = Streams.of(0, "attack", index=torch.arange(len(x)))
    x_adv, costs = threat.random_start(x, draws), []
    for i in range(len(x)):
        left, cost = attack.patience, 0
        assert left is not None
        for _ in range(attack.steps):
            point = x_adv[i : i + 1].clone().requires_grad_()
            logits, cost = network(point), cost + 1
            (gradient,) = torch.autograd.grad(cross_entropy(logits, y[i : i + 1]).sum(), point)
            if int(logits.argmax()) != int(y[i]):
                if left == 0:
                    break
                left -= 1
            x_adv[i] = threat.ascend(
                point.detach(), gradient, attack.effective_step_size(threat), x[i : i + 1]
            )[0]
        costs.append(cost)
    return x_adv, costs


@both_norms
@settings(max_examples=20)
@given(
    patience=st.integers(0, 4),
    steps=st.integers(1, 6),
    eps=st.floats(0.01, 0.5),
    seed=st.integers(0, 1000),
)
def test_images_stop_independently(
    norm: str, patience: int, steps: int, eps: float, seed: int
) -> None:
    x = images((7, 1, 3, 3), seed=seed, dtype=torch.float64)
    network, threat = wavy(9, dtype=torch.float64), ThreatModel(norm=norm, eps=eps)
    y, attack = answers(network, x), PGD(steps=steps, patience=patience)
    seen = 0

    def counted(z: Tensor) -> Tensor:
        nonlocal seen
        seen += len(z)
        return network(z)

    expected, costs = one_by_one(attack, network, x, y, threat)
    x_adv = attack(AttackTarget(counted, y), x, threat)
    torch.testing.assert_close(x_adv, expected, rtol=0, atol=1e-9)
    assert seen == sum(costs)


def test_enough_patience_is_plain_pgd_and_none_saves_gradients() -> None:
    x, network, threat = images((20, 1, 3, 3)), wavy(9), ThreatModel(eps=0.2)
    loss = AttackTarget(network, answers(network, x))
    plain = PGD(steps=5)(loss, x, threat)
    assert torch.equal(PGD(steps=5, patience=5)(loss, x, threat), plain)
    friendly = PGD(steps=5, patience=0)(loss, x, threat)
    assert (loss(friendly) <= loss(plain) + 1e-6).float().mean() > 0.8
    assert not torch.equal(friendly, plain)


def test_the_kl_of_trades_shrinks_with_the_batch() -> None:
    x, network, threat = (
        images((12, 1, 3, 3), dtype=torch.float64),
        wavy(9, dtype=torch.float64),
        0.3,
    )
    y = answers(network, x)
    y[:3] = (y[:3] + 1) % 5  # wrong from the beginning
    attack, ball = PGD(steps=4, patience=1), ThreatModel(eps=threat)
    together = attack(TRADES().phi(network, Batch.of(x, y)), x, ball)
    draws = Streams.of(0, "attack", index=torch.arange(12))
    for i in range(12):
        row = torch.tensor([i])
        phi = TRADES().phi(network, Batch.of(x[row], y[row]))
        apart = attack(phi, x[row], ball, draws.select(row))
        torch.testing.assert_close(apart, together[row], rtol=0, atol=1e-9)


def test_another_loss_can_be_chosen_with_trades() -> None:
    x, network = images((6, 1, 3, 3)), wavy(9)
    y, threat = answers(network, x), ThreatModel(eps=0.1)
    trades = PGD(steps=3, loss="margin")(TRADES().phi(network, Batch.of(x, y)), x, threat)
    assert torch.equal(trades, PGD(steps=3, loss="margin")(AttackTarget(network, y), x, threat))


def test_a_bare_loss_is_refused() -> None:
    x = images((3, 1, 3, 3))
    with pytest.raises(ValueError, match=r"pgd\.patience: needs the network and the labels"):
        PGD(patience=0)(lambda z: z.flatten(1).sum(1), x, ThreatModel())
