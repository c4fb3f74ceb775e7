"""LAMB and LARS in Triton, run by Triton's interpreter, give the bits of the native kernel, and
agree with torch's foreach functions up to rounding. No GPU is involved."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dat.core import devices
from dat.kernels import optimizer as kernel
from dat.optim import LAMB, LARS, OptimizerSettings
from tests.distributed.cases import bits_of
from tests.kernels.triton_tools import interpreted
from tests.optim.test_kernel import (
    CONFIGS,
    EACH,
    Forced,
    assert_alike,
    build_optimizer,
    model_of,
    random_tensors,
    step,
    tensors_of,
)

KERNELS = "dat.kernels.optimizer_triton"
LAUNCH = "dat.kernels.optimizer_triton_launch"
SHAPES = [(), (0,), (7,), (9, 5), (4, 3, 3, 3), (301,)]
native = pytest.mark.skipif(kernel.library() is None, reason="no native kernel here")


@pytest.fixture(scope="module")
def triton_launch() -> Iterator[Any]:
    with interpreted(KERNELS, LAUNCH) as module:
        yield module


class OnGPU:
    """A context in which the CPU passes for a GPU with Triton, or without."""

    def __init__(self, triton_launch: Any) -> None:
        self.launch = triton_launch

    def __enter__(self) -> None:
        kernel.triton_update.cache_clear()
        self.patch = pytest.MonkeyPatch()
        self.patch.delenv("DAT_NO_KERNEL", raising=False)
        self.patch.setattr(devices, "is_accelerator", lambda device: True)
        self.patch.setattr(devices, "supports_triton", lambda device: True)
        self.patch.setitem(sys.modules, LAUNCH, self.launch)

    def __exit__(self, *_: object) -> None:
        self.patch.undo()
        kernel.triton_update.cache_clear()


def after_steps(
    config: OptimizerSettings,
    context: Any,
    *,
    shapes: Sequence[tuple[int, ...]] = SHAPES,
    scales: tuple[float, float] = (1.0, 0.1),
    steps: int = 2,
    absent: int = -1,
    broken: float = 0.0,
    channels_last: bool = False,
) -> list[Tensor]:
    """Weights, moments and ratios; the third layer starts at zero, and layer `absent` has no
    gradient in the first step."""
    weights = random_tensors(shapes, 0, scales[0])
    weights[min(2, len(shapes) - 1)].zero_()
    model = model_of(weights, channels_last=channels_last)
    optimizer = build_optimizer(config, model)
    with context:
        for number in range(steps):
            grads: list[Tensor | None] = [*random_tensors(shapes, number + 1, scales[1])]
            if number == 0 and 0 <= absent < len(grads):
                grads[absent] = None
            last = grads[-1]
            if broken and last is not None:
                last.view(-1)[3] = broken
            step(model, optimizer, grads)
    return tensors_of(model, optimizer)


def assert_same_bits(mine: list[Tensor], theirs: list[Tensor]) -> None:
    assert len(mine) == len(theirs)
    for a, b in zip(mine, theirs, strict=True):
        assert torch.equal(bits_of(a), bits_of(b))


@native
@pytest.mark.parametrize(
    ("config", "decay"), [*((c, 0.1) for c in CONFIGS), *((c, 0.0) for c in EACH)]
)
def test_a_step_is_bitwise_identical_to_the_native_kernel(
    triton_launch: Any, config: OptimizerSettings, decay: float
) -> None:
    config = type(config).read(config.dump() | {"weight_decay": decay})
    mine = after_steps(config, OnGPU(triton_launch), absent=3)
    assert_same_bits(mine, after_steps(config, Forced(), absent=3))


@pytest.mark.parametrize("config", EACH)
def test_a_step_agrees_with_foreach(triton_launch: Any, config: OptimizerSettings) -> None:
    mine = after_steps(config, OnGPU(triton_launch), channels_last=True)
    assert_alike(mine, after_steps(config, Forced(kernel=False), channels_last=True))


@native
@pytest.mark.parametrize("config", [LARS(), LARS(preset="classic")])
def test_layers_of_several_blocks(triton_launch: Any, config: OptimizerSettings) -> None:
    """The last tile of the second block has a few values."""
    options: dict[str, Any] = {"shapes": [(16384 + 7,), (5,)], "steps": 1}
    mine = after_steps(config, OnGPU(triton_launch), **options)
    assert_same_bits(mine, after_steps(config, Forced(), **options))


@native
@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf, 3e38, 1e-45])
@pytest.mark.parametrize("config", EACH)
def test_values_that_are_not_finite(
    triton_launch: Any, config: OptimizerSettings, broken: float
) -> None:
    options: dict[str, Any] = {"shapes": [(9, 5), (40,)], "broken": broken}
    mine = after_steps(config, OnGPU(triton_launch), **options)
    assert_same_bits(mine, after_steps(config, Forced(), **options))


@native
@settings(max_examples=8)
@given(
    config=st.sampled_from(CONFIGS),
    shapes=st.lists(st.sampled_from(SHAPES), min_size=1, max_size=4),
    scales=st.tuples(*(st.sampled_from([1e-42, 1e-25, 1e-3, 1.0, 1e18]) for _ in range(2))),
    decay=st.sampled_from([0.0, 1e-4, 0.5]),
    absent=st.integers(-1, 3),
)
def test_any_combination(
    triton_launch: Any,
    config: OptimizerSettings,
    shapes: list[tuple[int, ...]],
    scales: tuple[float, float],
    decay: float,
    absent: int,
) -> None:
    config = type(config).read(config.dump() | {"weight_decay": decay})
    options: dict[str, Any] = {"shapes": shapes, "scales": scales, "absent": absent}
    mine = after_steps(config, OnGPU(triton_launch), **options)
    assert_same_bits(mine, after_steps(config, Forced(), **options))


def test_layers_beside_each_other_in_memory_are_not_touched(triton_launch: Any) -> None:
    row = torch.full((60,), 3.0)
    model = torch.nn.ParameterList([torch.nn.Parameter(row[8:-9])])
    with OnGPU(triton_launch):
        step(model, build_optimizer(LAMB(), model), [torch.ones(43)])
    assert (row[:8] == 3).all() and (row[-9:] == 3).all() and not (row[8:-9] == 3).any()


def test_without_triton_foreach_is_used_silently() -> None:
    mine = after_steps(LAMB(), OnGPU(None))
    assert all(map(torch.equal, mine, after_steps(LAMB(), Forced(kernel=False))))


def test_it_can_be_switched_off(triton_launch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cpu")
    with OnGPU(triton_launch):
        assert kernel.triton_update(device) is not None
        kernel.triton_update.cache_clear()
        monkeypatch.setenv("DAT_NO_KERNEL", "1")
        assert kernel.triton_update(device) is None
