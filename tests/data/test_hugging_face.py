"""Data sets of the Hugging Face library, which are made here: there is no hub to load them from."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from dat.data import ImageData, image_data, load

datasets = pytest.importorskip("datasets")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
PIXELS = np.random.default_rng(0).integers(0, 256, (12, 6, 6, 3), dtype=np.uint8)
NAMES = ["cat", "dog", "ship"]


def table(rows: range = range(12), **features: Any) -> Any:
    pictures, labels = [Image.fromarray(PIXELS[row]) for row in rows], [row % 3 for row in rows]
    columns = {"img": pictures, "label": labels}
    kinds = {"img": datasets.Image(), "label": datasets.ClassLabel(names=NAMES)} | features
    return datasets.Dataset.from_dict(columns, features=datasets.Features(kinds))


def same(data: ImageData, rows: range) -> None:
    assert torch.equal(data.tensor(), torch.from_numpy(PIXELS[list(rows)]).permute(0, 3, 1, 2))
    assert data.labels.tolist() == [row % 3 for row in rows]
    assert data.names == ("cat", "dog", "ship")


def test_an_object_of_the_library_is_data() -> None:
    same(image_data(table()), range(12))


def test_a_hub_dataset_is_loaded_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    splits = datasets.DatasetDict({"train": table(range(9)), "test": table(range(9, 12))})
    hub = {"user/cifar3": splits}
    monkeypatch.setattr(datasets, "load_dataset", hub.__getitem__)
    loaded = load("hf/user/cifar3")
    same(loaded.train, range(9))
    same(loaded.test, range(9, 12))


def test_without_a_test_set_some_images_are_held_out(monkeypatch: pytest.MonkeyPatch) -> None:
    splits = datasets.DatasetDict({"train": table()})
    monkeypatch.setattr(datasets, "load_dataset", lambda name: splits)
    loaded = load("hf/cifar3")
    assert (len(loaded.train), len(loaded.test)) == (9, 3)


def test_unsuitable_datasets_are_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    text = datasets.Dataset.from_dict({"text": ["a"], "label": [0]})
    monkeypatch.setattr(datasets, "load_dataset", lambda name: {"train": text})
    with pytest.raises(ValueError, match=r"data.name = hf/x: has the columns text, label: needs"):
        load("hf/x")

    def offline(name: str) -> Any:
        raise ConnectionError("no\nnetwork")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(ValueError, match=r"data.name = hf/x: cannot be loaded \(no network\)$"):
        load("hf/x")
