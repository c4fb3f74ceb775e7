"""Properties of every registered attack, with any settings.

Each attack is tested on a plain closure, if that is enough for it, on a target whose loss is
maximized, and on one with `until_broken`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dat.attacks import ATTACKS, Attack, AttackTarget, Loss, attack_mode
from dat.core.losses import cross_entropy
from dat.core.rng import Streams
from dat.core.threat import ThreatModel
from tests.attacks.cases import (
    CLASSES,
    TARGET,
    UNTIL_BROKEN,
    Network,
    answers,
    both_norms,
    cheap,
    goal,
    goals_of,
    images,
    takes_a_closure,
    variants,
    wavy,
)

every_attack = pytest.mark.parametrize("attack", variants(), ids=repr)
every_case = pytest.mark.parametrize(
    ("attack", "kind"),
    [
        pytest.param(attack, kind, id=f"{attack!r}-{kind}")
        for attack in variants()
        for kind in goals_of(attack)
    ],
)


def wavy_case(
    kind: str, shape: tuple[int, ...] = (3, 2, 3, 3), *, dtype: torch.dtype = torch.float32
) -> tuple[Loss, Tensor]:
    """A loss, and images that are correctly classified."""
    x = images(shape, dtype=dtype)
    network = wavy(x[0].numel(), dtype=dtype)
    return goal(kind, network, answers(network, x)), x


class Boom(Exception):
    pass


class Net(nn.Module):
    """Batch norm, dropout, a frozen layer: all that an attack might disturb."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.5)
        self.norm_1d = nn.BatchNorm1d(64)
        self.head = nn.Linear(64, CLASSES)
        self.seen: set[tuple[bool, ...]] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add(tuple(module.training for module in self.modules()))
        x = self.drop(torch.relu(self.norm(self.first(x))))
        logits: Tensor = self.head(self.norm_1d(x.flatten(1)))
        return logits


