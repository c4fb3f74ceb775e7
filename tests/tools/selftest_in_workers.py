"""Faults that the self-test has to find, planted in the workers one after the other."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dat.attacks.target import ValueAndGrad
from dat.core import precision
from dat.distributed import Chunked, Gather, World, reducer
from dat.distributed.protocols import chunked, gather
from dat.kernels.quantize.codec import Codec
from dat.models import folding
from dat.optim import LAMBSettings, lalr
from dat.tools.selftest import link, protocols
from dat.tools.selftest.registry import Check, select
from dat.tools.selftest.result import Context, Result, passed
from dat.tools.selftest.runner import CheckRunner, dump
from dat.train.checkpointer import Checkpoint

Plant = Callable[[pytest.MonkeyPatch], None]


def rank() -> int:
    return int(os.environ["RANK"])


def wrap(patch: pytest.MonkeyPatch, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace a function by `wrapper(original, *arguments)`."""
    patch.setattr(owner, name, _Wrapped(getattr(owner, name), wrapper))


class _Wrapped:
    def __init__(self, original: Any, wrapper: Callable[..., Any]) -> None:
        self.original, self.wrapper = original, wrapper

    def __get__(self, owner: Any, kind: Any) -> Any:
        return self if owner is None else partial(self.wrapper, self.original, owner)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self.wrapper(self.original, *arguments, **options)


def old_torch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch, "__version__", "2.4.1")


def coarse_products(patch: pytest.MonkeyPatch) -> None:
    """As if TF32 were on: inputs of float32 products lose 13 bits."""

    def product(original: Any, a: Tensor, b: Tensor) -> Tensor:
        if a.dtype == torch.float32:
            a, b = (((t.view(torch.int32) + 4096) & ~8191).view(torch.float32) for t in (a, b))
        return original(a, b)  # type: ignore[no-any-return]

    wrap(patch, torch.Tensor, "__matmul__", product)


def wrong_random_numbers(patch: pytest.MonkeyPatch) -> None:
    from dat.core import rng

    wrap(patch, rng, "philox_words", lambda original, index, blocks, key: None)
    wrap(patch, rng, "philox", lambda original, counter, key: original(counter, (key[0] + 1, 0)))


def one_wrong_bit(patch: pytest.MonkeyPatch) -> None:
    def encode(
        original: Any, codec: Codec, x: Tensor, layout: Any, message: Tensor, *a: Any
    ) -> None:
        original(codec, x, layout, message, *a)
        if codec.bits == 5:
            message[-1] ^= 1

    wrap(patch, Codec, "encode", encode)


def wrong_decoder(patch: pytest.MonkeyPatch) -> None:
    """Only subtraction is wrong, in the last value."""

    def decode(
        original: Any, codec: Codec, message: Tensor, layout: Any, out: Tensor, mode: str
    ) -> None:
        original(codec, message, layout, out, mode)
        if mode == "subtract":
            out[-1] += 1e-3

    wrap(patch, Codec, "decode", decode)


def wrong_optimizer(patch: pytest.MonkeyPatch) -> None:
    """The float32 path, native or not, takes steps that are a thousandth too large."""

    def step(original: Any, optimizer: Any) -> None:
        groups = optimizer.param_groups
        if groups[0]["params"][0].dtype != torch.float32:
            original(optimizer)
            return
        rates = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] *= 1.001
        original(optimizer)
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate

    wrap(patch, lalr.Layerwise, "step", step)


def wrong_convolution(patch: pytest.MonkeyPatch) -> None:
    from dat.kernels.convolve import layers

    def forward(original: Any, layer: Any, x: Tensor) -> Tensor:
        out: Tensor = original(layer, x).clone()
        out[-1, -1, -1, -1] *= 1.01
        return out

    wrap(patch, layers, "_forward", forward)


def folded_wrongly(patch: pytest.MonkeyPatch) -> None:
    """So little that the folding's own check of the logits, to 1e-3, does not notice."""

    def affine(original: Any, norm: Any) -> tuple[Tensor, Tensor]:
        scale, shift = original(norm)
        return scale * 1.0002, shift

    wrap(patch, folding, "_affine", affine)


def dropped_last(patch: pytest.MonkeyPatch) -> None:
    def spread(original: Any, route: Any, x: Tensor, group: Any) -> Any:
        sent = original(route, x, group)
        x[-1] = 0.0
        return sent

    patch.setattr(protocols, "CONCRETE_PROTOCOLS", {"chunked": Chunked})
    wrap(patch, chunked.ChunkedRoute, "spread", spread)


def kept_own_first(patch: pytest.MonkeyPatch) -> None:
    """The first value stays what this worker had."""

    def spread(original: Any, route: Any, x: Tensor, group: Any) -> Any:
        own = x[0].clone()
        sent = original(route, x, group)
        x[0] = own
        return sent

    patch.setattr(protocols, "CONCRETE_PROTOCOLS", {"gather": Gather})
    wrap(patch, gather.GatherRoute, "spread", spread)


def biased(patch: pytest.MonkeyPatch) -> None:
    """Rounds to the nearest, within all bounds."""

    def build(original: Any, codec: Codec, *arguments: Any, **options: Any) -> None:
        original(codec, *arguments, **options)
        codec._random = False

    patch.setattr(protocols, "CONCRETE_PROTOCOLS", {"chunked": Chunked})
    wrap(patch, Codec, "__init__", build)


