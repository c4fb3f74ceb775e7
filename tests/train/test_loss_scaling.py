"""Training in float16: the loss is scaled as torch.amp.GradScaler scales it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dat.attacks import FGSM, PGD, YOPO, Attack, Free, NoAttack
from dat.core.settings import SettingError
from dat.core.threat import ThreatModel
from dat.data import ImageData
from dat.distributed import Buckets, Chunked, World
from dat.objectives import GradAlign
from dat.optim import SGD, Constant
from dat.train import NotFinite, Trainer
from dat.train.engine import Compute
from dat.train.free import FreeReplay
from dat.train.guard import SkippedSteps
from dat.train.loss_scaling import LossScale
from dat.train.step import StepReport
from tests.trainers import make_trainer

HALF = Compute(precision="float16", layout="given", fold=False)
EPS = 0.1


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World.join(device="cpu", threads=1) as joined:
        yield joined


def data(count: int = 48) -> ImageData:
    random = torch.Generator().manual_seed(1)
    labels = torch.arange(count) % 3
    images = torch.rand((count, 1, 6, 6), generator=random) * 0.5 + labels.reshape(-1, 1, 1, 1) / 6
    return ImageData.of(images, labels)


def made_from(*layers: nn.Module) -> nn.Sequential:
    """These layers, with random weights that do not depend on other tests."""
    net = nn.Sequential(*layers)
    random = torch.Generator().manual_seed(0)
    for weight in net.parameters():
        if weight.dim() > 1:
            nn.init.kaiming_normal_(weight, generator=random)
    for layer in net.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            assert layer.bias is not None
            nn.init.zeros_(layer.bias)
    return net


def plain() -> nn.Sequential:
    return made_from(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 3))


def normed() -> nn.Sequential:
    norm = nn.BatchNorm2d(8)
    return made_from(nn.Conv2d(1, 8, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(128, 3))


class Times(nn.Module):
    """A constant factor, in the precision of its input or in float32."""

    def __init__(self, factor: float, *, exact: bool = False) -> None:
        super().__init__()
        self.factor, self.exact = factor, exact

    def forward(self, x: Tensor) -> Tensor:
        return (x.float() if self.exact else x) * self.factor


class OverflowsAt(nn.Module):
    """Gradients through it overflow in the backward passes with these numbers, in training mode."""

    def __init__(self, *at: int) -> None:
        super().__init__()
        self.at, self.passes = at, 0

    def forward(self, x: Tensor) -> Tensor:
        if not (self.training and x.requires_grad):
            return x.clone()
        self.passes += 1
        y = x.clone()
        if self.passes in self.at:
            y.register_hook(lambda gradient: gradient * float("inf"))
        return y


def trainer(world: World, model: nn.Module, **settings: Any) -> Trainer:
    defaults: dict[str, Any] = {
        "threat": ThreatModel(eps=EPS),
        "attack": FGSM(),
        "optimizer": SGD(lr=0.05, momentum=0.9, weight_decay=0.0),
        "schedule": Constant(),
        "epochs": 4,
        "batch": 12,
        "world": world,
        "compute": HALF,
    }
    return make_trainer(model=model, **{"data": data()} | defaults | settings)


def fit_and_trace(made: Trainer) -> list[tuple[float, bool]]:
    """The scale of every step of a run, and whether the step was skipped."""
    part = made.parts.one(LossScale)
    trace, around_step = [], part.around_step

    def recorded(epoch: int, step: int, take: Callable[[], StepReport | None]) -> Any:
        scale = part.scale
        report = around_step(epoch, step, take)
        trace.append((scale, report is None))
        return report

    part.around_step = recorded  # type: ignore[method-assign]
    made.fit()
    return trace


@pytest.mark.parametrize("clip", [None, 0.1])
def test_scales_skipped_steps_and_weights_are_those_of_torch(
    world: World, clip: float | None
) -> None:
    """A plain loop with autocast and GradScaler; the scale starts too high, and grows too high."""
    ours, theirs, initial, interval = plain(), plain(), 2.0**20, 4
    optimizer = SGD(lr=0.05, momentum=0.9, weight_decay=0.0, clip=clip)
    settings = {"loss_scale": initial, "loss_scale_interval": interval, "epochs": 8}
    made = trainer(world, ours, attack=NoAttack(), optimizer=optimizer, **settings)
    trace = fit_and_trace(made)

    images, sampler = data(), made.batches.sources[0].sampler
    sgd = torch.optim.SGD(theirs.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", initial, growth_interval=interval)
    expected = []
    for epoch in range(8):
        for step in range(made.batches.steps):
            index = sampler.draw(epoch, step, 0)
            with torch.autocast("cpu", torch.float16):
                logits = theirs(images.images[index])
            sgd.zero_grad()
            scaler.scale(F.cross_entropy(logits.float(), images.labels[index])).backward()
            scaler.unscale_(sgd)
            if clip:
                nn.utils.clip_grad_norm_(theirs.parameters(), clip)
            scale = scaler.get_scale()
            scaler.step(sgd)
            scaler.update()
            expected.append((scale, scaler.get_scale() < scale))
    assert trace == expected
    assert len({scale for scale, _ in trace}) > 3
    skipped = [step for step, (_, skips) in enumerate(trace) if skips]
    assert skipped[:2] == [0, 1] and len(skipped) > 4  # at the start, and after the scale has grown
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def gradients(made: Trainer) -> dict[str, Tensor]:
    """The gradient that the optimizer gets in the first step."""
    made._join()
    made.worker.optimizer.step = lambda: None  # type: ignore[method-assign, assignment]
    assert made.parts.take_step(0, 0, lambda: made._step(0, 0)) is not None
    named = made.model.named_parameters()
    return {name: weight.grad.clone() for name, weight in named if weight.grad is not None}


@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize("settings", [{}, {"awp": 0.01}], ids=["plain", "awp"])
def test_the_gradient_is_that_of_float32_where_it_would_underflow(
    world: World, settings: dict[str, Any], pieces: int
) -> None:
    """The last layer's output gets gradients below 1e-8, which float16 rounds to 0."""

    images = data()
    images = ImageData.of(images.images, images.labels.clamp(max=1), classes=3)

    def first(**others: Any) -> dict[str, Tensor]:
        net = made_from(nn.Flatten(), nn.Linear(36, 16), nn.Linear(16, 3), Times(1e-8, exact=True))
        return gradients(trainer(world, net, data=images, attack=NoAttack(), **settings, **others))

    half = Compute(precision="float16", pieces=pieces)
    exact = first(compute=Compute())
    scaled, unscaled = (first(compute=half, loss_scale=s) for s in (2.0**24, 1.0))
    for name, gradient in exact.items():
        assert 0 < gradient.abs().max() < 1e-7
        assert (scaled[name] - gradient).norm() < 0.01 * gradient.norm(), name
        assert not unscaled[name].any(), name


