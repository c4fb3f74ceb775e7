"""The native kernel against torch's foreach functions, for all kinds of layers."""

from __future__ import annotations

import copy
import ctypes
import importlib.util
import io
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import pytorch_optimizer
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dat.core.rng import generator
from dat.kernels import native
from dat.kernels import optimizer as kernel
from dat.optim import LALR, LAMB, LARS, Layerwise, OptimizerSettings

pytestmark = pytest.mark.skipif(kernel.library() is None, reason="no native kernel here")

SHAPES = [
    *((), (0,), (1,), (7,), (8,), (515,), (4096,), (4097,), (9000,), (3, 0), (33, 5)),
    *((4, 3, 3, 3), (16, 8, 1, 1), (1, 5, 2, 2), (40, 30, 3, 3)),
]
CONFIGS: list[OptimizerSettings] = [
    LAMB(),
    LAMB(preset="official", c_l=0.5, c_u=2.0),
    LAMB(preset="modern", betas=(0.3, 0.4), zeta=1e-3),
    LARS(),
    LARS(momentum=0.2, adapt_1d=False, decay_1d=False),
    LARS(momentum=0.0, c_l=1.0, c_u=float("inf")),
    LARS(preset="classic", lr=0.3, trust_coefficient=0.03),
    LARS(preset="classic", momentum=0.0, adapt_1d=False),
]
EACH: list[OptimizerSettings] = [LAMB(), LARS(), LARS(preset="classic")]
powers = st.integers(-4, 4).map(lambda power: 10.0**power)


class Forced:
    """A context without the kernel, or with another number of threads."""

    def __init__(self, *, threads: int = 1, kernel: bool = True) -> None:
        self.threads, self.kernel = threads, kernel

    def __enter__(self) -> None:
        self.before = torch.get_num_threads()
        self.patch = pytest.MonkeyPatch()
        if not self.kernel:
            self.patch.setattr(kernel, "library", lambda: None)
        torch.set_num_threads(self.threads)

    def __exit__(self, *_: object) -> None:
        self.patch.undo()
        torch.set_num_threads(self.before)


def random_tensors(shapes: Sequence[tuple[int, ...]], seed: int, scale: float) -> list[Tensor]:
    random = generator(seed, "tensors")
    return [scale * torch.randn(shape, generator=random) for shape in shapes]


def model_of(weights: list[Tensor], *, channels_last: bool = False) -> nn.ParameterList:
    order = torch.channels_last if channels_last else torch.contiguous_format
    laid = [w.clone(memory_format=order) if w.dim() == 4 else w.clone() for w in weights]
    return nn.ParameterList([nn.Parameter(weight) for weight in laid])


def reload(config: OptimizerSettings, model: nn.Module, optimizer: Layerwise) -> Layerwise:
    """A new optimizer that loads the state of the old one from a file."""
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    reloaded = config(model)
    reloaded.load_state_dict(torch.load(file, weights_only=True))
    assert isinstance(reloaded, Layerwise)
    return reloaded


def build_optimizer(config: OptimizerSettings, model: nn.Module) -> Layerwise:
    optimizer = config(model)
    assert isinstance(optimizer, Layerwise)
    return optimizer


def step(model: nn.Module, optimizer: Layerwise, grads: list[Tensor | None]) -> None:
    for param, grad in zip(model.parameters(), grads, strict=True):
        param.grad = None if grad is None else grad.to(param.dtype)
    optimizer.step()


def tensors_of(model: nn.Module, optimizer: Layerwise) -> list[Tensor]:
    """Weights, moments and ratios."""
    states = [optimizer.state[param] for param in model.parameters()]
    moments = [state[name] for state in states for name in ("m", "v") if name in state]
    weights = [param.detach() for param in model.parameters()]
    return [*weights, *moments, *(ratio for _, ratio in optimizer.trust_ratios())]


def assert_alike(mine: list[Tensor], theirs: list[Tensor], *, off: float = 2e-6) -> None:
    """Up to `off` times each tensor's largest value, as sums may cancel."""
    assert len(mine) == len(theirs)
    for a, b in zip(mine, theirs, strict=True):
        finite = b[b.isfinite()].abs()
        largest = float(finite.max()) if finite.numel() else 0.0
        torch.testing.assert_close(
            a, b.to(a.dtype), rtol=off, atol=off * largest + 1e-37, equal_nan=True
        )


def assert_same(mine: list[Tensor], theirs: list[Tensor]) -> None:
    assert len(mine) == len(theirs)
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


