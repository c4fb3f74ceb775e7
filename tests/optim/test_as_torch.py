"""Our optimizers are used as torch's own: parameters first, schedulers, scaling, state dicts."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from collections.abc import Callable
from typing import Any, get_type_hints

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import dat
from dat.optim import (
    AdamDirection,
    AdamW,
    ClassicLARS,
    LAMBSettings,
    Layerwise,
    MomentumDirection,
    MuonDirection,
    OptimizerSettings,
)
from tests.optim.cases import assert_same, give_gradients, layers, train, weights_of

Make = Callable[[Any], torch.optim.Optimizer]
CLASSES: dict[str, Make] = {
    "LAMB": lambda params: dat.LAMB(params, lr=0.05),
    "LAMB, modern": lambda params: dat.LAMB(params, lr=0.05, preset="modern"),
    "LARS": lambda params: dat.LARS(params, lr=0.05),
    "classic LARS": lambda params: ClassicLARS(params, lr=0.05, adapt_1d=False),
    "LALR": lambda params: dat.LALR(params, lr=0.05),
    "LALR, momentum": lambda params: dat.LALR(params, MomentumDirection(), lr=0.05),
    "LALR, Muon": lambda params: dat.LALR(params, MuonDirection(), lr=0.05, weight_decay=0.1),
    "Muon": lambda params: dat.Muon(params, lr=0.05),
    "Muon, bfloat16": lambda params: dat.Muon(params, lr=0.05, precision="bfloat16"),
}
every_class = pytest.mark.parametrize("make", CLASSES.values(), ids=CLASSES)


def copied(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)


def test_parameters_come_first() -> None:
    """What everybody types first."""
    model = layers()
    optimizer = dat.LAMB(model.parameters(), lr=0.1)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert isinstance(optimizer, dat.LAMB) and isinstance(optimizer, dat.LALR)
    assert issubclass(dat.LAMB, torch.optim.Optimizer)
    assert dat.LAMB(params=model.parameters(), lr=0.1).param_groups[0]["lr"] == 0.1
    assert dat.LAMB(model.parameters(), 0.1).param_groups[0]["lr"] == 0.1


def test_without_parameters_they_are_settings() -> None:
    settings = dat.LAMB(lr=0.05, preset="modern")
    assert settings == LAMBSettings(lr=0.05, preset="modern")
    assert isinstance(settings, OptimizerSettings)
    assert not isinstance(settings, torch.optim.Optimizer)
    assert isinstance(settings(layers()), dat.LAMB)
    with pytest.raises(ValueError, match=r"LAMB\.lr = -1: must be above 0"):
        dat.LAMB(lr=-1)
    with pytest.raises(ValueError, match=r"LAMB\.lr = -1: must be above 0"):
        dat.LAMB(layers().parameters(), lr=-1)
    with pytest.raises(TypeError, match="unexpected keyword argument 'momentum'"):
        dat.LAMB(layers().parameters(), momentum=0.9)  # type: ignore[call-overload]


def test_a_subclass_always_needs_parameters() -> None:
    class Mine(dat.LAMB):
        pass

    assert isinstance(Mine(layers().parameters()), Mine)
    with pytest.raises(TypeError, match="params"):
        Mine(lr=0.1)


@pytest.mark.parametrize(
    ("kind", "option"), [(dat.LAMB, "clip"), (dat.LARS, "preset"), (dat.Muon, "head")]
)
def test_settings_that_are_no_options_are_refused(kind: Any, option: str) -> None:
    with pytest.raises(TypeError, match=f"{kind.__name__}: {option} is a setting, not an option"):
        kind(layers().parameters(), **{option: 1})


@pytest.mark.parametrize("kind", [dat.LAMB, dat.LARS, dat.Muon])
def test_signatures_and_annotations_are_those_of_the_settings(kind: Any) -> None:
    """`help` shows every option; the type checker's list of them is complete."""
    shown = inspect.signature(kind).parameters
    assert list(shown)[:2] == ["params", "lr"]
    values = {name: p.default for name, p in shown.items() if name != "params"}
    assert kind.settings(**values) == kind.settings()
    module: Any = inspect.getmodule(kind)
    hints = get_type_hints(getattr(module, f"{kind.__name__}Options"))
    assert hints.keys() | {"lr"} == values.keys()
    assert hints.items() <= get_type_hints(kind.settings).items()