ATTACKS: dict[str, Attack] = {
    "pgd": PGD(steps=4, random_start=False),
    "fgsm": FGSM(),
    "yopo": YOPO(steps=2, inner=2),
}


def attacked(world: World, net: nn.Module, name: str, **settings: Any) -> tuple[Tensor, Tensor]:
    """The images of the first batch, and the training attack on the network's own answers."""
    images = data()
    with torch.no_grad():
        answers = net.eval()(images.tensor()).argmax(1)
    images = ImageData.of(images.images, answers, classes=3)
    made = trainer(world, net, data=images, attack=ATTACKS[name], **settings)
    made._join()
    batch = made.worker.draw(0, 0)
    return batch.x, made.worker.perturb(batch, 0, 0)


@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize("name", ATTACKS)
def test_a_training_attack_in_float16_agrees_with_float32(
    world: World, name: str, mode: str
) -> None:
    """In eval mode on a network that is so certain that some losses are below 1e-10, in train mode
    on one whose gradients are all near 1e-9."""
    last = Times(20.0) if mode == "eval" else Times(1e-8, exact=True)
    x, exact = attacked(world, normed().append(last), name, compute=Compute(), attack_bn=mode)
    _, half = attacked(world, normed().append(last), name, attack_bn=mode, loss_scale=2.0**24)
    moved = (exact - x).abs() > EPS / 2
    assert moved.float().mean() > 0.5
    assert ((half - exact).abs() < EPS / 10)[moved].float().mean() > 0.9


