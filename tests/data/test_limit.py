"""`data.limit`: a class-balanced part of the training images, chosen by the seed."""

from __future__ import annotations

from pathlib import Path
from shutil import rmtree

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dat.config.build import make_trainer, training_data, unlabelled_data
from dat.config.recipes import read
from dat.config.schema import RunConfig, parse_edits
from dat.data import ImageData, Partitions, Splits, limit_images
from dat.distributed import World
from dat.tools.reproduce.keys import keyed_settings
from dat.train import Checkpoint, Checkpointer
from dat.train.checkpoint import all_checkpoints


def numbered(count: int, classes: int = 4) -> ImageData:
    """Images whose pixel is their number."""
    pixels = torch.arange(count, dtype=torch.uint8).reshape(-1, 1, 1, 1)
    return ImageData.of(pixels, torch.arange(count) % classes, classes=classes)


def numbers(data: ImageData | Partitions | None) -> list[int]:
    assert isinstance(data, ImageData)
    return [round(255 * value) for value in data.tensor().flatten().tolist()]


def config(*words: str) -> RunConfig:
    return read("digits", parse_edits(words))


def splits(count: int = 200) -> Splits:
    return Splits.of(numbered(count), numbered(20))


@settings(max_examples=15)
@given(st.integers(1, 200), st.integers(0, 5))
def test_the_images_are_balanced_by_class(count: int, seed: int) -> None:
    limited = limit_images(numbered(200), count, seed)
    assert len(set(numbers(limited))) == count
    sizes = limited.counts()
    assert int(sizes.max() - sizes.min()) <= 1


def test_the_seed_chooses_the_images() -> None:
    data = numbered(200)
    first, again, other = (numbers(limit_images(data, 40, seed)) for seed in (0, 0, 1))
    assert first == again != other
    assert first == sorted(first) != list(range(40))


def test_no_limit_leaves_the_data_alone() -> None:
    data = numbered(20)
    assert limit_images(data, None, 0) is data is limit_images(data, 20, 0)
    with pytest.raises(ValueError, match=r"data.limit = 21: there are only 20 training images"):
        limit_images(data, 21, 0)


def test_the_limit_comes_before_the_holdout() -> None:
    data = training_data(config("data.limit=40", "data.holdout=0.25"), splits())
    labelled, holdout = numbers(data.labelled), numbers(data.holdout)  # type: ignore[arg-type]
    assert (len(labelled), len(holdout)) == (30, 10)
    assert sorted(labelled + holdout) == numbers(limit_images(numbered(200), 40, 0))


def test_the_rest_of_the_labels_is_within_the_limit() -> None:
    words = ("data.limit=40", "data.labels=24", "data.unlabelled=rest", "data.holdout=0")
    data = training_data(config(*words), splits())
    labelled, unlabelled = numbers(data.labelled), numbers(data.unlabelled)  # type: ignore[arg-type]
    assert (len(labelled), len(unlabelled)) == (24, 16)
    assert sorted(labelled + unlabelled) == numbers(limit_images(numbered(200), 40, 0))
    assert numbers(unlabelled_data(config(*words), splits())) == unlabelled


def test_data_in_parts_is_not_limited() -> None:
    parts = Splits(Partitions.of([numbered(20), numbered(20)]), numbered(20), (0.5,), (0.5,))
    with pytest.raises(ValueError, match=r"data\.limit: not supported for data in parts"):
        training_data(config("data.limit=10"), parts)


def test_the_key_of_a_run_without_limit_is_unchanged() -> None:
    assert "limit" not in keyed_settings(config())["data"]
    assert keyed_settings(config("data.limit=40"))["data"]["limit"] == 40
    old = config().dump()
    del old["data"]["limit"]  # a run of an earlier version
    assert RunConfig.read(old) == config()


def test_a_resumed_run_has_the_same_images(tmp_path: Path) -> None:
    words = ("data.limit=40", "train.batch=16", "model.width=1", "attack=fgsm")
    quick = config(*words, "train.epochs=2", "train.select_steps=1")
    random = torch.Generator().manual_seed(0)
    x, y = torch.rand(60, 1, 8, 8, generator=random), torch.arange(60) % 4
    data = Splits.of(ImageData.of(x, y), ImageData.of(x[:8], y[:8]))
    with World.join(device="cpu", threads=1) as world:
        trained = make_trainer(quick, data, world)
        trained.callbacks = [Checkpointer(tmp_path, keep=2)]
        trained.fit()
        rmtree(all_checkpoints(tmp_path)[0])
        first = Checkpoint.last(tmp_path, report=print)
        assert first is not None and first.updates == trained.updates / 2 > 0
        resumed = make_trainer(quick, data, world)
        resumed.fit(first)
    weights = resumed.model.state_dict()
    assert all(torch.equal(weights[key], v) for key, v in trained.model.state_dict().items())
