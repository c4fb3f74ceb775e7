"""Properties of every registered optimizer and schedule."""

from __future__ import annotations

import dataclasses
import io
import typing
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from dat.core.settings import SettingError, SettingLimits, Settings
from dat.optim import (
    LAMB,
    LARS,
    OPTIMIZERS,
    SCHEDULES,
    SGD,
    AdamW,
    Cosine,
    LAMBSettings,
    LARSSettings,
    Muon,
    MuonSettings,
    OptimizerSettings,
    Piecewise,
    Schedule,
    set_rate,
)
from tests.optim.cases import assert_same, give_gradients, layers, train, weights_of

OTHERS: list[OptimizerSettings] = [
    LAMB(preset="official"),
    LAMB(preset="modern"),
    LARS(preset="classic"),
    SGD(nesterov=True),
    AdamW(fused=False),
    Muon(adjust_lr_fn="original", precision="bfloat16"),
]
CONFIGS = [kind() for kind in OPTIMIZERS.values()] + OTHERS
KINDS: list[type[Settings]] = [*OPTIMIZERS.values(), *SCHEDULES.values()]


def label(config: OptimizerSettings) -> str:
    name = type(config).__name__.removesuffix("Settings")
    return "-".join((name, getattr(config, "preset", ""))).strip("-")


def quadratic(model: nn.Module) -> torch.Tensor:
    return torch.stack([(param - 0.5).square().sum() for param in model.parameters()]).sum()


@pytest.mark.parametrize("config", CONFIGS, ids=label)
def test_reduces_a_quadratic(config: OptimizerSettings) -> None:
    if isinstance(config, AdamW | MuonSettings):
        config = dataclasses.replace(config, lr=0.03)  # their steps are about as long as the rate
    model, schedule = layers(torch.float32), Cosine()
    optimizer = config(model)
    start = quadratic(model).item()
    for step in range(300):
        set_rate(optimizer, schedule(step / 100, 3))
        optimizer.zero_grad()
        quadratic(model).backward()
        optimizer.step()
    assert quadratic(model).item() < 0.1 * start


@pytest.mark.parametrize("config", CONFIGS, ids=label)
def test_a_resumed_optimizer_is_bitwise_identical(config: OptimizerSettings) -> None:
    model = layers(torch.float32)
    optimizer = config(model)
    train(model, optimizer, range(3))

    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed = layers(torch.float32, seed=1)
    other = config(resumed)
    resumed.load_state_dict(saved["model"])
    other.load_state_dict(saved["optimizer"])

    train(model, optimizer, range(3, 6))
    train(resumed, other, range(3, 6))
    assert_same(model, resumed)


@pytest.mark.parametrize("config", CONFIGS, ids=label)
def test_a_step_changes_neither_gradients_nor_parameters_without_one(
    config: OptimizerSettings,
) -> None:
    model = layers()
    model[0].requires_grad_(False)
    optimizer = config(model)
    before = weights_of(model)
    give_gradients(model, 0)
    model[2].grad = None
    grads = [param.grad.clone() for param in model.parameters() if param.grad is not None]
    optimizer.step()
    after = [param.grad for param in model.parameters() if param.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(after, grads, strict=True))
    same = [torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True)]
    assert same == [True, False, True, False, False]


@pytest.mark.parametrize("config", CONFIGS, ids=label)
def test_decay_1d_affects_only_vectors(config: OptimizerSettings) -> None:
    for decay_1d in (True, False):
        changed = type(config).read(config.dump() | {"weight_decay": 0.5, "decay_1d": decay_1d})
        matrices, vectors = changed(layers()).param_groups
        assert matrices["weight_decay"] == 0.5
        assert vectors["weight_decay"] == (0.5 if decay_1d else 0.0)


@pytest.mark.parametrize("config", CONFIGS, ids=label)
def test_the_schedule_sets_every_groups_rate(config: OptimizerSettings) -> None:
    optimizer = config(layers())
    peaks = [group["lr"] for group in optimizer.param_groups]
    for factor in (0.5, 0.1, 1.0):  # from the peak, not from the last rate
        set_rate(optimizer, factor)
        assert [group["lr"] for group in optimizer.param_groups] == [p * factor for p in peaks]


@pytest.mark.parametrize("config", CONFIGS, ids=label)
def test_a_model_with_nothing_to_train_is_refused(config: OptimizerSettings) -> None:
    with pytest.raises(ValueError, match="no trainable parameters"):
        config(nn.ReLU())


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("epochs", [1, 2, 7, 30, 100])
@pytest.mark.parametrize("warmup", [{}, {"warmup": 2}, {"warmup": 2.5, "warmup_by": "step"}])
def test_every_schedule_stays_between_0_and_1(
    name: str, epochs: int, warmup: dict[str, Any]
) -> None:
    schedule = SCHEDULES[name](**warmup)
    factors = [schedule(step / 10, epochs) for step in range(10 * epochs + 1)]
    assert all(0 <= factor <= 1 for factor in factors)
    assert any(factor > 0 for factor in factors)


@pytest.mark.parametrize("kind", KINDS)
def test_read_undoes_dump(kind: type[Settings]) -> None:
    assert kind.read(kind().dump()) == kind()


def wrong_values() -> Iterator[Any]:
    """For each field of each class, one value of the wrong type and one beyond each limit."""
    for kind in KINDS:
        hints = typing.get_type_hints(kind)
        for field in dataclasses.fields(kind):
            limits: SettingLimits = field.metadata["limits"]
            below = [] if limits.ge is None else [limits.ge - 1]
            above = [] if limits.le is None else [limits.le + 1]
            beyond = below + above + [b for b in (limits.gt, limits.lt) if b is not None]
            for value in (*beyond, "a lot"):
                wrong = (value, value) if typing.get_origin(hints[field.name]) is tuple else value
                yield pytest.param(
                    kind, field.name, wrong, id=f"{kind.__name__}.{field.name}={wrong}"
                )


@pytest.mark.parametrize(("kind", "name", "value"), list(wrong_values()))
def test_wrong_values_are_refused(kind: type[Settings], name: str, value: object) -> None:
    prefix = kind.__name__.removesuffix("Settings")
    with pytest.raises(SettingError, match=rf"{prefix}\.{name}"):
        kind(**{name: value})


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (LAMBSettings, {"c_l": 3.0, "c_u": 2.0}),
        (LARSSettings, {"c_l": 3.0, "c_u": 2.0}),
        (SGD, {"nesterov": True, "momentum": 0.0}),
        (Piecewise, {"milestones": (20, 10)}),
        (Piecewise, {"milestones": (10, 10)}),
        (Piecewise, {"milestones": (3, 10), "warmup": 5}),
    ],
)
def test_rules_between_fields(kind: type[Settings], values: dict[str, Any]) -> None:
    with pytest.raises(SettingError):
        kind(**values)


def test_the_registries_hold_what_they_say() -> None:
    assert list(OPTIMIZERS) == ["lamb", "lars", "sgd", "lsgd", "adamw", "muon"]
    assert list(SCHEDULES) == ["piecewise", "cosine", "cyclic", "one-cycle", "constant"]
    assert all(issubclass(kind, Schedule) for kind in SCHEDULES.values())
