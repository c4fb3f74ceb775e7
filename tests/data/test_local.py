"""Partitions that stay on their nodes: equation 2 with unequal sizes, traversals, holdouts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from dat.attacks import NoAttack
from dat.core.threat import ThreatModel
from dat.data import ImageData, LocalPartitionSampler, Mix, PartitionPlan, Partitions, make_batches
from dat.distributed import World
from dat.optim import SGD
from tests.trainers import make_trainer

CPU = torch.device("cpu")


def random_data(count: int, seed: int = 0, classes: int = 3) -> ImageData:
    random = torch.Generator().manual_seed(seed)
    images = torch.rand((count, 1, 2, 2), generator=random)
    labels = torch.randint(0, classes, (count,), generator=random)
    return ImageData.of(images, labels, classes=classes)


def unequal(*sizes: int) -> Partitions:
    return Partitions.of([random_data(size, seed) for seed, size in enumerate(sizes)])


sizes_of_parts = st.lists(st.integers(1, 30), min_size=1, max_size=6)


@settings(max_examples=60)
@given(sizes=sizes_of_parts, workers=st.integers(1, 6), more=st.integers(0, 10), data=st.data())
def test_every_partition_contributes_equally_and_every_image_is_drawn(
    sizes: list[int], workers: int, more: int, data: st.DataObject
) -> None:
    batch = 2 * max(len(sizes), workers) + more
    if sum(sizes) < batch:
        with pytest.raises(ValueError, match=r"only|use fewer workers"):
            LocalPartitionSampler(sizes, batch, workers=workers, seed=0)
        return
    sampler = LocalPartitionSampler(
        sizes, batch, workers=workers, seed=data.draw(st.integers(0, 9))
    )
    assert sampler.steps == sum(sizes) // batch
    steps = 3 * max(sizes)
    drawn: list[list[int]] = [[] for _ in sizes]
    for turn in range(steps):
        index = torch.cat(
            [sampler.draw(*divmod(turn, sampler.steps), rank) for rank in range(workers)]
        )
        assert len(index) == batch
        owner = torch.searchsorted(sampler.ends, index, right=True)
        for part in range(len(sizes)):
            drawn[part] += index[owner == part].tolist()
    for part, (numbers, size) in enumerate(zip(drawn, sizes, strict=True)):
        assert abs(len(numbers) - steps * batch / len(sizes)) < 1  # whatever its size
        first = sum(sizes[:part])
        for start in range(0, len(numbers) - size + 1, size):  # gone round: each image once
            assert sorted(numbers[start : start + size]) == list(range(first, first + size))
    for rank in range(workers):
        owned = set(sampler.owned(rank).tolist())
        assert {
            n for s in range(steps) for n in sampler.draw(*divmod(s, sampler.steps), rank).tolist()
        } <= owned


def test_the_batches_do_not_depend_on_the_workers() -> None:
    samplers = [
        LocalPartitionSampler((5, 9, 13, 7, 4, 10), 12, workers=count, seed=1)
        for count in (1, 2, 3, 6)
    ]
    for turn in range(20):
        batches = [
            torch.cat(
                [
                    sampler.draw(*divmod(turn, sampler.steps), rank)
                    for rank in range(sampler.workers)
                ]
            )
            for sampler in samplers
        ]
        assert all(torch.equal(batch, batches[0]) for batch in batches)


def test_a_draw_is_a_function_of_its_number() -> None:
    """In any order and from anywhere: what a resumed run relies on."""
    sampler, other = (LocalPartitionSampler((5, 9, 4), 6, workers=1, seed=3) for _ in range(2))
    forward = [sampler.draw(*divmod(turn, sampler.steps), 0) for turn in range(40)]
    for turn in (39, 7, 38, 0, 21):
        assert torch.equal(other.draw(*divmod(turn, other.steps), 0), forward[turn])


def gradient(model: nn.Module, loss: torch.Tensor) -> torch.Tensor:
    return torch.cat(
        [grad.flatten() for grad in torch.autograd.grad(loss, list(model.parameters()))]
    )


@pytest.mark.parametrize("weigh_by", ["parts", "images"])
def test_the_objective_is_equation_2(weigh_by: str) -> None:
    """Partitions of 4, 6 and 12 images, 12 of each a step: a step goes round each a whole number of
    times, so its gradient is that of the objective itself, (1/3) sum_i f_i, with f_i the mean over
    D(i); weighed by images it is the mean over all images."""
    datasets = [random_data(size, seed) for seed, size in enumerate((4, 6, 12))]
    parts = Partitions.of(datasets, weigh_by=weigh_by)
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3)).double()
    losses_of_partitions = [
        F.cross_entropy(model(data.tensor().double()), data.labels) for data in datasets
    ]
    if weigh_by == "parts":
        objective = torch.stack(losses_of_partitions).mean()
    else:
        x = torch.cat([data.tensor().double() for data in datasets])
        objective = F.cross_entropy(model(x), torch.cat([data.labels for data in datasets]))
    expected = gradient(model, objective)
    given_ = PartitionPlan(batch=36 // 2, workers=1, rank=0, seed=0)
    with pytest.raises(ValueError, match=r"train\.batch = 36: there are only 22"):
        make_batches(parts, None, Mix(), PartitionPlan(batch=36, workers=1, rank=0, seed=0))
    made = make_batches(parts, None, Mix(), given_)
    total = torch.zeros_like(expected)
    for epoch in range(2):  # 6 a part and step: after two, 12
        x, y, _, weight = made.draw(epoch, 0, CPU)
        losses = F.cross_entropy(model(x.double()), y, reduction="none")
        total += gradient(model, (losses * weight).sum() / made.weight)
    torch.testing.assert_close(total / 2, expected, rtol=1e-6, atol=1e-8)


def test_a_share_of_every_partition_is_held_out_in_place() -> None:
    opened: list[int] = []
    sets = [random_data(size, seed) for seed, size in enumerate((10, 20, 31))]

    def open_part(part: int) -> ImageData:
        opened.append(part)
        return sets[part]

    parts = Partitions((10, 20, 31), open_part, 3, (1, 2, 2))
    train, held = parts.split_holdout(0.1, seed=0)
    assert held is not None and train.sizes == (9, 18, 28) and held.sizes == (1, 2, 3)
    assert opened == []
    mine, theirs = train.open(1), held.open(1)
    assert set(opened) == {1}
    together = torch.cat((mine.tensor(), theirs.tensor()))
    assert sorted(together.flatten(1).tolist()) == sorted(sets[1].tensor().flatten(1).tolist())
    with pytest.raises(ValueError, match="a partition of 10 images is too small to hold out any"):
        parts.split_holdout(0.02, seed=0)
    assert parts.split_holdout(0.0, seed=0)[1] is None


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 6])
def test_what_is_held_out_is_counted_once(workers: int) -> None:
    parts = unequal(7, 5, 9)
    shares = [parts.share(workers, rank) for rank in range(workers)]
    numbers = torch.cat([share.numbers for share in shares if share.numbers is not None])
    assert sorted(numbers.tolist()) == list(range(21))


def test_a_trainer_takes_parts() -> None:
    torch.manual_seed(0)
    train, held = unequal(40, 24, 16).split_holdout(0.25, seed=0)
    with World.join(device="cpu", threads=1) as world:
        trainer = make_trainer(
            model=nn.Sequential(nn.Flatten(), nn.Linear(4, 3)),
            data=train,
            holdout=held,
            threat=ThreatModel(eps=0.05),
            attack=NoAttack(),
            optimizer=SGD(lr=0.1),
            epochs=2,
            batch=12,
            world=world,
        )
        records = trainer.fit()
    assert len(records) == 2 and records[-1].holdout_ra is not None
    assert trainer.best_accuracy().images == 20  # type: ignore[union-attr]


def test_parts_must_agree() -> None:
    with pytest.raises(ValueError, match="must have the same classes"):
        Partitions.of([random_data(4), random_data(4, classes=4)])
    with pytest.raises(
        ValueError, match=r"data\.parts = 2: the data is already stored in 3 partitions"
    ):
        make_batches(
            unequal(9, 9, 9),
            None,
            Mix(),
            PartitionPlan(batch=6, workers=1, rank=0, seed=0, parts=2),
        )