@settings(max_examples=50)
@given(
    config=st.sampled_from(CONFIGS),
    shapes=st.lists(st.sampled_from(SHAPES), min_size=1, max_size=6),
    seed=st.integers(0, 2**31),
    scales=st.tuples(powers, powers),
    decay=st.sampled_from([0.0, 1e-4, 0.5]),
    channels_last=st.booleans(),
    other_order=st.booleans(),
    absent=st.lists(st.sets(st.integers(0, 5)), min_size=1, max_size=4),
)
def test_a_step_agrees_with_foreach(
    config: OptimizerSettings,
    shapes: list[tuple[int, ...]],
    seed: int,
    scales: tuple[float, float],
    decay: float,
    channels_last: bool,
    other_order: bool,
    absent: list[set[int]],
) -> None:
    config = type(config).read(config.dump() | {"weight_decay": decay})
    weights = random_tensors(shapes, seed, scales[0])
    weights[0].zero_()
    model, other = (model_of(weights, channels_last=channels_last) for _ in range(2))
    mine, theirs = build_optimizer(config, model), build_optimizer(config, other)
    for number, without in enumerate(absent):
        grads: list[Tensor | None] = [*random_tensors(shapes, seed + number + 1, scales[1])]
        for i in without & set(range(len(grads))):
            grads[i] = None
        if other_order:
            grads = [
                g.contiguous(memory_format=torch.channels_last)
                if g is not None and g.dim() == 4
                else g
                for g in grads
            ]
        step(model, mine, grads)
        with Forced(kernel=False):
            step(other, theirs, grads)
        assert_alike(tensors_of(model, mine), tensors_of(other, theirs))
        mine = reload(config, model, mine)
    for param, same in zip(model.parameters(), other.parameters(), strict=True):
        assert param.stride() == same.stride()


@pytest.mark.parametrize("config", CONFIGS)
def test_a_step_agrees_with_double_precision(config: OptimizerSettings) -> None:
    shapes = [(300, 200), (64, 3, 3, 3), (70_001,), (5,)]
    weights = random_tensors(shapes, 0, 0.05)
    model, exact = model_of(weights), model_of([weight.double() for weight in weights])
    mine, theirs = build_optimizer(config, model), build_optimizer(config, exact)
    for number in range(5):
        grads: list[Tensor | None] = [*random_tensors(shapes, number + 1, 0.01)]
        step(model, mine, grads)
        step(exact, theirs, grads)
        assert_alike(tensors_of(model, mine), tensors_of(exact, theirs), off=1e-6)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_official_lamb_agrees_with_pytorch_optimizer(decay: float) -> None:
    shapes = [(40, 30), (8, 3, 3, 3), (515,)]
    weights = random_tensors(shapes, 0, 1.0)
    model, other = model_of(weights), model_of(weights)
    config = LAMB(preset="official", lr=0.05, weight_decay=decay, zeta=1e-10)
    mine = build_optimizer(config, model)
    theirs = pytorch_optimizer.Lamb(
        other.parameters(),
        lr=0.05,
        weight_decay=decay,
        weight_decouple=False,
        eps=1e-10,
        adam_debias=True,
    )
    for number in range(7):
        for param, grad in zip(
            other.parameters(), random_tensors(shapes, number + 1, 1.0), strict=True
        ):
            param.grad = grad
        theirs.step()
        step(model, mine, [*random_tensors(shapes, number + 1, 1.0)])
    assert_alike([p.detach() for p in model], [p.detach() for p in other])


MANY = [(700, 500), (300, 300), (90_001,), (64, 64, 3, 3), (3,), (50,), (0,), (4095,), (20_000,)]


def after_steps(config: OptimizerSettings, threads: int) -> list[Tensor]:
    model = model_of(random_tensors(MANY, 0, 1.0))
    optimizer = build_optimizer(config, model)
    with Forced(threads=threads):
        for number in range(3):
            step(model, optimizer, [*random_tensors(MANY, number + 1, 1.0)])
    return tensors_of(model, optimizer)


@pytest.mark.parametrize("config", [*EACH, LAMB(preset="modern")])
def test_the_number_of_threads_changes_no_bit(config: OptimizerSettings) -> None:
    alone = after_steps(config, 1)
    for threads in (2, 3, 7):
        assert_same(after_steps(config, threads), alone)


@pytest.fixture
def plain() -> Iterator[None]:
    library = kernel.library()
    assert library is not None
    library.dat_plain(1)
    yield
    library.dat_plain(0)


@pytest.mark.parametrize("config", EACH)
def test_avx2_changes_no_bit(config: OptimizerSettings, request: pytest.FixtureRequest) -> None:
    fast = after_steps(config, 1)
    request.getfixturevalue("plain")
    assert_same(after_steps(config, 1), fast)