def test_dependent_images_have_a_common_scale(world: World) -> None:
    """In train mode, or if a network always normalizes by the batch. Then the attack depends on
    the loss scale; otherwise it does not."""
    always = nn.BatchNorm2d(1, track_running_stats=False)
    for net, mode, common in (
        (normed(), "eval", False),
        (normed(), "train", True),
        (plain(), "eval", False),
        (made_from(always, *plain().children()), "eval", True),
    ):
        made = trainer(world, net, attack_bn=mode, loss_scale=2.0**10)
        made._join()
        batch = made.worker.draw(0, 0)
        scaling = made.worker.inner._gradient_scaling(
            made.worker, net.train(mode == "train"), batch
        )
        assert scaling is not None
        assert scaling.common == (2.0**10 / 12 if common else None)


class Bursts(nn.Module):
    """Out of the range of float16 in eval mode, that is, during attacks."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.bursts = plain(), True

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.net(x)
        return logits if self.training or not self.bursts else logits * 6e4 * 6e4


def test_an_overflow_during_the_attack_skips_the_step(world: World) -> None:
    made = trainer(world, Bursts(), loss_scale=4.0)
    made._join()
    batch = made.worker.draw(0, 0)
    assert made.worker.perturb(batch, 0, 0).isnan().all()
    made.model.bursts = False  # type: ignore[assignment]
    assert made.worker.perturb(batch, 0, 0).isfinite().all()
    made.model.bursts = True  # type: ignore[assignment]
    with pytest.raises(NotFinite, match="loss scale of float16 is at its minimum"):
        made.fit()


def everything(made: Trainer) -> dict[str, Any]:
    """What a step changes."""
    worker = made.worker
    return copy.deepcopy(
        {
            "model": made.model.state_dict(),
            "optimizer": worker.optimizer.state_dict()["state"],
            "memories": [memory.residual for memory in worker.exchange.memories],
            "ema": made.models()["ema-"].state_dict(),
            "updates": made.updates,
            "taken": made.tally.taken,
        }
    )


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)


def test_a_skipped_step_leaves_no_trace_but_the_scale(world: World) -> None:
    """Not in batch norm statistics, error feedback, moments or averaged weights."""
    made = trainer(
        world,
        normed().append(OverflowsAt(3)),
        quantizer=Buckets(bits=4, error_feedback=True),
        protocol=Chunked(),
        ema=0.9,
    )
    part, seen = made.parts.one(LossScale), []
    around_step = part.around_step

    def watched(epoch: int, step: int, take: Callable[[], StepReport | None]) -> Any:
        before = everything(made)
        report = around_step(epoch, step, take)
        seen.append((report is None, before, everything(made), part.scale))
        return report

    part.around_step = watched  # type: ignore[method-assign]
    records = made.fit()
    assert [step for step, (skipped, *_) in enumerate(seen) if skipped] == [2]
    _, before, after, scale = seen[2]
    assert equal(before, after) and scale == 2.0**15
    assert any(memory.any() for memory in before["memories"])
    assert not any(equal(before, after) for skipped, before, after, _ in seen if not skipped)
    assert [record.skipped_steps for record in records] == [1, 0, 0, 0]
    assert {record.loss_scale for record in records} == {2.0**15}
    assert made.updates == 15
    assert part.warnings(made) == [
        "float16: 1 of 16 steps skipped after an overflow; the loss scale ended at 32768"
    ]


def test_the_exchange_sends_and_remembers_the_unscaled_gradient(world: World) -> None:
    """Quantized with error feedback, in float32, where a power of two loses no bit."""

    def exchanged(scale: float) -> list[Tensor]:
        quantizer = Buckets(bits=4, error_feedback=True)
        settings: dict[str, Any] = {"quantizer": quantizer, "protocol": Chunked()}
        made = trainer(world, plain(), compute=Compute(), **settings)
        made._join()
        worker, exchange = made.worker, made.worker.exchange
        exchange.loss_scale = scale
        for step in range(2):
            batch = worker.draw(0, step)
            exchange.begin(0, step)
            worker.backward(worker.forward(batch, batch.x), batch)
        memories = [memory.residual for memory in exchange.memories]
        assert memories[0].any()
        return [*memories, *(p.grad for p in made.model.parameters() if p.grad is not None)]

    for one, other in zip(exchanged(1.0), exchanged(2.0**40), strict=True):
        assert torch.equal(one, other)


def test_divergence_is_reported_at_the_smallest_scale(world: World) -> None:
    made = trainer(world, plain().append(OverflowsAt(*range(3, 99))), loss_scale=8.0)
    with pytest.raises(NotFinite, match=r"step 2: the gradient of 0.weight .* minimum, 1: use com"):
        made.fit()
    assert made.parts.one(LossScale).skipped == 3
    weights = [weight.isfinite().all() for weight in made.model.parameters()]
    assert all(weights)


def test_the_guard_sees_only_steps_that_scaling_does_not_fix(world: World) -> None:
    made = trainer(world, plain().append(OverflowsAt(2, 5, 6, 7)), loss_scale=4.0, guard="skip")
    made.fit()
    assert made.parts.one(LossScale).skipped == 2
    assert made.parts.one(SkippedSteps).steps == [[1, 1], [1, 2]]
    assert made.updates == 12


class Faulty(nn.Module):
    """The gradient of the images overflows in one pass, and that of the weights does not."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.first, self.net = OverflowsAt(at), plain()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.first(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize("at", [1, 2, 4])
