"""Properties of eq. (3) for arbitrary weights and gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dat.optim import (
    LALR,
    LAMB,
    LARS,
    AdamDirection,
    ClassicLARS,
    LAMBSettings,
    Layerwise,
    MomentumDirection,
    OptimizerSettings,
)
from dat.optim import lalr as lalr_module
from tests.optim.cases import assert_same, give_gradients, layers, train, weights_of

properties = hypothesis_settings(max_examples=40)
seeds = st.integers(0, 2**31)
scales = st.floats(-3, 3).map(lambda power: 10.0**power)
EQ3: list[OptimizerSettings] = [LAMB(), LAMB(preset="official"), LARS()]


def norms(tensors: list[Tensor]) -> list[float]:
    return [float(tensor.norm()) for tensor in tensors]


def tau(norm: float, c_l: float, c_u: float) -> float:
    return min(max(norm, c_l), c_u)


@properties
@given(
    config=st.sampled_from(EQ3),
    seed=seeds,
    weight_scale=scales,
    gradient_scale=scales,
    lr=st.floats(1e-3, 1.0),
    bounds=st.tuples(st.floats(0, 5), st.floats(0.01, 20)).map(sorted),
    decay=st.sampled_from([0.0, 1e-4, 1.0]),
)
def test_a_step_is_as_long_as_lr_times_tau(
    config: OptimizerSettings,
    seed: int,
    weight_scale: float,
    gradient_scale: float,
    lr: float,
    bounds: list[float],
    decay: float,
) -> None:
    c_l, c_u = bounds
    model = layers(seed=seed, scale=weight_scale)
    optimizer = type(config).read(
        config.dump() | {"lr": lr, "c_l": c_l, "c_u": c_u, "weight_decay": decay}
    )(model)
    for step in range(2):
        before = weights_of(model)
        give_gradients(model, step, seed=seed, scale=gradient_scale)
        optimizer.step()
        moved = [new.detach() - old for new, old in zip(model.parameters(), before, strict=True)]
        for length, norm in zip(norms(moved), norms(before), strict=True):
            if tau(norm, c_l, c_u) > 0:
                assert length == pytest.approx(lr * tau(norm, c_l, c_u), rel=1e-8, abs=1e-12)


@properties
@given(preset=st.sampled_from(["paper", "official", "modern"]), scale=scales)
def test_lambs_path_does_not_depend_on_the_gradients_scale(preset: str, scale: float) -> None:
    model, scaled = layers(), layers()
    config = LAMB(preset=preset, zeta=1e-30)
    train(model, config(model), range(4))
    train(scaled, config(scaled), range(4), scale=scale)
    for a, b in zip(model.parameters(), scaled.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@properties
@given(scale=scales)
def test_adapted_lars_does_not_depend_on_the_gradients_scale(scale: float) -> None:
    model, scaled = layers(), layers()
    config = LARS(weight_decay=0.0, c_l=0.1)
    train(model, config(model), range(4))
    train(scaled, config(scaled), range(4), scale=scale)
    for a, b in zip(model.parameters(), scaled.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("config", [*EQ3, LAMB(preset="modern"), LARS(preset="classic")])
def test_a_layer_that_starts_at_zero_learns(config: OptimizerSettings) -> None:
    model = layers()
    optimizer = config(model)
    assert isinstance(optimizer, Layerwise)
    assert not model[3].any()
    train(model, optimizer, range(1))
    assert model[3].all()
    for param, ratio in optimizer.trust_ratios():
        if param is model[3]:
            assert ratio == 1


def test_with_a_lower_bound_the_step_at_zero_is_lr_times_c_l() -> None:
    model = layers()
    train(model, LAMB(lr=0.1, c_l=0.5)(model), range(1))
    assert float(model[3].detach().norm()) == pytest.approx(0.1 * 0.5)


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("config", [*EQ3, LARS(preset="classic")])
def test_no_gradient_anywhere_stays_finite(config: OptimizerSettings, decay: float) -> None:
    model = layers()
    before = weights_of(model)
    optimizer = type(config).read(config.dump() | {"weight_decay": decay})(model)
    train(model, optimizer, range(3), scale=0.0)
    for new, old in zip(model.parameters(), before, strict=True):
        assert new.isfinite().all()
        assert decay or torch.equal(new, old)


def test_the_bounds_clip_the_ratio() -> None:
    small, middle, large = (torch.full((2, 2), value) for value in (0.05, 1.0, 50.0))
    model = nn.ParameterList([small, middle, large])
    optimizer = LARS(momentum=0.0, weight_decay=0.0, c_l=1.0, c_u=10.0)(model)
    assert isinstance(optimizer, LALR)
    for param in model.parameters():
        param.grad = torch.full((2, 2), 0.5)  # of norm 1
    optimizer.step()
    ratios = [float(ratio) for _, ratio in optimizer.trust_ratios()]
    assert ratios == pytest.approx([1.0, 2.0, 10.0])


def test_groups_without_adaptation_use_the_direction_itself() -> None:
    model = layers()
    before = weights_of(model)
    optimizer = LALR(
        [
            {"params": [model[0]], "adapt": False},
            {"params": [model[1]], "adapt": False, "weight_decay": 0.5},
        ],
        MomentumDirection(momentum=0.0),
        lr=0.1,
    )
    train(model, optimizer, range(1))
    assert model[0].grad is not None
    assert model[1].grad is not None
    torch.testing.assert_close(model[0].data, before[0] - 0.1 * model[0].grad)
    torch.testing.assert_close(model[1].data, before[1] - 0.1 * (model[1].grad + 0.5 * before[1]))
    assert optimizer.trust_ratios() == []


@pytest.mark.parametrize(
    ("config", "adapted", "decayed"),
    [
        (LAMB(), True, True),
        (LAMB(preset="official"), True, True),
        (LAMB(preset="modern"), False, False),
        (LAMB(preset="modern", adapt_1d=True), True, False),
        (LAMB(preset="modern", decay_1d=True), False, True),
        (LAMB(adapt_1d=False, decay_1d=False), False, False),
        (LARS(), True, True),
        (LARS(adapt_1d=False), False, True),
        (LARS(preset="classic", decay_1d=False), True, False),
    ],
)
def test_which_layers_are_adapted_and_decayed(
    config: OptimizerSettings, adapted: bool, decayed: bool
) -> None:
    model = layers()
    optimizer = config(model)
    assert isinstance(optimizer, Layerwise)
    matrices, vectors = optimizer.param_groups
    assert [p.dim() > 1 for p in matrices["params"]] == [True, True]
    assert [p.dim() > 1 for p in vectors["params"]] == [False, False, False]
    assert (matrices["adapt"], matrices["weight_decay"]) == (True, 1e-4)
    assert (vectors["adapt"], vectors["weight_decay"]) == (adapted, 1e-4 if decayed else 0.0)
    train(model, optimizer, range(1))
    assert len(optimizer.trust_ratios()) == (5 if adapted else 2)


@pytest.mark.parametrize(
    ("config", "debiased"),
    [
        (LAMB(), True),
        (LAMB(preset="official"), False),
        (LAMB(preset="modern"), True),
        (LAMB(preset="official", debias=True), True),
        (LAMB(debias=False), False),
    ],
)
def test_debias_follows_the_preset_unless_set(config: LAMBSettings, debiased: bool) -> None:
    direction = config(layers()).direction
    assert isinstance(direction, AdamDirection)
    assert direction.debias is debiased


def test_a_layer_without_gradients_keeps_its_own_count() -> None:
    """Debiasing must count the updates of the layer, not those of the optimizer."""
    model, other = layers(), layers()
    optimizer, reference = LAMB()(model), LAMB()(other)
    late = model[0].detach().clone()
    for step in range(3):
        give_gradients(model, step)
        model[0].grad = None
        optimizer.step()
    assert torch.equal(model[0], late)
    give_gradients(model, 3)
    give_gradients(other, 3)
    optimizer.step()
    reference.step()
    assert torch.equal(model[0], other[0])
    assert not torch.equal(model[1], other[1])


@pytest.mark.parametrize("config", [*EQ3, LARS(preset="classic")])
def test_a_copied_optimizer_continues_bitwise_identically(config: OptimizerSettings) -> None:
    model = layers(torch.float32)
    optimizer = config(model)
    train(model, optimizer, range(3))
    twin, twins = copy.deepcopy((model, optimizer))
    train(model, optimizer, range(3, 6))
    train(twin, twins, range(3, 6))
    assert_same(model, twin)


def test_the_size_of_the_chunks_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, other = layers(), layers()  # in double precision: torch's work, not the kernel's
    train(model, LAMB()(model), range(3))
    monkeypatch.setattr(lalr_module, "CHUNKS", {"cpu": 1, "accelerator": 1})
    train(other, LAMB()(other), range(3))
    assert_same(model, other)


def test_layers_of_several_types_live_together() -> None:
    model = nn.ParameterList([torch.ones(2, 2), torch.ones(2, 2, dtype=torch.float64)])
    optimizer = LAMB()(model)
    train(model, optimizer, range(2))
    assert [ratio.dtype for _, ratio in optimizer.trust_ratios()] == [torch.float32, torch.float64]


class Syncs(TorchDispatchMode):
    """Counts the operations that make the host wait for the device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += func in (
            torch.ops.aten._local_scalar_dense.default,
            torch.ops.aten.is_nonzero.default,
        )
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("config", [*EQ3, LARS(preset="classic")])
def test_a_step_does_not_wait_for_the_device(config: OptimizerSettings, dtype: torch.dtype) -> None:
    model = layers(dtype)
    optimizer = config(model)
    give_gradients(model, 0)
    with Syncs() as syncs:
        optimizer.step()
        assert syncs.count == 0
        assert float(model[0].detach().sum())
        assert syncs.count == 1  # the counter counts