@pytest.mark.parametrize("config", EACH)
def test_the_order_in_memory_changes_only_the_rounding(config: OptimizerSettings) -> None:
    shapes = [(40, 30, 3, 3), (16, 8, 1, 1)]
    results = []
    for channels_last in (False, True):
        model = model_of(random_tensors(shapes, 0, 1.0), channels_last=channels_last)
        optimizer = build_optimizer(config, model)
        for number in range(3):
            step(model, optimizer, [*random_tensors(shapes, number + 1, 1.0)])
        assert model[0].is_contiguous() is not channels_last
        results.append(tensors_of(model, optimizer))
    assert_alike(*results)


def test_loaded_moments_are_laid_out_as_the_weights_once() -> None:
    shapes = [(40, 30, 3, 3)]
    model = model_of(random_tensors(shapes, 0, 1.0))
    optimizer = build_optimizer(LAMB(), model)
    step(model, optimizer, [*random_tensors(shapes, 1, 1.0)])
    other = model_of([param.detach() for param in model.parameters()], channels_last=True)
    loaded = reload(LAMB(), other, optimizer)
    places = []
    for number in range(2, 4):
        for both in ((model, optimizer), (other, loaded)):
            step(*both, [*random_tensors(shapes, number, 1.0)])
        state = loaded.state[other[0]]
        assert all(
            state[name].is_contiguous(memory_format=torch.channels_last) for name in ("m", "v")
        )
        places.append([state[name].data_ptr() for name in ("m", "v")])
    assert places[0] == places[1]
    assert_alike(tensors_of(other, loaded), tensors_of(model, optimizer))


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf"), 1e30, 1e-30])
@pytest.mark.parametrize("where", ["gradient", "weight"])
def test_non_finite_values_propagate_as_in_torch(
    config: OptimizerSettings, broken: float, where: str
) -> None:
    shapes = [(40, 30), (515,), (8,), (2,)]  # one value alone has a norm without squares in torch
    weights = random_tensors(shapes, 0, 1.0)
    if where == "weight":
        weights[1][3] = weights[3][0] = broken
    model, other = model_of(weights), model_of(weights)
    mine, theirs = build_optimizer(config, model), build_optimizer(config, other)
    for number in range(3):
        grads = random_tensors(shapes, number + 1, 1.0)
        if where == "gradient" and number < 2:
            grads[1][3] = grads[3][0] = broken
        step(model, mine, [*grads])
        with Forced(kernel=False):
            step(other, theirs, [*grads])
        assert_alike(tensors_of(model, mine), tensors_of(other, theirs))


@pytest.mark.parametrize("config", EACH)
@pytest.mark.parametrize("scale", [1e-42, 1e-25, 1e18, 1e25])
def test_norms_underflow_and_overflow_as_torchs_do(config: OptimizerSettings, scale: float) -> None:
    weights = random_tensors([(40, 30)], 0, 1.0)
    model, other = model_of(weights), model_of(weights)
    mine, theirs = build_optimizer(config, model), build_optimizer(config, other)
    for number in range(2):
        grads: list[Tensor | None] = [*random_tensors([(40, 30)], number + 1, scale)]
        step(model, mine, grads)
        with Forced(kernel=False):
            step(other, theirs, grads)
        assert_alike(tensors_of(model, mine), tensors_of(other, theirs))


@pytest.mark.parametrize("config", EACH)
def test_nothing_beside_a_layer_is_touched(config: OptimizerSettings) -> None:
    sizes = [1, 7, 513, 4097]
    rows = [torch.full((size + 16,), 3.0) for size in sizes]
    model = nn.ParameterList([nn.Parameter(row[8:-8]) for row in rows])
    optimizer = build_optimizer(config, model)
    for number in range(2):
        step(model, optimizer, [*random_tensors([(size,) for size in sizes], number, 1.0)])
    for row, param in zip(rows, model.parameters(), strict=True):
        assert param.data_ptr() == row[8:].data_ptr() and not (row[8:-8] == 3).all()
        assert (row[:8] == 3).all() and (row[-8:] == 3).all()


