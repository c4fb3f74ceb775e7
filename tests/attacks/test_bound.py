"""`dat.attacks.on`: an attack bound to a model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dat
from dat.attacks import attack_mode, on
from dat.attacks.suites import SUITES, attack_named, names
from tests.zoo import ZOO

EPS = 0.1
X = torch.rand(6, 3, 8, 8, generator=torch.Generator().manual_seed(0))
Y = torch.arange(6) % 3
ATTACKED = [name for name in ZOO if ZOO[name].gradients and name != "no-grad"]


def net() -> nn.Module:
    return ZOO["plain"].make()


def oracle(model: nn.Module, x: Tensor, y: Tensor, attack: dat.Attack) -> Tensor:
    with attack_mode(model):
        return attack(dat.AttackTarget(model, y, until_broken=True), x, dat.ThreatModel(eps=EPS))


@pytest.mark.parametrize("name", ["fgsm", "pgd-4", "pgd-3x2", "cw-3", "apgd-ce-3", "square-5"])
def test_the_bits_of_the_attack_itself(name: str) -> None:
    model = net().train()
    x_adv = on(model, name, eps=EPS)(X, Y)
    assert torch.equal(x_adv, oracle(model, X, Y, attack_named(name, 3)))


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_the_optimum_of_a_linear_model(norm: str) -> None:
    linear = nn.Linear(12, 2)
    nn.init.normal_(linear.weight, generator=torch.Generator().manual_seed(1))
    model, x, y = nn.Sequential(nn.Flatten(), linear), 0.3 + 0.4 * X[:, :, :2, :2], Y % 2
    x_adv = on(model, "pgd-5", norm=norm, eps=EPS, random_start=False)(x, y)
    w = (linear.weight[1 - y] - linear.weight[y]).detach()
    step = w.sign() if norm == "linf" else w / w.norm(dim=1, keepdim=True)
    torch.testing.assert_close(x_adv, x + EPS * step.view_as(x), rtol=0, atol=1e-6)


def test_a_targeted_attack_raises_the_probability_of_its_class() -> None:
    model, targets = net(), (Y + 1) % 3
    x_adv = on(model, "pgd-5", eps=EPS, targeted=True)(X, targets)
    with torch.no_grad():
        before, after = (model(x).log_softmax(1)[torch.arange(6), targets] for x in (X, x_adv))
    assert (after > before).all()


def test_calls_advance_and_batches_do_not_matter() -> None:
    together, apart, again = (on(net(), "pgd-2", eps=EPS, seed=3) for _ in range(3))
    x_adv = together(X, Y)
    assert torch.equal(x_adv, torch.cat([apart(X[:4], Y[:4]), apart(X[4:], Y[4:])]))
    assert not torch.equal(together(X, Y), x_adv)
    assert torch.equal(again(X, Y), x_adv)
    assert not torch.equal(on(net(), "pgd-2", eps=EPS, seed=4)(X, Y), x_adv)


@pytest.mark.parametrize(
    "kind", [name for name in ZOO if ZOO[name].gradients and name != "no-grad"]
)
@pytest.mark.parametrize("training", [False, True])
def test_any_model_is_attacked_and_left_alone(kind: str, training: bool) -> None:
    model = ZOO[kind].make().train(training)
    modes = [module.training for module in model.modules()]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    x_adv = on(model, "pgd-2", eps=EPS)(X, Y)
    assert x_adv.shape == X.shape and x_adv.dtype == X.dtype and not x_adv.requires_grad
    assert 0 < float((x_adv - X).abs().max()) <= EPS + 1e-6
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_model_without_gradients_is_refused_in_one_line() -> None:
    with pytest.raises(ValueError, match=r"no gradient with respect to its input .* square"):
        on(ZOO["detach"].make(), "pgd-2")(X, Y)
    assert on(ZOO["detach"].make(), "square-3")(X, Y).shape == X.shape


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_a_network_with_view_takes_any_layout(layout: torch.memory_format) -> None:
    x = X.contiguous(memory_format=layout)
    expected = on(ZOO["plain"].make(), "pgd-2", eps=EPS)(X, Y)
    torch.testing.assert_close(on(ZOO["view"].make(), "pgd-2", eps=EPS)(x, Y), expected)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inside_of_no_grad(mode: Any) -> None:
    expected = on(net(), "pgd-2", eps=EPS)(X, Y)
    with mode():
        assert torch.equal(on(net(), "pgd-2", eps=EPS)(X.clone(), Y.clone()), expected)


def test_gradients_of_parameters_and_the_global_generator_are_left_alone() -> None:
    model = net()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = torch.get_rng_state()
    on(model, "pgd-2", eps=EPS)(X, Y)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(
        torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters() if p.grad is not None
    )
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_doubles_stay_doubles_and_no_images_are_no_work() -> None:
    attack = on(net(), "pgd-2", eps=EPS)
    assert attack(X.double(), Y.int()).dtype == torch.float64
    assert attack(X[:0], Y[:0]).shape == (0, 3, 8, 8)


@pytest.mark.parametrize("name", [name for name in names() if name not in SUITES])
def test_every_name_is_an_attack(name: str) -> None:
    short = {"square": "square-5", "fgsm": "fgsm"}.get(name, f"{name.removesuffix('-20')}-2")
    assert repr(attack_named(short)) in repr(on(net(), short))
    assert attack_named(name) == on(net(), name).attack


def test_options_are_those_of_the_attack() -> None:
    bound = on(net(), "pgd-7", eps=EPS, step_size=0.02, restarts=2, random_start=False)
    assert bound.attack == dat.PGD(steps=7, step_size=0.02, restarts=2, random_start=False)
    assert on(net(), dat.FGSM(), random_start=False).attack == dat.FGSM(random_start=False)
    assert on(net(), "pgd-7", norm="l2", eps=0.5).threat == dat.ThreatModel(norm="l2", eps=0.5)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("pdg-20", {}, r"attack 'pdg-20': unknown: did you mean pgd-20\?"),
        ("autoattack", {}, "is not a single attack; use dat.autoattack"),
        (20, {}, "attack = 20: must be a name such as 'pgd-20'"),
        ("pgd-20", {"eps": 8}, r"eps = 8: exceeds .*; did you mean 8/255\?"),
        ("pgd-20", {"stepsize": 0.1}, r"PGD has no option 'stepsize': did you mean step_size\?"),
        ("pgd-20", {"restarts": 0}, "restarts = 0: must be at least 1"),
        ("square", {"targeted": True}, "targeted: square chooses its own loss; use fgsm"),
    ],
)
def test_mistakes_in_the_attack(name: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        on(net(), name, **options)


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (255 * X, Y, r"must be in \[0, 1\]; divide them by 255"),
        ((255 * X).byte(), Y, r"images are uint8: .*images.float\(\) / 255"),
        (X.permute(0, 2, 3, 1), Y, r"x.permute\(0, 3, 1, 2\)"),
        (X[:, :1], Y, r"the model cannot take images of shape \(1, 8, 8\)"),
        (X, Y[:5], r"the labels have shape \(5,\) for 6 images: must be one per image"),
        (X, Y.float(), r"the labels are float32: must be integers; use y.long\(\)"),
        (X, Y + 1, r"labels from 1 to 3: the model has 3 classes, labels must be in 0..2"),
        (X, [0, 1, 2], "the labels are a list: must be a tensor"),
    ],
)
def test_mistakes_in_the_call(x: Any, y: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        on(net(), "pgd-2")(x, y)


def test_too_few_classes_for_a_loss() -> None:
    two = nn.Sequential(nn.Flatten(), nn.Linear(192, 2))
    with pytest.raises(ValueError, match="apgd-dlr: needs three classes or more; use apgd-margin"):
        on(two, "apgd-dlr")(X, Y % 2)