def test_closure() -> None:
    model = layers()
    optimizer = LAMB()(model)

    def loss() -> float:
        optimizer.zero_grad()
        total = torch.stack([(param - 1).square().sum() for param in model.parameters()]).sum()
        total.backward()
        return total.item()

    losses = [optimizer.step(loss) for _ in range(20)]
    assert losses[-1] < losses[0]


def test_sparse_gradients_are_refused() -> None:
    model = nn.Embedding(4, 3, sparse=True)
    optimizer = LAMB()(model)
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="LAMB needs dense gradients"):
        optimizer.step()


@pytest.mark.parametrize("wrong", [{"lr": -1.0}, {"c_l": 3.0, "c_u": 2.0}, {"c_u": 0.0}])
def test_lalr_refuses_wrong_values(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        LALR(layers().parameters(), AdamDirection(), **{"lr": 0.1} | wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"lr": -0.1}, "lr = -0.1, weight_decay = 0.0: must be at least 0"),
        ({"momentum": 1.0}, "momentum = 1.0: must be at least 0 and below 1"),
        ({"trust_coefficient": 0.0}, "trust_coefficient = 0.0: must be above 0"),
    ],
)
def test_classic_lars_refuses_wrong_values(wrong: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ClassicLARS(layers().parameters(), **wrong)  # type: ignore[arg-type]
