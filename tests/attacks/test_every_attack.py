"""What holds of every attack of the registry, with any settings: to register is to be tested."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from dat.attacks import ATTACKS, Attack, Loss, attack_mode
from dat.rng import Draws
from dat.threat import ThreatModel


def variants() -> list[Attack]:
    """Each attack as it comes, with each switch thrown, and with each count one higher."""
    found = []
    for kind in ATTACKS.values():
        attack = kind()
        found.append(attack)
        for field in dataclasses.fields(kind):
            value = getattr(attack, field.name)
            if isinstance(value, bool):
                found.append(dataclasses.replace(attack, **{field.name: not value}))
            elif isinstance(value, int):
                found.append(dataclasses.replace(attack, **{field.name: value + 1}))
    return found


every_attack = pytest.mark.parametrize("attack", variants(), ids=repr)
both_norms = pytest.mark.parametrize("norm", ["linf", "l2"])


def images(shape: tuple[int, ...], *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Images of which many pixels are exactly 0 or 1."""
    random = torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    return (2 * random - 0.5).clamp(0, 1)


def wavy_loss(pixels: int, *, slope: float = 1.0, dtype: torch.dtype = torch.float32) -> Loss:
    """Not concave, and of the same form for every sample."""
    w = torch.randn(pixels, 3, generator=torch.Generator().manual_seed(1), dtype=dtype)
    return lambda x: slope * torch.sin(x.flatten(1) @ w).sum(1)


class Boom(Exception):
    pass