def test_free_training_survives_an_overflow_of_the_images_gradient(world: World, at: int) -> None:
    """Also in the first replay of a batch, where the next one has nothing to continue from."""
    started: list[tuple[Tensor, Tensor]] = []
    made = trainer(world, Faulty(at), attack=Free(replays=3), epochs=1)
    made._join()
    inner, perturb = made.worker.inner, made.worker.inner.perturb
    part = made.parts.one(LossScale)

    def recorded(worker: Any, batch: Any, epoch: int, step: int) -> Tensor:
        x_adv = perturb(worker, batch, epoch, step)
        started.append((batch.x, x_adv.detach().clone()))
        return x_adv

    inner.perturb = recorded  # type: ignore[method-assign]
    for step in range(6):
        report = made.parts.take_step(0, step, partial(made._step, 0, step))
        assert (report is None) is (step == at - 1)
    assert part.skipped == 1
    assert all(((x_adv - x).abs() <= EPS + 1e-6).all() for x, x_adv in started)
    for step, ((_, before), (_, after)) in enumerate(pairwise(started)):
        if step % 3 != 2:
            assert torch.equal(before, after) is (step == at - 1)


def test_free_training_attacks_with_the_unscaled_gradient(world: World) -> None:
    """In l2, the perturbation is as long as the gradient's direction is right."""
    l2 = ThreatModel(norm="l2", eps=0.5)
    ends = []
    for compute in (Compute(), HALF):
        made = trainer(world, plain(), attack=Free(replays=3), threat=l2, compute=compute)
        made._join()
        made._step(0, 0)
        assert isinstance(made.worker.inner, FreeReplay)
        ends.append(made.worker.inner.replayed[0])
    assert (ends[0] - ends[1]).flatten(1).norm(dim=1).max() < 0.01


def test_second_derivatives_are_refused(world: World) -> None:
    with pytest.raises(SettingError, match=r"compute.precision = float16: the gradients within"):
        trainer(world, plain(), objective=GradAlign())


def test_other_precisions_have_no_scale(world: World) -> None:
    for precision in ("float32", "bfloat16"):
        made = trainer(world, plain(), compute=Compute(precision=precision), epochs=1)
        (record,) = made.fit()
        assert not any(isinstance(part, LossScale) for part in made.parts)
        assert made.worker.exchange.loss_scale == 1.0 and record.loss_scale is None


def test_the_scale_stops_growing_before_it_is_infinite(world: World) -> None:
    made = trainer(world, plain(), attack=NoAttack(), loss_scale=2.0**127, loss_scale_interval=1)
    made._join()
    part = made.parts.one(LossScale)
    report = StepReport(0.0, 0.0, made.worker.exchange.ledger.read_and_reset())
    part.around_step(0, 0, lambda: report)
    assert part.scale == made.worker.exchange.loss_scale == 2.0**127
