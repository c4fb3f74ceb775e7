"""YOPO against the paper's algorithm and against PGD; its calls of the network, and its hooks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules

from dat.attacks import PGD, YOPO, AttackTarget, Loss
from dat.core.losses import cross_entropy
from dat.core.rng import Streams
from dat.core.threat import ThreatModel
from tests.attacks.cases import CLASSES, both_norms, images

EPS = 0.1
SHAPE = (6, 1, 4, 4)

both_starts = pytest.mark.parametrize("random_start", [True, False])


class Boom(Exception):
    pass


class Curved(nn.Module):
    """A nonlinear operation before the first layer."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(5 * x)


class Counted(nn.Module):
    """The identity; counts its calls, and fails on request."""

    def __init__(self, fail_on: int = 0) -> None:
        super().__init__()
        self.calls, self.fail_on = 0, fail_on

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.fail_on:
            raise Boom
        return x


def seeded(*layers: nn.Module) -> nn.Sequential:
    """The layers with reproducible random weights, in double precision."""
    net, random = nn.Sequential(*layers).double(), torch.Generator().manual_seed(0)
    for parameter in net.parameters():
        nn.init.normal_(parameter, generator=random)
    return net


def mlp(*, inplace: bool = False) -> nn.Sequential:
    return seeded(nn.Flatten(), nn.Linear(16, 12), nn.ReLU(inplace=inplace), nn.Linear(12, CLASSES))


def convolutional() -> nn.Sequential:
    return seeded(
        nn.Conv2d(1, 3, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(48, CLASSES), nn.Tanh()
    )


def single() -> nn.Sequential:
    return seeded(nn.Flatten(), nn.Linear(16, CLASSES))


def case(net: nn.Module) -> tuple[AttackTarget, Tensor]:
    """A loss, and images with many pixels of exactly 0 or 1."""
    x = images(SHAPE, dtype=torch.float64)
    return AttackTarget(net, torch.arange(len(x)) % CLASSES), x


def by_the_paper(
    first: Callable[[Tensor], Tensor],
    rest: Callable[[Tensor], Tensor],
    x: Tensor,
    y: Tensor,
    threat: ThreatModel,
    *,
    passes: int,
    inner: int,
    step: float,
) -> Tensor:
    """Algorithm 1 of Zhang et al.: p = the gradient at the first layer's output, then `inner` steps
    along the gradient of p . first(x)."""
    x_adv = x
    for _ in range(passes):
        output = first(x_adv).detach().requires_grad_(True)
        (p,) = torch.autograd.grad(cross_entropy(rest(output), y).sum(), output)
        for _ in range(inner):
            at = x_adv.clone().requires_grad_(True)
            (gradient,) = torch.autograd.grad((p * first(at)).sum(), at)
            if threat.norm == "linf":
                ahead = x_adv + step * gradient.sign()
            else:
                ahead = (
                    x_adv + step * gradient / gradient.flatten(1).norm(dim=1)[:, None, None, None]
                )
            x_adv = threat.project(ahead, x)
    return x_adv


@both_norms
@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("inner", [1, 2, 4])
def test_it_is_the_algorithm_of_the_paper(norm: str, passes: int, inner: int) -> None:
    net = seeded(Curved(), nn.Flatten(), nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, CLASSES))
    (goal, x), threat = case(net), ThreatModel(norm=norm, eps=EPS)
    attack = YOPO(steps=passes, inner=inner, step_size=0.03, random_start=False)
    expected = by_the_paper(
        net[:3], net[3:], x, goal.labels, threat, passes=passes, inner=inner, step=0.03
    )
    torch.testing.assert_close(attack(goal, x, threat), expected, rtol=0, atol=1e-12)


@both_norms
@both_starts
@pytest.mark.parametrize("network", [mlp, convolutional, single])
def test_one_inner_step_makes_it_pgd(
    network: Callable[[], nn.Module], norm: str, random_start: bool
) -> None:
    """Both use the same random streams, and so start from the same point."""
    (goal, x), threat = case(network()), ThreatModel(norm=norm, eps=EPS)
    draws = Streams.of(7, "test", index=torch.arange(len(x)))
    yopo = YOPO(steps=4, inner=1, step_size=0.03, random_start=random_start)
    pgd = PGD(steps=4, step_size=0.03, random_start=random_start)
    x_adv, expected = yopo(goal, x, threat, draws), pgd(goal, x, threat, draws)
    torch.testing.assert_close(x_adv, expected, rtol=0, atol=1e-12)


@both_norms
def test_with_two_classes_a_single_layer_makes_it_pgd_with_all_its_steps(norm: str) -> None:
    """The gradient then has the same direction everywhere, so it never goes stale."""
    net = seeded(nn.Flatten(), nn.Linear(16, 2))
    x, threat = images(SHAPE, dtype=torch.float64), ThreatModel(norm=norm, eps=EPS)
    goal = AttackTarget(net, torch.arange(len(x)) % 2)
    yopo = YOPO(steps=2, inner=3, step_size=0.03)(goal, x, threat)
    pgd = PGD(steps=6, step_size=0.03)(goal, x, threat)
    torch.testing.assert_close(yopo, pgd, rtol=0, atol=1e-12)


