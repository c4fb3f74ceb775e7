"""Which worker draws which samples: partitions, the global batch, the shares of the workers."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dat.data import ImageData, RandomPartitionSampler, default_partitions, split_holdout


class Sizes(NamedTuple):
    samples: int
    batch: int
    parts: int
    seed: int

    def sampler(self, workers: int) -> RandomPartitionSampler:
        return RandomPartitionSampler(
            self.samples, self.batch, parts=self.parts, workers=workers, seed=self.seed
        )


@st.composite
def sizes(draw: st.DrawFn) -> Sizes:
    """Sizes that leave at least two images of a batch for every part and every worker."""
    parts, samples = draw(st.integers(1, 13)), draw(st.integers(26, 80))
    return Sizes(samples, draw(st.integers(26, samples)), parts, draw(st.integers(0, 99)))


some_sizes = given(sizes=sizes(), workers=st.integers(1, 13))
quietly = settings(max_examples=60)


def draws(sampler: RandomPartitionSampler, epoch: int, step: int) -> list[list[int]]:
    return [sampler.draw(epoch, step, rank).tolist() for rank in range(sampler.workers)]


def batch_of(sampler: RandomPartitionSampler, epoch: int, step: int) -> list[int]:
    return [number for share in draws(sampler, epoch, step) for number in share]


def epoch_of(sampler: RandomPartitionSampler, epoch: int) -> list[int]:
    return [number for step in range(sampler.steps) for number in batch_of(sampler, epoch, step)]


@quietly
@some_sizes
def test_parts_are_disjoint_cover_all_and_differ_by_at_most_one(sizes: Sizes, workers: int) -> None:
    sampler = sizes.sampler(workers)
    assert sorted(torch.cat(sampler.partitions).tolist()) == list(range(sizes.samples))
    lengths = [len(part) for part in sampler.partitions]
    assert len(lengths) == sizes.parts
    assert max(lengths) - min(lengths) <= 1
    assert all(part.tolist() == sorted(part.tolist()) for part in sampler.partitions)


@quietly
@some_sizes
def test_global_batch_is_the_same_for_any_number_of_workers(sizes: Sizes, workers: int) -> None:
    alone, sampler = sizes.sampler(1), sizes.sampler(workers)
    assert sampler.steps == alone.steps
    for epoch in (0, 1):
        for step in range(sampler.steps):
            # not only the same samples: in the same order, so that sums agree as well
            assert batch_of(sampler, epoch, step) == alone.draw(epoch, step, 0).tolist()


@quietly
@some_sizes
def test_workers_share_the_batch_almost_evenly(sizes: Sizes, workers: int) -> None:
    sampler = sizes.sampler(workers)
    for step in range(sampler.steps):
        shares = [len(share) for share in draws(sampler, 0, step)]
        assert sum(shares) == sizes.batch
        assert min(shares) >= 1
        assert max(shares) - min(shares) <= 2


@quietly
@some_sizes
def test_partitions_fill_the_batch_almost_evenly(sizes: Sizes, workers: int) -> None:
    sampler = sizes.sampler(workers)
    for step in range(sampler.steps):
        batch = set(batch_of(sampler, 0, step))
        given_ = [len(batch & set(part.tolist())) for part in sampler.partitions]
        assert sum(given_) == sizes.batch
        assert min(given_) >= 1
        assert max(given_) - min(given_) <= 2


@quietly
@some_sizes
def test_an_epoch_draws_no_sample_twice_and_all_that_fill_a_batch(
    sizes: Sizes, workers: int
) -> None:
    sampler = sizes.sampler(workers)
    drawn = epoch_of(sampler, 3)
    assert len(drawn) == len(set(drawn)) == sampler.steps * sizes.batch
    assert sizes.samples - len(drawn) < sizes.batch


@quietly
@some_sizes
def test_a_worker_draws_only_what_it_owns(sizes: Sizes, workers: int) -> None:
    sampler = sizes.sampler(workers)
    for rank in range(workers):
        owned = sampler.owned(rank).tolist()
        assert owned == sorted(set(owned))
        for step in range(sampler.steps):
            assert set(sampler.draw(0, step, rank).tolist()) <= set(owned)


@quietly
@given(sizes=sizes())
def test_with_one_partition_per_worker_each_owns_its_partition(sizes: Sizes) -> None:
    sampler = sizes.sampler(sizes.parts)
    for rank, part in enumerate(sampler.partitions):
        assert torch.equal(sampler.owned(rank), part)


@quietly
@given(sizes=sizes(), data=st.data())
def test_workers_that_divide_the_partitions_share_no_images(
    sizes: Sizes, data: st.DataObject
) -> None:
    divisors = [m for m in range(1, sizes.parts + 1) if sizes.parts % m == 0]
    workers = data.draw(st.sampled_from(divisors))
    sampler = sizes.sampler(workers)
    owned = torch.cat([sampler.owned(rank) for rank in range(workers)])
    assert sorted(owned.tolist()) == list(range(sizes.samples))


def test_the_order_differs_by_epoch_and_seed() -> None:
    sampler = RandomPartitionSampler(100, 10, parts=2, workers=2, seed=0)
    first, again, second = (sampler.draw(epoch, 0, 0).tolist() for epoch in (0, 0, 1))
    assert first == again
    assert sorted(first) != sorted(second)
    other = RandomPartitionSampler(100, 10, parts=2, workers=2, seed=1)
    assert not torch.equal(sampler.partitions[0], other.partitions[0])
    same = RandomPartitionSampler(100, 10, parts=2, workers=2, seed=0)
    assert torch.equal(sampler.partitions[0], same.partitions[0])
    assert same.draw(0, 0, 0).tolist() == first


def test_partitions_are_shuffled_independently() -> None:
    sampler = RandomPartitionSampler(40, 40, parts=2, workers=2, seed=0)
    places = [
        torch.searchsorted(sampler.partitions[rank], sampler.draw(0, 0, rank)) for rank in (0, 1)
    ]
    assert sorted(places[0].tolist()) == sorted(places[1].tolist()) == list(range(20))
    assert not torch.equal(*places)


def test_over_epochs_every_sample_is_drawn() -> None:
    sampler = RandomPartitionSampler(11, 4, parts=2, workers=1, seed=0)
    assert sampler.steps == 2
    assert {number for epoch in range(20) for number in epoch_of(sampler, epoch)} == set(range(11))


def test_an_epoch_may_have_one_batch() -> None:
    sampler = RandomPartitionSampler(11, 11, parts=3, workers=2, seed=0)
    assert sampler.steps == 1
    assert sorted(epoch_of(sampler, 0)) == list(range(11))


@pytest.mark.parametrize(
    ("workers", "batch", "parts"),
    [
        (1, 24, 24),
        (2, 48, 24),
        (3, 100, 24),
        (4, 47, 4),
        (8, 100, 24),
        (12, 24, 24),
        (5, 100, 5),
        (24, 100, 24),
        (1, 23, 1),
        (2, 10, 2),
    ],
)
def test_default_partitions_are_many_if_they_divide_evenly(
    workers: int, batch: int, parts: int
) -> None:
    assert default_partitions(workers, batch) == parts
    assert len(RandomPartitionSampler(200, batch, workers=workers, seed=0).partitions) == parts


@pytest.mark.parametrize(
    ("samples", "batch", "parts", "workers", "message"),
    [
        (3, 3, 1, 4, "4 workers for 3 training images: use fewer workers"),
        (3, 3, 4, 1, "data.parts = 4: there are only 3 training images"),
        (9, 10, 1, 2, "train.batch = 10: there are only 9 training images, 4 for each of 2 work"),
        (9, 1, 1, 2, "train.batch = 1: too small for 2 workers and 1 partition; use 4 or more"),
        (20, 7, 3, 4, "train.batch = 7: too small for 4 workers and 3 partitions; use 8 or more"),
        (20, 5, 3, 1, "train.batch = 5: too small for 1 worker and 3 partitions; use 6 or more"),
    ],
)
def test_impossible_partitions_are_refused(
    samples: int, batch: int, parts: int, workers: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        RandomPartitionSampler(samples, batch, parts=parts, workers=workers, seed=0)


@pytest.mark.parametrize(("batch", "parts", "workers"), [(4, 4, 2), (3, 3, 3), (8, 3, 4)])
def test_the_smallest_batches_give_every_worker_something(
    batch: int, parts: int, workers: int
) -> None:
    sampler = RandomPartitionSampler(20, batch, parts=parts, workers=workers, seed=0)
    for step in range(sampler.steps):
        assert all(share for share in draws(sampler, 0, step))


def numbered(count: int) -> ImageData:
    """Images that tell their number by their only pixel."""
    images = torch.arange(count, dtype=torch.uint8).reshape(-1, 1, 1, 1)
    return ImageData.of(images, torch.arange(count) % 3, classes=5)


@quietly
@given(count=st.integers(2, 60), share=st.floats(0.05, 0.9), seed=st.integers(0, 99))
def test_holdout_and_rest_are_disjoint_and_cover_all(count: int, share: float, seed: int) -> None:
    if not 0 < round(share * count) < count:
        return
    rest, held = split_holdout(numbered(count), share, seed)
    assert held is not None
    assert len(held) == round(share * count)
    together = [*rest.tensor().flatten().tolist(), *held.tensor().flatten().tolist()]
    assert sorted(together) == list(range(count))
    for half in (rest, held):
        assert torch.equal(half.labels, half.tensor().flatten().long() % 3)
        assert half.classes == 5


def test_holdout_follows_from_the_seed() -> None:
    first, again, other = (split_holdout(numbered(50), 0.2, seed)[1] for seed in (0, 0, 1))
    assert first is not None and again is not None and other is not None
    assert torch.equal(first.tensor(), again.tensor())
    assert not torch.equal(first.tensor(), other.tensor())


@pytest.mark.parametrize("share", [0.0, 0.01])
def test_no_holdout_leaves_the_data_whole(share: float) -> None:
    data = numbered(10)
    assert split_holdout(data, share, 0) == (data, None)


def test_a_holdout_of_everything_is_refused() -> None:
    with pytest.raises(ValueError, match=r"data.holdout = 0.99: leaves none of 10 images"):
        split_holdout(numbered(10), 0.99, 0)