@pytest.mark.parametrize("kind", [dat.SGD, dat.LSGD, AdamW])
def test_settings_called_with_parameters_name_torchs_optimizer(kind: Any) -> None:
    with pytest.raises(TypeError, match=r"use torch\.optim\.(SGD|AdamW)"):
        kind(layers().parameters(), lr=0.1)


SAME: list[OptimizerSettings] = [
    dat.LAMB(lr=0.05, weight_decay=0.1),
    dat.LAMB(lr=0.05, weight_decay=0.1, preset="official"),
    dat.LAMB(lr=0.05, weight_decay=0.1, preset="modern"),
    dat.LARS(lr=0.05, momentum=0.8, adapt_1d=False),
    dat.LARS(lr=0.05, weight_decay=0.1, decay_1d=False),
    dat.Muon(lr=0.05, weight_decay=0.1, decay_1d=False),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["kernel", "torch"])
@pytest.mark.parametrize("settings", SAME, ids=str)
def test_the_trainers_optimizer_is_bitwise_identical(
    settings: OptimizerSettings, dtype: torch.dtype
) -> None:
    model, other, named = layers(dtype), layers(dtype), layers(dtype)
    kind: Any = getattr(dat, type(settings).__name__.removesuffix("Settings"))
    train(model, settings(model), range(4))
    train(other, kind.of(settings, other.parameters()), range(4))
    train(named, kind.of(settings, named.named_parameters()), range(4))
    assert_same(model, other)
    assert_same(model, named)


def test_parameter_groups_override_every_option() -> None:
    model, matrices, vectors, last = layers(), layers(), layers(), layers()
    groups: list[dict[str, Any]] = [
        {"params": model[:2], "betas": (0.5, 0.6), "zeta": 1e-3, "debias": False},
        {"params": model[2:4], "adapt": False, "weight_decay": 0.5, "lr": 0.2},
        {"params": [model[4]], "c_l": 2.0, "c_u": 3.0},
    ]
    train(model, dat.LAMB(groups, lr=0.1), range(3))
    first = dat.LAMB(matrices.parameters(), lr=0.1, betas=(0.5, 0.6), zeta=1e-3, debias=False)
    train(matrices, first, range(3))
    second = dat.LAMB(vectors.parameters(), lr=0.2, weight_decay=0.5, adapt_1d=False)
    train(vectors, second, range(3))
    train(last, dat.LAMB(last.parameters(), lr=0.1, c_l=2.0, c_u=3.0), range(3))
    for number, expected in enumerate((matrices, matrices, vectors, vectors, last)):
        assert torch.equal(model[number], expected[number])


def test_add_param_group() -> None:
    for make in CLASSES.values():
        model, other = layers(), layers()
        optimizer = make(list(model.parameters())[:2])
        optimizer.add_param_group({"params": model[2:], "lr": 0.2})
        train(model, optimizer, range(3))
        train(other, make([{"params": other[:2]}, {"params": other[2:], "lr": 0.2}]), range(3))
        assert_same(model, other)


@every_class
def test_one_cycle(make: Make) -> None:
    """It cycles `betas` or `momentum`, which steps must read from the groups."""
    model, other = layers(), layers()
    optimizer, reference = make(model.parameters()), make(other.parameters())
    key = "betas" if "betas" in optimizer.defaults else "momentum"  # Muon has both
    schedule = lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=6)
    rates, momenta = set(), set()
    for step in range(5):
        (group,), (copied,) = optimizer.param_groups, reference.param_groups
        copied |= {"lr": group["lr"], key: group[key]}
        rates.add(group["lr"])
        momenta.add(group[key])
        train(model, optimizer, range(step, step + 1))
        train(other, reference, range(step, step + 1))
        schedule.step()
    assert len(rates) == len(momenta) == 5
    assert_same(model, other)
    constant = layers()
    train(constant, make(constant.parameters()), range(5))
    assert not torch.equal(model[0], constant[0])


