"""Algorithm 1 against a loop written out by hand, and its side effects."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dat.attacks import FGSM, PGD, Attack, Free, NoAttack, Square, TargetedAPGD
from dat.core.rng import Streams
from dat.core.threat import ThreatModel
from dat.data import Batches, ImageData, Mix
from dat.distributed import Buckets, Gather, World
from dat.objectives import TRADES, Adversarial
from dat.optim import SGD, Constant
from dat.train import NotFinite, Trainer
from tests.trainers import make_trainer

EPS, RATE, BATCH = 0.1, 0.3, 12


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World.join() as joined:
        yield joined


def data(count: int = 36) -> ImageData:
    images = torch.rand(count, 1, 4, 4, generator=torch.Generator().manual_seed(1))
    return ImageData.of(images, torch.arange(count) % 3)


def net(dropout: float = 0.0) -> nn.Module:
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        layers = nn.Linear(16, 20), nn.Tanh(), nn.Dropout(dropout), nn.Linear(20, 3)
    return nn.Sequential(nn.Flatten(), *layers)


def trainer(world: World, model: nn.Module, **settings: object) -> Trainer:
    plain = {
        "threat": ThreatModel(eps=EPS),
        "attack": PGD(steps=3),
        "optimizer": SGD(lr=RATE, momentum=0.0, weight_decay=0.0),
        "schedule": Constant(),
        "epochs": 1,
        "batch": BATCH,
        "world": world,
    }
    return make_trainer(model=model, data=data(), **plain | settings)


def by_hand(model: nn.Module, made: Trainer, clean_weight: float) -> None:
    """min over theta of lambda * loss + max over delta of loss, by plain SGD and PGD-3."""
    images = data()
    for step in range(made.batches.steps):
        index = made.batches.sources[0].sampler.draw(0, step, 0)
        x, y = images.images[index], images.labels[index]
        draws = Streams.of(0, "attack", 0, step, index=index)
        x_adv = x + EPS * (2 * draws.uniform(x.shape) - 1)
        x_adv = x_adv.clamp(x - EPS, x + EPS).clamp(0, 1)
        for _ in range(3):
            x_adv = x_adv.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(F.cross_entropy(model(x_adv), y), x_adv)
            x_adv = x_adv.detach() + 2.5 * EPS / 3 * gradient.sign()
            x_adv = x_adv.clamp(x - EPS, x + EPS).clamp(0, 1)
        model.zero_grad()
        loss = F.cross_entropy(model(x_adv), y) + clean_weight * F.cross_entropy(model(x), y)
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.sub_(RATE * parameter.grad)


@pytest.mark.parametrize("clean_weight", [0.0, 0.7])
def test_an_epoch_equals_the_loop_by_hand(world: World, clean_weight: float) -> None:
    model = net()
    expected = copy.deepcopy(model)
    made = trainer(world, model, objective=Adversarial(clean_weight=clean_weight))
    made.fit()
    by_hand(expected, made, clean_weight)
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


def test_dropout_depends_on_the_seed_only_and_the_global_generator_is_untouched(
    world: World,
) -> None:
    weights = []
    for noise in (1, 2):
        torch.manual_seed(noise)
        before = torch.get_rng_state()
        trainer(world, model := net(dropout=0.5), attack_bn="train").fit()
        assert torch.equal(before, torch.get_rng_state())
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*weights)
    trainer(world, other := net(dropout=0.5), attack_bn="train", seed=1).fit()
    others = torch.cat([p.detach().flatten() for p in other.parameters()])
    assert not torch.equal(weights[0], others)


@pytest.mark.parametrize("attack", [PGD(steps=2), FGSM()])
def test_the_error_of_an_infinite_loss_names_worker_epoch_and_step(
    world: World, attack: Attack
) -> None:
    class Breaks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.calls = net(), 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += self.training
            logits: Tensor = self.net(x)
            return logits * float("inf") if self.calls == 5 else logits

    made = trainer(world, Breaks(), attack=attack, epochs=3)
    weights = []
    with pytest.raises(NotFinite, match=r"worker 0, epoch 2, step 2: the loss is (nan|inf)"):
        made.fit()
    weights = [parameter.isfinite().all() for parameter in made.model.parameters()]
    assert all(weights)


def test_free_training_equals_the_loop_by_hand(world: World) -> None:
    """Every batch three times; each backward pass updates the weights and the perturbation."""
    model, other = net(), net()
    made = trainer(world, model, attack=Free(replays=3))
    assert made.steps == 3 * made.batches.steps
    made.fit()
    images = data()
    for number in range(made.batches.steps):
        index = made.batches.sources[0].sampler.draw(0, number, 0)
        x, y = images.images[index], images.labels[index]
        delta = torch.zeros_like(x)
        for _ in range(3):
            x_adv = (x + delta).detach().requires_grad_()
            other.zero_grad()
            F.cross_entropy(other(x_adv), y).backward()
            assert x_adv.grad is not None
            delta = (delta + EPS * x_adv.grad.sign()).clamp(-EPS, EPS)
            delta = (x + delta).clamp(0, 1) - x
            descend(other)
    assert_same(model, other)


@pytest.mark.parametrize("gamma", [0.01, 0.1])
def test_weight_perturbation_equals_the_loop_by_hand(world: World, gamma: float) -> None:
    model, other = net(), net()
    made = trainer(world, model, attack=NoAttack(), awp=gamma)
    made.fit()
    images = data()
    for step in range(made.batches.steps):
        index = made.batches.sources[0].sampler.draw(0, step, 0)
        x, y = images.images[index], images.labels[index]
        other.zero_grad()
        F.cross_entropy(other(x), y).backward()
        before = copy.deepcopy(other.state_dict())
        with torch.no_grad():
            for weight in other.parameters():
                if weight.dim() > 1:
                    assert weight.grad is not None
                    weight.add_(gamma * weight.norm() * weight.grad / weight.grad.norm())
        other.zero_grad()
        F.cross_entropy(other(x), y).backward()
        other.load_state_dict(before)
        descend(other)
    assert_same(model, other)


def test_weight_perturbation_starts_after_its_warmup(world: World) -> None:
    plain, late = net(), net()
    trainer(world, plain).fit()
    trainer(world, late, awp=0.5, awp_warmup=1).fit()
    assert_same(plain, late, exactly=True)


def test_weight_perturbation_does_not_change_running_statistics(world: World) -> None:
    """They come from one forward pass per step, not from two."""
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(16), nn.Linear(16, 3))
    made = trainer(world, model, attack=NoAttack(), awp=0.1)
    made.fit()
    norm = model[1]
    assert isinstance(norm, nn.BatchNorm1d)
    assert int(norm.num_batches_tracked or 0) == made.steps


def descend(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.sub_(RATE * parameter.grad)


def assert_same(one: nn.Module, other: nn.Module, *, exactly: bool = False) -> None:
    tolerance = 0.0 if exactly else 1e-5
    for ours, theirs in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def test_unlabelled_images_are_refused_by_objectives_that_need_labels(world: World) -> None:
    rest = data().without_labels()
    with pytest.raises(ValueError, match="only trades learns from images without labels"):
        trainer(world, net(), unlabelled=rest)
    trainer(world, net(), unlabelled=rest, objective=TRADES())


def test_labelled_and_unlabelled_images_have_their_weights(world: World) -> None:
    """One step by hand: 8 labelled images with CE and KL, 4 unlabelled ones with a quarter of the
    KL."""
    model, other = net(), net()
    rest = data(20).without_labels()
    made = trainer(
        *(world, model),
        unlabelled=rest,
        mix=Mix(share=1 / 3, weight=0.25),
        objective=TRADES(beta=2.0),
        attack=NoAttack(),
    )
    batch = made.batches.draw(0, 0, torch.device("cpu"))
    assert (batch.y == -1).tolist() == [False] * 8 + [True] * 4
    assert (batch.numbers[8:] >= 36).all() and (batch.numbers[:8] < 36).all()
    made.batches = Batches(made.batches.sources, 1)
    made.fit()
    logits = other(batch.x)
    loss = F.cross_entropy(logits[:8], batch.y[:8], reduction="sum") / 9  # 8 + 4 / 4
    loss.backward()  # without an attack, the KL and its gradient are 0
    descend(other)
    assert_same(model, other)


def test_attacks_that_read_labels_are_refused_without_labels(world: World) -> None:
    rest = data().without_labels()
    for attack in (Square(queries=5), PGD(loss="margin"), TargetedAPGD()):
        with pytest.raises(ValueError, match="needs labels, and some images have none"):
            trainer(world, net(), unlabelled=rest, objective=TRADES(), attack=attack)


def test_free_training_with_weight_perturbation_ascends_the_updates_gradient(world: World) -> None:
    """Not also that of AWP's own pass: a vanishing weight perturbation changes nothing."""
    plain, both = net(), net()
    trainer(world, plain, attack=Free(replays=2)).fit()
    trainer(world, both, attack=Free(replays=2), awp=1e-12).fit()
    assert_same(plain, both)


def test_weight_perturbation_does_not_change_error_feedback(world: World) -> None:
    """The residuals of its own exchange are not added to an update."""
    plain, both = net(), net()
    two_bits = Buckets(bits=2, rounding="nearest", error_feedback=True, dense_below=0)
    for model, gamma in ((plain, 0.0), (both, 1e-12)):
        trainer(
            *(world, model),
            attack=NoAttack(),
            quantizer=two_bits,
            protocol=Gather(),
            awp=gamma,
        ).fit()
    assert_same(plain, both)