def used_net() -> Net:
    """A network in the middle of training, with one part in another mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = Net().train()
        net(images((8, 1, 4, 4)))
    for parameter in net.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    net.first.weight.requires_grad_(False)
    net.first.weight.grad = None
    net.norm_1d.eval()
    net.seen.clear()
    return net


def state(net: Net) -> list[object]:
    """Everything that an attack must not change."""
    tensors = {name: value.clone() for name, value in net.state_dict().items()}
    gradients = [None if p.grad is None else p.grad.clone() for p in net.parameters()]
    modes = [module.training for module in net.modules()]
    return [tensors, gradients, modes, [p.requires_grad for p in net.parameters()]]


def failing_on(call: int, network: Network) -> Network:
    calls = 0

    def counted(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == call:
            raise Boom
        return network(x)

    return counted


def modes_of(kind: str) -> Iterator[str]:
    """Misclassified images leave the batch, and a batch of one image has no statistics."""
    yield "eval"
    if kind != UNTIL_BROKEN:
        yield "train"


@every_case
@both_norms
@settings(max_examples=5)
@given(
    eps=st.floats(0, 2) | st.sampled_from([0.0, 1 / 255, 8 / 255, 100.0]),
    shape=st.tuples(*(st.integers(1, top) for top in (3, 3, 4, 4))),
    seed=st.integers(0, 10**6),
    slope=st.sampled_from([1.0, 1e-20, 0.0, 1e4]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_result_is_in_ball_and_box(
    attack: Attack,
    kind: str,
    norm: str,
    eps: float,
    shape: tuple[int, ...],
    seed: int,
    slope: float,
    dtype: torch.dtype,
) -> None:
    x = images(shape, seed=seed, dtype=dtype)
    eps = min(eps, 1.0) if norm == "linf" else eps
    loss = goal(kind, wavy(x[0].numel(), slope=slope, dtype=dtype), torch.arange(len(x)))
    draws = Streams.of(seed, "test", index=torch.arange(len(x)))
    x_adv = attack(loss, x, ThreatModel(norm=norm, eps=eps), draws)
    delta = (x_adv.double() - x.double()).flatten(1)
    size = delta.abs().amax(1) if norm == "linf" else delta.norm(dim=1)
    assert size.max() <= attack.reach * eps + 1e-6
    assert x_adv.min() >= 0 and x_adv.max() <= 1
    assert x_adv.shape == x.shape and x_adv.dtype == dtype


@every_case
@both_norms
def test_eps_zero_gives_the_images(attack: Attack, kind: str, norm: str) -> None:
    loss, x = wavy_case(kind)
    assert torch.equal(attack(loss, x, ThreatModel(norm=norm, eps=0)), x)


@every_case
@both_norms
def test_images_are_neither_changed_nor_differentiated(
    attack: Attack, kind: str, norm: str
) -> None:
    loss, x = wavy_case(kind)
    copy = x.clone()
    x.requires_grad_(True)
    x_adv = attack(loss, x, ThreatModel(norm=norm, eps=0.1))
    assert not x_adv.requires_grad and x_adv.grad_fn is None
    assert x.grad is None and x.requires_grad and torch.equal(x, copy)


@every_case
def test_the_network_is_left_unchanged(attack: Attack, kind: str) -> None:
    for bn in modes_of(kind):
        net = used_net()
        before = state(net)
        with torch.random.fork_rng(devices=[]), attack_mode(net, bn):
            loss = goal(kind, net, torch.arange(6) % CLASSES)
            attack(loss, images((6, 1, 4, 4)), ThreatModel(eps=0.1))
        torch.testing.assert_close(state(net), before, rtol=0, atol=0)
        assert net.seen <= {(bn == "train",) * len(list(net.modules()))}


@every_case
@pytest.mark.parametrize("call", [1, 3])
def test_the_network_is_left_unchanged_after_an_exception(
    attack: Attack, kind: str, call: int
) -> None:
    def fail(net: Net, bn: str) -> None:
        loss = goal(kind, failing_on(call, net), torch.arange(6) % CLASSES)
        with torch.random.fork_rng(devices=[]), attack_mode(net, bn):
            attack(loss, images((6, 1, 4, 4)), ThreatModel(eps=0.1))
            raise Boom  # not every attack calls the network so often

    for bn in modes_of(kind):
        net = used_net()
        before = state(net)
        with pytest.raises(Boom):
            fail(net, bn)
        torch.testing.assert_close(state(net), before, rtol=0, atol=0)
        assert torch.is_grad_enabled()


@every_case
def test_gradients_are_left_alone_outside_of_attack_mode_too(attack: Attack, kind: str) -> None:
    net = used_net().eval()
    before = state(net)
    loss = goal(kind, net, torch.arange(6) % CLASSES)
    attack(loss, images((6, 1, 4, 4)), ThreatModel(eps=0.1))
    torch.testing.assert_close(state(net), before, rtol=0, atol=0)


@every_case
@both_norms
def test_global_generator_is_left_alone(attack: Attack, kind: str, norm: str) -> None:
    (loss, x), threat = wavy_case(kind), ThreatModel(norm=norm, eps=0.1)
    before = torch.get_rng_state()
    first = attack(loss, x, threat)
    assert torch.equal(before, torch.get_rng_state())
    torch.rand(1)
    assert torch.equal(first, attack(loss, x, threat))


@every_case
@both_norms
def test_attack_works_without_gradients_around_it(attack: Attack, kind: str, norm: str) -> None:
    (loss, x), threat = wavy_case(kind), ThreatModel(norm=norm, eps=0.1)
    outside = attack(loss, x, threat)
    with torch.no_grad():
        assert torch.equal(attack(loss, x, threat), outside)
        assert not torch.is_grad_enabled()


@every_case
@both_norms
def test_attack_works_in_inference_mode(attack: Attack, kind: str, norm: str) -> None:
    """On images and labels that were made there, as those of a batch that Lightning validates."""
    (loss, x), threat = wavy_case(kind), ThreatModel(norm=norm, eps=0.1)
    outside = attack(loss, x, threat)
    with torch.inference_mode():
        loss, x = wavy_case(kind)
        x_adv = attack(loss, x, threat)
        assert torch.is_inference_mode_enabled() and not torch.is_grad_enabled()
    assert torch.equal(x_adv, outside) and not x_adv.is_inference()


@every_case
@both_norms
def test_a_sample_ignores_its_companions(attack: Attack, kind: str, norm: str) -> None:
    x = images((5, 2, 3, 3), dtype=torch.float64)
    network, threat = wavy(18, dtype=torch.float64), ThreatModel(norm=norm, eps=0.2)
    y = answers(network, x)
    draws = Streams.of(0, "test", index=torch.tensor([11, 5, 8, 2**40, 0]))
    together = attack(goal(kind, network, y), x, threat, draws)
    for rows in map(torch.tensor, ([2], [3, 4, 1, 0])):
        apart = attack(goal(kind, network, y[rows]), x[rows], threat, draws.select(rows))
        torch.testing.assert_close(apart, together[rows], rtol=0, atol=1e-9)


@every_case
def test_without_draws_the_samples_are_numbered(attack: Attack, kind: str) -> None:
    (loss, x), threat = wavy_case(kind), ThreatModel(eps=0.2)
    draws = Streams.of(0, "attack", index=torch.arange(3))
    assert torch.equal(attack(loss, x, threat), attack(loss, x, threat, draws))


@pytest.mark.parametrize("name", [name for name in ATTACKS if name != "none"])
@both_norms
def test_an_attack_raises_the_loss(name: str, norm: str) -> None:
    attack = cheap(ATTACKS[name](), steps=10, queries=60)
    x, network = 0.5 * images((8, 1, 3, 3)) + 0.25, wavy(9)
    y, threat = answers(network, x), ThreatModel(norm=norm, eps=0.02)
    for kind in (TARGET, UNTIL_BROKEN):
        x_adv = attack(goal(kind, network, y), x, threat)
        raised = cross_entropy(network(x_adv), y) > cross_entropy(network(x), y)
        fine = raised | (answers(network, x_adv) != y)
        if name == "fab" and kind == UNTIL_BROKEN:  # it leaves alone whom it cannot break
            fine |= (x_adv == x).flatten(1).all(1)
        assert fine.all()


@pytest.mark.parametrize("attack", [a for a in variants() if takes_a_closure(a)], ids=repr)
@both_norms
def test_a_target_is_attacked_like_its_loss(attack: Attack, norm: str) -> None:
    x, network = images((3, 2, 3, 3)), wavy(18)
    y, threat = answers(network, x), ThreatModel(norm=norm, eps=0.1)
    bare = attack(lambda z: cross_entropy(network(z), y), x, threat)
    assert torch.equal(attack(AttackTarget(network, y), x, threat), bare)


@pytest.mark.parametrize("attack", [a for a in variants() if not takes_a_closure(a)], ids=repr)
def test_a_closure_without_labels_is_refused_with_what_to_do(attack: Attack) -> None:
    x = images((3, 2, 3, 3))
    with pytest.raises(ValueError, match=r"the network and the labels; give it dat\.AttackTarget"):
        attack(lambda z: z.flatten(1).sum(1), x, ThreatModel())


@every_attack
@both_norms
def test_it_costs_no_more_than_it_says(attack: Attack, norm: str) -> None:
    """A backward pass counts as two forward passes. The pass that ranks the target
    classes and the one that compares attempts are not counted; nor are those that YOPO stops after
    the first layer."""
    x, passes = images((1, 2, 3, 3), dtype=torch.float64), 0
    network = wavy(18, dtype=torch.float64)

    def counted(z: Tensor) -> Tensor:
        nonlocal passes
        logits = network(z)
        passes += 3 if torch.is_grad_enabled() else 1
        return logits

    attack(AttackTarget(counted, answers(network, x)), x, ThreatModel(norm=norm, eps=0.1))
    assert attack.cost() <= passes <= attack.cost() + 1 + len(attack.rounds())


@every_attack
def test_a_round_is_no_more_than_the_whole(attack: Attack) -> None:
    assert all(type(turn) is type(attack) for turn in attack.rounds())
    assert sum(turn.cost() for turn in attack.rounds()) == attack.cost()
    assert all(list(turn.rounds()) == [turn] for turn in attack.rounds())


@every_attack
def test_repr_shows_every_hyperparameter(attack: Attack) -> None:
    shown = [f"{f.name}={getattr(attack, f.name)!r}" for f in dataclasses.fields(attack)]
    assert repr(attack) == f"{type(attack).__name__}({', '.join(shown)})"


@every_attack
def test_attacks_are_frozen_and_equal_by_value(attack: Attack) -> None:
    assert dataclasses.replace(attack) == attack
    assert len({attack, dataclasses.replace(attack)}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        attack.__setattr__("steps", 1)


@every_case
@both_norms
def test_an_empty_batch_stays_empty(attack: Attack, kind: str, norm: str) -> None:
    loss = goal(kind, wavy(4), torch.zeros(0, dtype=torch.int64))
    assert attack(loss, torch.zeros(0, 1, 2, 2), ThreatModel(norm=norm)).shape == (0, 1, 2, 2)