@every_class
@pytest.mark.parametrize("scheduler", ["cosine", "plateau", "sequential"])
def test_schedulers(make: Make, scheduler: str) -> None:
    model = layers()
    optimizer = make(model.parameters())
    schedules: dict[str, Any] = {
        "cosine": lambda: lr_scheduler.CosineAnnealingLR(optimizer, 4),
        "plateau": lambda: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
        "sequential": lambda: lr_scheduler.SequentialLR(
            optimizer,
            [lr_scheduler.LinearLR(optimizer), lr_scheduler.StepLR(optimizer, 1)],
            milestones=[2],
        ),
    }
    schedule = schedules[scheduler]()
    for step in range(4):
        train(model, optimizer, range(step, step + 1))
        schedule.step(*([1.0] if scheduler == "plateau" else []))
    assert optimizer.param_groups[0]["lr"] < 0.05
    saved = schedule.state_dict()
    schedule.load_state_dict(saved)


@every_class
def test_gradient_scaling(make: Make) -> None:
    """Scaled gradients are unscaled before the step, and a step with an infinite one is skipped."""
    model, other = layers(torch.float32), layers(torch.float32)
    optimizer, reference = make(model.parameters()), make(other.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=100)
    for step in range(3):
        scaler.scale(torch.ones(()))  # the scaler makes its scale when it is first used
        give_gradients(model, step, scale=2.0**8)
        give_gradients(other, step)
        scaler.step(optimizer)
        scaler.update()
        reference.step()
    assert_same(model, other)
    before = weights_of(model)
    give_gradients(model, 3, scale=float("inf"))
    scaler.step(optimizer)
    scaler.update()
    assert all(map(torch.equal, model.parameters(), before))
    assert scaler.get_scale() == 2.0**7


@pytest.mark.parametrize("name", dat.optim.OPTIMIZERS)
def test_gradients_are_unscaled_before_they_are_clipped(name: str) -> None:
    """Also those of a fused optimizer, which would unscale them itself."""
    model, other = layers(torch.float32), layers(torch.float32)
    settings = dat.optim.OPTIMIZERS[name](lr=0.1, clip=1.0)
    optimizer, reference = settings(model), settings(other)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    scaler.scale(torch.ones(()))
    give_gradients(model, 0, scale=2.0**8)
    give_gradients(other, 0)
    scaler.step(optimizer)
    reference.step()
    assert_same(model, other)


@every_class
def test_clipping(make: Make) -> None:
    model, other = layers(), layers()
    optimizer, reference = make(model.parameters()), make(other.parameters())
    for step in range(3):
        give_gradients(model, step)
        give_gradients(other, step)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        for parameter in other.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(0.1 / (norm + 1e-6))
        optimizer.step()
        reference.step()
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two)


@every_class
def test_closure_and_zero_grad(make: Make) -> None:
    model = layers()
    optimizer = make(model.parameters())

    def loss() -> float:
        optimizer.zero_grad()
        total = torch.stack([(param - 1).square().sum() for param in model.parameters()]).sum()
        total.backward()
        return total.item()

    losses = [optimizer.step(loss) for _ in range(20)]
    assert losses[0] is not None and losses[-1] is not None and losses[-1] < losses[0]


@every_class
@pytest.mark.parametrize("through", ["state dict", "file", "deepcopy", "pickle"])
def test_copied_optimizers_continue_bitwise_identically(make: Make, through: str) -> None:
    model = layers(torch.float32)
    optimizer = make(model.named_parameters())
    train(model, optimizer, range(3))
    other: nn.Module
    if through == "deepcopy":
        other, twin = copy.deepcopy((model, optimizer))
    elif through == "pickle":
        other, twin = pickle.loads(pickle.dumps((model, optimizer)))
    else:
        state: Any = optimizer.state_dict()
        if through == "file":
            file = io.BytesIO()
            torch.save(state, file)
            file.seek(0)
            state = torch.load(file, weights_only=True)
        other = copied(model)
        twin = make(other.named_parameters())
        twin.load_state_dict(copy.deepcopy(state))
    assert type(twin) is type(optimizer)
    train(model, optimizer, range(3, 6))
    train(other, twin, range(3, 6))
    assert_same(model, other)


