"""Labelled and unlabelled images in one batch, on any number of workers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dat.core.losses import NO_LABEL
from dat.data import UNLABELLED, Batches, ImageData, Mix, PartitionPlan, make_batches, split_labels

CPU = torch.device("cpu")


def images(count: int, classes: int = 3, start: int = 0) -> ImageData:
    """Each image is its own number."""
    numbers = torch.arange(start, start + count, dtype=torch.float32) / 1000
    pictures = numbers.reshape(-1, 1, 1, 1).expand(-1, 1, 2, 2)
    return ImageData.of(pictures, torch.arange(count) % classes, classes=classes)


def make(workers: int, place: int, mix: Mix, *, labelled: int = 48, rest: int = 96) -> Batches:
    return make_batches(
        images(labelled),
        images(rest, start=500).without_labels(),
        mix,
        PartitionPlan(batch=24, parts=6, workers=workers, rank=place, seed=0),
    )


def test_there_is_one_constant_for_no_label() -> None:
    assert UNLABELLED == NO_LABEL


@pytest.mark.parametrize("workers", [1, 2, 3, 6])
@pytest.mark.parametrize("share", [0.25, 0.5])
def test_a_batch_has_its_share_of_both_whatever_the_workers(workers: int, share: float) -> None:
    mix = Mix(share=share, weight=0.5)
    for epoch, step in ((0, 0), (0, 1), (3, 1)):
        drawn = [make(workers, place, mix).draw(epoch, step, CPU) for place in range(workers)]
        alone = make(1, 0, mix).draw(epoch, step, CPU)
        numbers = torch.cat([batch.numbers for batch in drawn]).sort().values
        assert torch.equal(numbers, alone.numbers.sort().values)
        assert int((alone.y == UNLABELLED).sum()) == round(24 * share)
        assert torch.equal(alone.weight, torch.where(alone.y == UNLABELLED, 0.5, 1.0))
        expected = torch.where(alone.y == UNLABELLED, alone.numbers - 48 + 500, alone.numbers)
        assert torch.equal((alone.x[:, 0, 0, 0] * 1000).round().long(), expected)


@pytest.mark.parametrize(("epoch_by", "steps"), [("labelled", 4), ("unlabelled", 8), ("both", 6)])
def test_the_length_of_an_epoch(epoch_by: str, steps: int) -> None:
    assert make(1, 0, Mix(epoch_by=epoch_by)).steps == steps


def test_the_smaller_dataset_repeats_in_another_order() -> None:
    """Eight steps of twelve: the 48 labelled images come twice, the 96 unlabelled ones once."""
    made = make(1, 0, Mix(epoch_by="unlabelled"))
    drawn = [made.draw(0, step, CPU).numbers.tolist() for step in range(8)]
    first = [n for batch in drawn[:4] for n in batch if n < 48]
    second = [n for batch in drawn[4:] for n in batch if n < 48]
    assert sorted(first) == sorted(second) == list(range(48)) and first != second
    assert sorted(n for batch in drawn for n in batch if n >= 48) == list(range(48, 144))


def test_a_share_must_leave_images_of_both_kinds() -> None:
    with pytest.raises(ValueError, match=r"data.unlabelled_share = 0.01: leaves 24 labelled and 0"):
        make(1, 0, Mix(share=0.01))


@settings(max_examples=30)
@given(st.integers(1, 59), st.integers(0, 5))
def test_kept_labels_are_class_balanced(count: int, seed: int) -> None:
    data = images(60, classes=4)
    kept, rest = split_labels(data, count, seed)
    assert len(kept) == count and len(rest) == 60 - count
    sizes = kept.labels.bincount(minlength=4)
    assert int(sizes.max() - sizes.min()) <= 1
    both = torch.cat((kept.tensor(), rest.tensor())).flatten(1)[:, 0].sort().values
    assert torch.equal(both, data.tensor().flatten(1)[:, 0].sort().values)


@pytest.mark.parametrize("count", [0, 60, 100])
def test_the_number_of_labels_must_be_below_that_of_images(count: int) -> None:
    with pytest.raises(ValueError, match=f"data.labels = {count}: must be above 0 and below"):
        split_labels(images(60), count, 0)