def different_replicas(patch: pytest.MonkeyPatch) -> None:
    def make(original: Any, settings: LAMBSettings, model: Any, **options: Any) -> Any:
        optimizer = original(settings, model, **options)
        optimizer.param_groups[0]["lr"] *= 1 + 1e-6 * rank()
        return optimizer

    wrap(patch, LAMBSettings, "__call__", make)


def early_future(patch: pytest.MonkeyPatch) -> None:
    """A bucket is called done before the second stage has begun."""

    def run(original: Any, stage: Any, job: Any) -> None:
        if not job.done.done():
            job.done.set_result(job.gradient)
        original(stage, job)

    def done(original: Any, lane: Any) -> None:
        while (job := lane.queue.get()) is not None:
            lane.stage.run(job)
            if lane._next_lane:
                lane._next_lane.queue.put(job)

    wrap(patch, reducer._Stage, "run", run)
    wrap(patch, reducer._Lane, "run", done)


def not_repeatable(patch: pytest.MonkeyPatch) -> None:
    """Every optimizer has a slightly higher rate than the one before it, on all workers."""
    made: list[int] = []

    def make(original: Any, settings: LAMBSettings, model: Any, **options: Any) -> Any:
        optimizer = original(settings, model, **options)
        made.append(1)
        optimizer.param_groups[0]["initial_lr"] *= 1 + 1e-5 * len(made)
        return optimizer

    wrap(patch, LAMBSettings, "__call__", make)


def forgotten_on_resume(patch: pytest.MonkeyPatch) -> None:
    """The residuals of error feedback are not restored."""
    patch.setattr(Checkpoint, "_restore_workers", lambda checkpoint, trainer: None)


def unscaled_float16(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(precision, "scale_gradients", lambda network, x: network(x))


def vanishing_bfloat16(patch: pytest.MonkeyPatch) -> None:
    from dat.attacks import pgd

    def vanish(original: Any, loss: Any, x: Tensor, **options: Any) -> ValueAndGrad:
        value: ValueAndGrad = original(loss, x, **options)
        logits = loss.model(x)
        rounded = bool((logits.bfloat16().float() == logits).all())
        return value._replace(gradient=value.gradient * 0) if rounded else value

    wrap(patch, pgd, "value_and_grad", vanish)


def stopped_clock(patch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(perf_counter=lambda: 1.0)
    patch.setattr(link, "time", clock)


def stopped_clock_of_steps(patch: pytest.MonkeyPatch) -> None:
    stopped_clock(patch)


FAULTS: dict[str, tuple[str, Plant]] = {
    plant.__name__: (check, plant)
    for check, plant in (
        ("environment", old_torch),
        ("float32", coarse_products),
        ("rng", wrong_random_numbers),
        ("quantizer", one_wrong_bit),
        ("quantizer", wrong_decoder),
        ("optimizer", wrong_optimizer),
        ("convolution", wrong_convolution),
        ("folding", folded_wrongly),
        ("protocols", dropped_last),
        ("protocols", kept_own_first),
        ("protocols", biased),
        ("replicas", different_replicas),
        ("order", early_future),
        ("determinism", not_repeatable),
        ("determinism", forgotten_on_resume),
        ("float16", unscaled_float16),
        ("bfloat16", vanishing_bfloat16),
        ("link", stopped_clock),
        ("overlap", stopped_clock_of_steps),
    )
}
"""By name: the check that has to fail, and the fault."""


def fails_on_the_last(context: Context) -> Result:
    """The last worker raises; the others wait for it in a collective."""
    if context.world.rank == context.world.size - 1:
        raise ValueError("cannot do this\nfor many reasons")
    context.world.barrier()
    return passed("not reached")


def hangs_on_the_last(context: Context) -> Result:
    if context.world.rank == context.world.size - 1:
        time.sleep(60)
    return passed("the others are done")


class Local(Check):
    """A check of this module."""

    def load(self) -> Callable[[Context], Result]:
        check: Callable[[Context], Result] = globals()[self.name]
        return check


def local(name: str) -> Check:
    return Local(name, "", "")


def make_runner(world: World, timeout: float = 60.0) -> CheckRunner:
    return CheckRunner(
        Context(world), timeout, on_outcome=lambda outcome: None, on_hang=lambda: None
    )


def plant_all(folder: Path) -> None:
    """Run the check of each fault with it."""
    with World.join(device="cpu", threads=1) as world:
        runner, found = make_runner(world), {}
        for name, (check, plant) in FAULTS.items():
            with pytest.MonkeyPatch.context() as patch:
                plant(patch)
                outcomes = runner.run(select([check]))
            found[name] = dump(outcomes[-1])
        (folder / f"{world.rank}.json").write_text(json.dumps(found))


def raise_on_one(folder: Path) -> None:
    """A worker raises inside of a check, in the middle of a collective of the others."""
    world = World.join(device="cpu", threads=1, timeout=1.0)
    runner = make_runner(world)
    outcomes = runner.run([local("fails_on_the_last"), *select(["rng", "replicas"])])
    (folder / f"{world.rank}.json").write_text(json.dumps([dump(it) for it in outcomes]))
    world.close()


def hang_on_one(folder: Path) -> None:
    world = World.join(device="cpu", threads=1)
    runner = make_runner(world, timeout=1.0)

    def write() -> None:
        outcomes = [dump(outcome) for outcome in runner.outcomes]
        (folder / f"{world.rank}.json").write_text(json.dumps(outcomes))

    runner.on_hang = write
    runner.run([local("hangs_on_the_last"), *select(["rng"])])
