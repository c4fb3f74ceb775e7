"""mixup and CutMix: pairs, labels and boxes, against what is written out by hand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dat.attacks import FGSM, PGD, Free, NoAttack, TargetedAPGD
from dat.core.rng import derive
from dat.core.settings import SettingError
from dat.core.threat import ThreatModel
from dat.data import Augmentation, Batches, BatchSource, ImageData, Mix, RandomPartitionSampler
from dat.distributed import World
from dat.objectives import MART, TRADES, Batch
from dat.optim import SGD, Constant
from dat.train import Trainer
from dat.train.mixing import Box, blend, paste, random_box
from dat.train.sampling import Sampler
from tests.trainers import make_trainer

CLASSES = 3


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World.join(device="cpu", threads=1) as joined:
        yield joined


def data(count: int = 36) -> ImageData:
    """Every image has a grey of its own."""
    images = torch.arange(1, count + 1).div(count).reshape(-1, 1, 1, 1).expand(-1, 1, 6, 4)
    return ImageData.of(images.contiguous(), torch.arange(count) % CLASSES)


def trainer(world: World, **settings: Any) -> Trainer:
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(24, CLASSES))
    plain: dict[str, Any] = {
        "attack": PGD(steps=2),
        "threat": ThreatModel(eps=0.05),
        "optimizer": SGD(lr=0.1, momentum=0.0, weight_decay=0.0),
        "schedule": Constant(),
        "epochs": 1,
        "batch": 12,
        "parts": 2,
    }
    made = make_trainer(model=model, data=data(), world=world, **plain | settings)
    made._join()
    return made


def partners(made: Trainer, step: int) -> Tensor:
    """The next image of the same partition in the batch, cyclically."""
    sampler = made.batches.sources[0].sampler
    return torch.cat(
        [torch.from_numpy(sampler.partition_batch(0, step, p)).roll(-1) for p in (0, 1)]
    )


def drawn(made: Trainer, step: int) -> tuple[Batch, Batch]:
    """A batch as drawn, and as mixed."""
    return made.worker.sampler.draw(0, step), made.worker.draw(0, step)


def test_mixup_is_a_weighted_mean_of_images_and_of_labels(world: World) -> None:
    made = trainer(world, mixup=0.8)
    for step in range(made.steps):
        plain, mixed = drawn(made, step)
        weight = Random(derive(0, "mixing", 0, step)).betavariate(0.8, 0.8)
        other = partners(made, step)
        assert not (other == plain.draws.index).any()
        images, labels = data().images, F.one_hot(data().labels, CLASSES)
        expected = weight * plain.x + (1 - weight) * images[other]
        torch.testing.assert_close(mixed.x, expected)
        soft = weight * labels[plain.y % CLASSES] + (1 - weight) * labels[other % CLASSES]
        torch.testing.assert_close(mixed.y, soft.float())
        assert torch.equal(mixed.draws.index, plain.draws.index)


def test_cutmix_pastes_a_box_and_weights_labels_by_area(world: World) -> None:
    made = trainer(world, cutmix=1.0)
    weights = set()
    for step in range(made.steps):
        plain, mixed = drawn(made, step)
        foreign = data().images[partners(made, step)]
        pasted = mixed.x != plain.x
        assert torch.equal(mixed.x[pasted], foreign[pasted])
        share = pasted[0].float().mean()
        assert all(torch.equal(mask, pasted[0]) for mask in pasted)  # one box per batch
        rows, columns = pasted[0, 0].any(1).nonzero(), pasted[0, 0].any(0).nonzero()
        assert pasted[0].sum() == len(rows) * len(columns)
        labels = F.one_hot(torch.stack((plain.y, partners(made, step) % CLASSES)), CLASSES)
        torch.testing.assert_close(mixed.y, (1 - share) * labels[0] + share * labels[1])
        weights.add(float(share))
    assert len(weights) > 1


def test_both_take_half_of_the_batches_each(world: World) -> None:
    made = trainer(world, mixup=1.0, cutmix=1.0, epochs=60)
    mixed = 0
    for epoch in range(60):
        for step in range(made.steps):
            before, x = made.worker.sampler.draw(epoch, step).x, made.worker.draw(epoch, step).x
            one_grey = bool((x == x[:, :, :1, :1]).all())
            mixed += one_grey and not torch.equal(x, before)  # the box of CutMix may be empty
    assert 70 < mixed < 110  # of 180


def test_a_weight_of_one_changes_nothing() -> None:
    x, other = torch.rand(2, 5, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    assert torch.equal(blend(x, other, 1.0), x)
    assert torch.equal(paste(x, other, random_box(6, 6, 0.0, Random(0))), x)


def test_a_box_has_its_area_unless_it_is_clipped() -> None:
    random, clipped = Random(0), 0
    for _ in range(200):
        area = random.random()
        box = random_box(64, 48, area, random)
        assert 0 <= box.top <= box.bottom <= 64 and 0 <= box.left <= box.right <= 48
        height, width = int(64 * area**0.5) // 2 * 2, int(48 * area**0.5) // 2 * 2
        inside = box.top > 0 and box.bottom < 64 and box.left > 0 and box.right < 48
        assert box.area == height * width if inside else box.area <= height * width
        clipped += not inside
    assert 0 < clipped < 200
    assert Box(1, 3, 2, 7).area == 10


@pytest.mark.parametrize("attack", [PGD(steps=2), FGSM(), Free(replays=1), NoAttack()])
def test_with_eps_zero_it_is_the_clean_loss(world: World, attack: Any) -> None:
    made = trainer(world, mixup=0.4, cutmix=1.0, attack=attack, threat=ThreatModel(eps=0.0))
    worker, model = made.worker, made.model
    batch = worker.draw(0, 1)
    outcome = worker.forward(batch, worker.perturb(batch, 0, 1).detach())
    expected = -(batch.y * model(batch.x).log_softmax(1)).sum(1)
    torch.testing.assert_close(outcome.loss, expected)


def test_replays_and_repeated_draws_are_the_same(world: World) -> None:
    made = trainer(world, mixup=0.4, attack=Free(replays=3))
    first, again, later = (made.worker.draw(0, step) for step in (0, 2, 3))
    assert torch.equal(first.x, again.x) and torch.equal(first.y, again.y)
    assert not torch.equal(first.x, later.x)


def test_partners_are_augmented_as_in_their_own_row(world: World) -> None:
    augmentation = Augmentation(kind="crop-flip", cutout=2)
    made = trainer(world, mixup=0.4, augmentation=augmentation, grow=(1,), epochs=2)
    plain = made.worker.sampler.draw(1, 0)
    assert plain.lengths == (12, 12)
    x, y = made.worker.sampler.partners(plain, 1, 0)
    place = {int(number): row for row, number in enumerate(plain.draws.index)}
    sampler = made.batches.sources[0].sampler
    rows = [place[int(n)] for step in (0, 1) for n in sampler.draw(1, step, 0, shift=1)]
    assert torch.equal(x, plain.x[rows]) and torch.equal(y, plain.y[rows])
    assert sorted(rows) == list(range(24))


@pytest.mark.parametrize("workers", [2, 3, 5])
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_partners_do_not_depend_on_the_number_of_workers(
    world: World, workers: int, parts: int
) -> None:
    """Even if workers share a partition: they read what the others draw."""

    def mixed(size: int, rank: int) -> tuple[Tensor, Tensor, Tensor]:
        sources, offset = [], 0
        for seed, count in ((3, 20), (4, 10)):  # labelled and other images
            sampler = RandomPartitionSampler(30, count, workers=size, seed=seed, parts=parts)
            sources.append(replace(BatchSource.of(data(30), sampler, rank), offset=offset))
            offset += 30
        sampler_of = Sampler(
            batches=Batches(sources, 1),
            threat=ThreatModel(),
            subgroup=made.worker.subgroup,
            device=torch.device("cpu"),
            augmentation=Augmentation(kind="crop-flip"),
        )
        batch = sampler_of.draw(2, 0)
        return batch.draws.index, *sampler_of.partners(batch, 2, 0)

    made = trainer(world)
    index, x, y = mixed(1, 0)
    alone = {int(number): row for row, number in enumerate(index)}
    seen = 0
    for rank in range(workers):
        own, own_x, own_y = mixed(workers, rank)
        rows = [alone[int(number)] for number in own]
        assert torch.equal(own_x, x[rows]) and torch.equal(own_y, y[rows])
        seen += len(own)
    assert seen == len(index) == 30


def test_unlabelled_images_keep_weight_zero(world: World) -> None:
    made = trainer(
        world,
        mixup=0.4,
        objective=TRADES(),
        unlabelled=data(18).without_labels(),
        mix=Mix(share=1 / 3),
    )
    batch = made.worker.draw(0, 0)
    labelled = batch.y.sum(1)
    torch.testing.assert_close(labelled, torch.tensor([1.0] * 8 + [0.0] * 4))
    (record,) = made.fit()
    assert record.loss > 0


def test_accuracy_is_that_of_the_larger_weight(world: World) -> None:
    made = trainer(world, mixup=0.4, attack=NoAttack(), optimizer=SGD(lr=1e-9))
    labels = torch.cat([made.worker.draw(0, step).y.argmax(1) for step in range(3)])
    images = torch.cat([made.worker.draw(0, step).x for step in range(3)])
    right = (made.model(images).argmax(1) == labels).float().mean()
    (record,) = made.fit()
    assert record.train_ra == pytest.approx(100 * float(right))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mixup": 0.8, "objective": MART()}, "train.mixup = 0.8: objective mart needs one label"),
        ({"cutmix": 1.0, "attack": PGD(loss="dlr")}, "train.cutmix = 1: attack.loss = dlr: not"),
        ({"mixup": 1, "attack": PGD(patience=1)}, "attack.patience = 1: mixed images are never"),
        ({"mixup": 1, "attack": TargetedAPGD()}, "TargetedAPGD targets wrong classes"),
        ({"cutmix": 1, "attack": PGD(carry=True)}, "attack.carry needs the same images"),
        ({"cutmix": 1, "parts": 12}, "leave some without a partner; use train.batch = 24 or more"),
        ({"mixup": -1}, "train.mixup = -1: must be at least 0"),
    ],
)
def test_incompatible_settings_are_refused(
    world: World, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(SettingError, match=message) as error:
        trainer(world, **settings)
    assert "\n" not in str(error.value)