class Counting:
    """Wraps the kernel and records the number of layers of each call."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library, self.calls = library, list[int]()

    def dat_update(self, *values: Any) -> None:
        self.calls.append(values[3].value)
        self.library.dat_update(*values)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    library = kernel.library()
    assert library is not None
    counting = Counting(library)
    monkeypatch.setattr(kernel, "library", lambda: counting)
    return counting.calls


@pytest.mark.parametrize("config", EACH)
def test_a_group_is_one_call(config: OptimizerSettings, calls: list[int]) -> None:
    shapes = [(1200, 1000), (5,), (300, 10), (7,), (64, 3, 3, 3)]
    model = model_of(random_tensors(shapes, 0, 1.0))
    step(model, build_optimizer(config, model), [*random_tensors(shapes, 1, 1.0)])
    assert calls == [3, 2]


def test_unsupported_layers_are_left_to_torch(calls: list[int]) -> None:
    class Own(Tensor):
        pass

    dense = torch.randn(6, 4)
    odd = [
        dense.double(),
        dense.bfloat16(),
        dense.t(),
        torch.randn(6, 8)[:, ::2],
        torch.randn(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d),
        dense.as_subclass(Own),
    ]
    model = nn.ParameterList([nn.Parameter(weight) for weight in (dense, *odd)])
    before = [param.detach().clone() for param in model.parameters()]
    optimizer = build_optimizer(LAMB(), model)
    step(model, optimizer, [torch.ones_like(param) for param in model.parameters()])
    assert calls == [1]
    assert len(optimizer.trust_ratios()) == len(odd) + 1
    assert all(
        bool((new != old).all()) for new, old in zip(model.parameters(), before, strict=True)
    )


def test_a_custom_direction_is_computed_by_torch(calls: list[int]) -> None:
    model = model_of([torch.ones(2, 2)])

    def plain_gradient(
        params: list[Tensor], grads: list[Tensor], states: list[Any], weight_decay: float
    ) -> list[Tensor]:
        return grads

    optimizer = LALR(model.parameters(), plain_gradient, lr=0.1)
    step(model, optimizer, [torch.full((2, 2), 0.5)])
    assert calls == []
    torch.testing.assert_close(model[0].detach(), torch.full((2, 2), 0.9))


@pytest.mark.parametrize("config", EACH)
def test_autograd_detects_changed_weights(config: OptimizerSettings) -> None:
    model = model_of([torch.ones(3, 3)])
    optimizer = build_optimizer(config, model)
    loss = model[0].square().sum()
    step(model, optimizer, [torch.ones(3, 3)])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("config", EACH)
def test_copied_and_reloaded_optimizers_continue_bitwise_identically(
    config: OptimizerSettings,
) -> None:
    shapes = [(300, 200), (64, 3, 3, 3), (515,)]
    model = model_of(random_tensors(shapes, 0, 1.0), channels_last=True)
    optimizer = build_optimizer(config, model)
    for number in range(2):
        step(model, optimizer, [*random_tensors(shapes, number, 1.0)])
    twin, twins = copy.deepcopy((model, optimizer))
    third = copy.deepcopy(model)
    thirds = reload(config, third, optimizer)
    for number in range(2, 4):
        for both in ((model, optimizer), (twin, twins), (third, thirds)):
            step(*both, [*random_tensors(shapes, number, 1.0)])
    assert_same(tensors_of(twin, twins), tensors_of(model, optimizer))
    assert_same(tensors_of(third, thirds), tensors_of(model, optimizer))


def test_the_state_is_no_larger_than_adams() -> None:
    shapes = [(40, 30), (64, 3, 3, 3), (515,)]
    sizes = {}
    for kind, config in (("lamb", LAMB()), ("adam", None)):
        model = model_of(random_tensors(shapes, 0, 1.0))
        optimizer = config(model) if config else torch.optim.Adam(model.parameters())
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
        values = [value for state in optimizer.state.values() for value in state.values()]
        sizes[kind] = sum(value.nbytes for value in values if isinstance(value, Tensor))
    assert sizes["lamb"] <= sizes["adam"]


@pytest.fixture
def fresh() -> Iterator[None]:
    """Clears the cached libraries, before the test and after it."""
    native.load.cache_clear()
    yield
    native.load.cache_clear()


@pytest.mark.usefixtures("fresh")
def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernel.library() is not None
    native.load.cache_clear()
    monkeypatch.setenv("DAT_NO_KERNEL", "1")
    assert kernel.library() is None


@pytest.mark.usefixtures("fresh")
def test_a_missing_kernel_falls_back_to_torch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "kernel.so").write_bytes(b"no library")
    spec = ModuleSpec("dat.kernels._optimizer", None, origin=str(tmp_path / "kernel.so"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: spec)
    assert kernel.library() is None
    model = model_of([torch.ones(2, 2)])
    step(model, build_optimizer(LAMB(), model), [torch.ones(2, 2)])
    assert bool((model[0] != 1).all())