class Net(nn.Module):
    """Batch norm, dropout, a frozen layer; everything that an attack might disturb."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.5)
        self.norm_1d = nn.BatchNorm1d(64)
        self.head = nn.Linear(64, 3)
        self.seen: set[tuple[bool, ...]] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add(tuple(module.training for module in self.modules()))
        x = self.drop(torch.relu(self.norm(self.first(x))))
        logits: Tensor = self.head(self.norm_1d(x.flatten(1)))
        return logits


def used_net() -> Net:
    """A net in the middle of a training, with one part in another mode than the rest."""
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
    """Everything that an attack must leave as it finds it."""
    tensors = {name: value.clone() for name, value in net.state_dict().items()}
    gradients = [None if p.grad is None else p.grad.clone() for p in net.parameters()]
    modes = [module.training for module in net.modules()]
    return [tensors, gradients, modes, [p.requires_grad for p in net.parameters()]]


def loss_of(net: Net) -> Loss:
    return lambda x: F.cross_entropy(net(x), torch.arange(len(x)) % 3, reduction="none")


def failing_on(call: int, loss: Loss) -> Loss:
    calls = 0

    def counted(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == call:
            raise Boom
        return loss(x)

    return counted


@every_attack
@both_norms
@settings(derandomize=True, deadline=None, max_examples=20)
@given(
    eps=st.floats(0, 2) | st.sampled_from([0.0, 1 / 255, 8 / 255, 100.0]),
    shape=st.tuples(*(st.integers(1, top) for top in (3, 3, 4, 4))),
    seed=st.integers(0, 10**6),
    slope=st.sampled_from([1.0, 1e-20, 0.0, 1e4]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_result_is_in_ball_and_box(
    attack: Attack,
    norm: str,
    eps: float,
    shape: tuple[int, ...],
    seed: int,
    slope: float,
    dtype: torch.dtype,
) -> None:
    x = images(shape, seed=seed, dtype=dtype)
    loss = wavy_loss(x[0].numel(), slope=slope, dtype=dtype)
    draws = Draws.of(seed, "test", index=torch.arange(len(x)))
    x_adv = attack(loss, x, ThreatModel(norm=norm, eps=eps), draws)
    delta = (x_adv.double() - x.double()).flatten(1)
    size = delta.abs().amax(1) if norm == "linf" else delta.norm(dim=1)
    assert size.max() <= eps + 1e-6
    assert x_adv.min() >= 0 and x_adv.max() <= 1
    assert x_adv.shape == x.shape and x_adv.dtype == dtype


@every_attack
@both_norms
def test_eps_zero_gives_the_images(attack: Attack, norm: str) -> None:
    x = images((3, 2, 3, 3))
    assert torch.equal(attack(wavy_loss(18), x, ThreatModel(norm=norm, eps=0)), x)


@every_attack
@both_norms
def test_images_are_neither_changed_nor_differentiated(attack: Attack, norm: str) -> None:
    x = images((3, 2, 3, 3)).requires_grad_(True)
    copy = x.detach().clone()
    x_adv = attack(wavy_loss(18), x, ThreatModel(norm=norm, eps=0.1))
    assert not x_adv.requires_grad and x_adv.grad_fn is None
    assert x.grad is None and x.requires_grad and torch.equal(x, copy)


@every_attack
@pytest.mark.parametrize("bn", ["eval", "train"])
def test_network_is_found_as_it_was(attack: Attack, bn: str) -> None:
    net = used_net()
    before = state(net)
    with torch.random.fork_rng(devices=[]), attack_mode(net, bn):
        attack(loss_of(net), images((6, 1, 4, 4)), ThreatModel(eps=0.1))
    torch.testing.assert_close(state(net), before, rtol=0, atol=0)
    assert net.seen <= {(bn == "train",) * len(list(net.modules()))}


@every_attack
@pytest.mark.parametrize("bn", ["eval", "train"])
@pytest.mark.parametrize("call", [1, 3])
def test_network_is_found_as_it_was_after_an_exception(attack: Attack, bn: str, call: int) -> None:
    net = used_net()
    before = state(net)
    loss = failing_on(call, loss_of(net))

    def fail() -> None:
        with torch.random.fork_rng(devices=[]), attack_mode(net, bn):
            attack(loss, images((6, 1, 4, 4)), ThreatModel(eps=0.1))
            raise Boom  # not every attack calls the loss so often

    with pytest.raises(Boom):
        fail()
    torch.testing.assert_close(state(net), before, rtol=0, atol=0)


@every_attack
def test_gradients_are_left_alone_outside_of_attack_mode_too(attack: Attack) -> None:
    net = used_net().eval()
    before = state(net)
    attack(loss_of(net), images((6, 1, 4, 4)), ThreatModel(eps=0.1))
    torch.testing.assert_close(state(net), before, rtol=0, atol=0)


@every_attack
@both_norms
def test_global_generator_is_left_alone(attack: Attack, norm: str) -> None:
    before = torch.get_rng_state()
    first = attack(wavy_loss(18), images((3, 2, 3, 3)), ThreatModel(norm=norm, eps=0.1))
    assert torch.equal(before, torch.get_rng_state())
    torch.rand(1)
    again = attack(wavy_loss(18), images((3, 2, 3, 3)), ThreatModel(norm=norm, eps=0.1))
    assert torch.equal(first, again)


@every_attack
@both_norms
def test_attack_works_without_gradients_around_it(attack: Attack, norm: str) -> None:
    def run() -> Tensor:
        return attack(wavy_loss(18), images((3, 2, 3, 3)), ThreatModel(norm=norm, eps=0.1))

    outside = run()
    with torch.no_grad():
        assert torch.equal(run(), outside)
        assert not torch.is_grad_enabled()


@every_attack
@both_norms
@pytest.mark.parametrize("rows", [[2], [4, 0, 3], [3, 4, 1, 0, 2]])
def test_a_sample_ignores_its_companions(attack: Attack, norm: str, rows: list[int]) -> None:
    x = images((5, 2, 3, 3), dtype=torch.float64)
    loss, threat = wavy_loss(18, dtype=torch.float64), ThreatModel(norm=norm, eps=0.2)
    draws = Draws.of(0, "test", index=torch.tensor([11, 5, 8, 2**40, 0]))
    together = attack(loss, x, threat, draws)[rows]
    apart = attack(loss, x[rows], threat, draws.pick(torch.tensor(rows)))
    torch.testing.assert_close(apart, together, rtol=0, atol=1e-9)


@every_attack
def test_without_draws_the_samples_are_numbered(attack: Attack) -> None:
    x, loss, threat = images((3, 2, 3, 3)), wavy_loss(18), ThreatModel(eps=0.2)
    draws = Draws.of(0, "attack", index=torch.arange(3))
    assert torch.equal(attack(loss, x, threat), attack(loss, x, threat, draws))


@pytest.mark.parametrize("name", [name for name in ATTACKS if name != "none"])
@both_norms
def test_an_attack_raises_the_loss(name: str, norm: str) -> None:
    x, loss = 0.5 * images((8, 1, 3, 3)) + 0.25, wavy_loss(9)
    x_adv = ATTACKS[name]()(loss, x, ThreatModel(norm=norm, eps=0.02))
    assert (loss(x_adv) > loss(x)).all()


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


@pytest.mark.parametrize("name", ["fgsm", "pgd"])
def test_an_empty_batch_stays_empty(name: str) -> None:
    x_adv = ATTACKS[name]()(wavy_loss(4), torch.zeros(0, 1, 2, 2), ThreatModel())
    assert x_adv.shape == (0, 1, 2, 2)