def test_behind_nothing_but_linear_maps_inner_steps_are_one_long_step() -> None:
    """p . first(x) is then linear, so inner steps equal one longer PGD step; clipping to the box
    and the linf ball gives the same result for one step as for three."""
    goal, x = case(mlp())
    threat = ThreatModel(eps=EPS)
    yopo = YOPO(steps=4, inner=3, step_size=0.01)(goal, x, threat)
    long, short = (PGD(steps=4, step_size=size)(goal, x, threat) for size in (0.03, 0.01))
    torch.testing.assert_close(yopo, long, rtol=0, atol=1e-12)
    assert (yopo - short).abs().max() > 0.01


def test_default_step_size_is_two_and_a_half_radii_over_all_steps() -> None:
    (goal, x), threat = case(convolutional()), ThreatModel(norm="l2", eps=EPS)
    by_default, explicit = YOPO(steps=2, inner=5), YOPO(steps=2, inner=5, step_size=2.5 * EPS / 10)
    assert torch.equal(by_default(goal, x, threat), explicit(goal, x, threat))


@both_norms
def test_inner_steps_raise_the_loss_without_further_passes(norm: str) -> None:
    """With the same step size, passes and start, the inner steps only add strength."""
    net = seeded(Curved(), nn.Flatten(), nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, CLASSES))
    x, threat = images((40, *SHAPE[1:]), dtype=torch.float64), ThreatModel(norm=norm, eps=EPS)
    with torch.no_grad():
        goal = AttackTarget(net, net(x).argmax(1))
    step = EPS / 10
    pgd, yopo = PGD(steps=3, step_size=step), YOPO(steps=3, inner=5, step_size=step)
    assert pgd.cost() == yopo.cost()
    weak, strong = (goal(attack(goal, x, threat)).detach() for attack in (pgd, yopo))
    assert strong.mean() > 1.2 * weak.mean()
    assert (strong > weak).double().mean() > 0.9


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("inner", [1, 4])
def test_inner_steps_run_the_first_layer_alone(passes: int, inner: int) -> None:
    before, first, second, last = (Counted() for _ in range(4))
    net = seeded(
        before, nn.Flatten(), nn.Linear(16, 12), first, nn.Tanh(), nn.Linear(12, CLASSES), last
    )
    net[5].register_forward_pre_hook(lambda module, inputs: second(inputs[0]))
    goal, x = case(net)
    YOPO(steps=passes, inner=inner)(goal, x, ThreatModel(eps=EPS))
    assert before.calls == passes * (1 + inner)
    assert first.calls == second.calls == last.calls == passes


@pytest.mark.parametrize("inner", [1, 3])
def test_an_overwritten_layer_gives_the_same_result(inner: int) -> None:
    """An in-place ReLU, as in folded networks, overwrites the output of the first layer."""
    attack, threat = YOPO(steps=3, inner=inner), ThreatModel(eps=EPS)
    overwritten, plain = (attack(*case(mlp(inplace=inplace)), threat) for inplace in (True, False))
    assert torch.equal(overwritten, plain)


def hooks() -> int:
    return len(modules._global_forward_hooks)


@pytest.mark.parametrize("place", [0, 3])
@pytest.mark.parametrize("call", [1, 2])
def test_no_hook_is_left_after_an_exception(place: int, call: int) -> None:
    """Whether the network fails before its first layer, in a full pass or a short one, or after
    it."""
    layers: list[nn.Module] = [nn.Flatten(), nn.Linear(16, 12), nn.Linear(12, CLASSES)]
    layers.insert(place, Counted(fail_on=call))
    net = seeded(*layers)
    goal, x = case(net)
    before = hooks()
    with pytest.raises(Boom):
        YOPO(steps=3, inner=2)(goal, x, ThreatModel(eps=EPS))
    assert hooks() == before
    assert net(x).shape == (len(x), CLASSES)  # a hook that stops at the first layer would show


def test_hooks_are_there_while_it_runs_and_gone_afterwards() -> None:
    goal, x = case(mlp())
    before, during = hooks(), list[int]()

    def loss(z: Tensor) -> Tensor:
        during.append(hooks())
        return goal(z)

    YOPO(steps=1, inner=2)(loss, x, ThreatModel(eps=EPS))
    assert during == [before + 1] * 3
    assert hooks() == before


def test_hooks_of_others_stay() -> None:
    seen: list[str] = []
    others = modules.register_module_forward_hook(lambda *args: seen.append("called"))
    try:
        goal, x = case(single())
        YOPO(steps=1, inner=1)(goal, x, ThreatModel(eps=EPS))
        seen.clear()
        goal.model(x)
        assert seen == ["called"] * 3
    finally:
        others.remove()


@pytest.mark.parametrize(
    "loss",
    [lambda z: z.flatten(1).sum(1), AttackTarget(nn.Flatten(), torch.zeros(6, dtype=torch.int64))],
    ids=["closure", "target"],
)
def test_a_network_without_a_layer_is_refused(loss: Loss) -> None:
    before = hooks()
    with pytest.raises(ValueError, match="yopo: the network has no convolution or linear layer"):
        YOPO()(loss, images(SHAPE), ThreatModel(eps=EPS))
    assert hooks() == before


def test_the_costs_are_those_of_the_full_passes() -> None:
    assert YOPO(steps=5, inner=3).cost() == YOPO(steps=5, inner=9).cost() == PGD(steps=5).cost()