OLD_OPTIONS = ("lr", "initial_lr", "weight_decay", "adapt", "c_l", "c_u", "params")


@pytest.mark.parametrize(
    "settings",
    [dat.LAMB(betas=(0.8, 0.9), zeta=1e-4, preset="modern"), dat.LARS(momentum=0.7)],
    ids=["LAMB", "LARS"],
)
def test_states_of_earlier_versions_are_loaded(settings: OptimizerSettings) -> None:
    """Their groups have no options of the direction and no switches; those are the optimizer's."""
    model = layers(torch.float32)
    optimizer = settings(model)
    train(model, optimizer, range(3))
    state = optimizer.state_dict()
    for group in state["param_groups"]:
        for name in group.keys() - set(OLD_OPTIONS):
            del group[name]
    assert {name for moments in state["state"].values() for name in moments} <= {"step", "m", "v"}
    other = copied(model)
    resumed = settings(other)
    resumed.load_state_dict(copy.deepcopy(state))
    train(model, optimizer, range(3, 6))
    train(other, resumed, range(3, 6))
    assert_same(model, other)


@every_class
def test_the_rate_may_be_a_tensor(make: Make) -> None:
    for dtype in (torch.float32, torch.float64):
        model, other = layers(dtype), layers(dtype)
        optimizer, reference = make(model.parameters()), make(other.parameters())
        for group in optimizer.param_groups:
            group["lr"] = torch.tensor(group["lr"], dtype=torch.float64)
        train(model, optimizer, range(3))
        train(other, reference, range(3))
        for one, two in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(one, two)
    rate = torch.tensor(0.05)
    assert dat.LAMB(layers().parameters(), lr=rate).param_groups[0]["lr"] is rate


@pytest.mark.slow
@pytest.mark.parametrize("name", ["LAMB", "LARS", "LALR, Muon", "Muon"])
def test_a_step_can_be_compiled(name: str) -> None:
    """Into one graph per kind of step: the first, which creates the state, and all others."""
    model, other = layers(torch.float32), layers(torch.float32)
    optimizer, reference = CLASSES[name](model.parameters()), CLASSES[name](other.parameters())
    torch.compiler.reset()
    step = torch.compile(optimizer.step, fullgraph=True, backend="aot_eager")
    for number in range(5):
        give_gradients(model, number)
        give_gradients(other, number)
        step()
        reference.step()
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-6)


def test_trust_ratios_of_plain_parameters() -> None:
    """1-d parameters are known by their dimensions."""
    for adapt_1d in (True, False):
        model = layers()
        optimizer = dat.LARS(model.parameters(), adapt_1d=adapt_1d)
        assert isinstance(optimizer, Layerwise)
        train(model, optimizer, range(1))
        adapted = [param.dim() for param, _ in optimizer.trust_ratios()]
        assert sorted(adapted) == ([0, 1, 1, 2, 4] if adapt_1d else [2, 4])


def test_a_custom_direction() -> None:
    """A function, which has no options, and a dataclass, whose numbers are options of groups."""
    model, other = layers(), layers()

    def gradient(params: Any, grads: Any, states: Any, weight_decay: float) -> Any:
        return grads

    train(model, dat.LALR(model.parameters(), gradient, lr=0.1), range(2))
    plain = dat.LALR(other.parameters(), MomentumDirection(momentum=0.0), lr=0.1)
    train(other, plain, range(2))
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two)
    adam = dat.LALR(layers().parameters(), AdamDirection(betas=(0.1, 0.2)), lr=0.1)
    assert adam.param_groups[0]["betas"] == (0.1, 0.2)
