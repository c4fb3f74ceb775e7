"""`dat data`, and the description of a run's data."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from dat.data.catalog import CATALOG
from tests.cli.test_cli import TINY, call
from tests.data import pictures as made

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Hide the data sets that the developer has downloaded."""
    monkeypatch.setenv("DAT_DATA", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_list_has_every_data_set(capsys: Capture) -> None:
    code, out, _ = call(capsys, "data", "list", "--json")
    rows = {row["name"]: row for row in json.loads(out)}
    assert code == 0 and set(rows) == {"digits", *CATALOG}
    assert rows["digits"]["here"] == "built in" and rows["cifar10"]["here"] == "-"
    assert rows["cifar10"]["images"] == "50,000 + 10,000"
    code, out, _ = call(capsys, "data", "list")
    assert code == 0 and "cifar100" in out


def test_info_counts_the_classes(capsys: Capture, tmp_path: Path) -> None:
    code, out, err = call(capsys, "data", "info", "digits", "--plot", str(tmp_path / "sheet.png"))
    assert code == 0 and "1,437 training and 360 test images of 8 x 8 pixels, 1 channel" in out
    assert (tmp_path / "sheet.png").stat().st_size > 10_000 and "sheet.png" in err
    code, out, _ = call(capsys, "data", "info", "digits", "--json")
    counts = json.loads(out)["counts"]
    assert sum(row["train"] for row in counts) == 1437 and len(counts) == 10


def test_info_finds_broken_images(capsys: Capture, tmp_path: Path) -> None:
    root = made.folder(tmp_path / "set", sizes=((40, 30), (30, 40)))
    code, _, err = call(capsys, "data", "info", str(root))
    assert code == 2 and "pictures differ in size" in err
    code, out, _ = call(capsys, "data", "info", str(root), "--size", "16", "--check")
    assert code == 0 and "no errors: all files are readable" in out
    file = root / "train" / "cow" / "1.jpg"
    file.write_bytes(file.read_bytes()[:200])
    code, out, _ = call(capsys, "data", "info", str(root), "--size", "16", "--check")
    assert code == 1 and "broken: " in out and "cow/1.jpg" in out


def test_parts_are_written_described_and_verified(capsys: Capture, tmp_path: Path) -> None:
    out_folder = tmp_path / "parts"
    words = ("--parts", "3", "--by", "dirichlet", "--alpha", "1", "--out", str(out_folder))
    code, out, _ = call(capsys, "data", "shard", "digits", *words)
    assert code == 0 and "part-3-of-3" in out and "copy each part" in out
    code, out, _ = call(capsys, "data", "info", str(out_folder), "--json", "--check")
    info = json.loads(out)
    assert code == 0 and sum(info["parts"]) == info["train"] == 1437 and not info["broken"]
    assert sum(row["train"] for row in info["counts"]) == 1437
    images = out_folder / "part-2-of-3" / "images.npy"
    raw = bytearray(images.read_bytes())
    raw[-3] ^= 8
    images.write_bytes(raw)
    code, out, _ = call(capsys, "data", "info", str(out_folder), "--check")
    assert code == 1 and "part-2-of-3/images.npy: has changed since it was written" in out
    code, _, err = call(capsys, "data", "shard", str(out_folder), *words[:2], "--out", "x")
    assert code == 2 and "is stored in partitions" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("fetch", "cifar11"),
            "'cifar11': not a dataset that can be downloaded: did you mean cifar10?",
        ),
        (("info", "cifar10"), "not downloaded yet; run: dat data fetch cifar10"),
        (("info", "no/such/folder"), "no such file or folder"),
        (
            ("shard", "digits", "--parts", "2", "--out", "x", "--by", "size"),
            "must be one of random",
        ),
        (("info", "digits", "--plot", "sheet.txt"), "a plot is written to a file that ends in"),
        (("fetch", "mnist", "--from", "nowhere"), "nowhere"),
    ],
)
def test_invalid_input_gives_a_one_line_error(
    capsys: Capture, words: tuple[str, ...], message: str
) -> None:
    code, out, err = call(capsys, "data", *words)
    assert code == 2 and out == "" and message in err
    assert err.count("\n") == 1 and err.startswith("error: ")


def test_a_run_describes_its_data(capsys: Capture, tmp_path: Path) -> None:
    words = ("train", "digits", *TINY, "--out", str(tmp_path / "run"))
    code, _, err = call(capsys, *words)
    assert code == 0
    assert "digits: 1,437 training and 360 test images of 1 x 8 x 8, 10 classes with " in err


def test_a_class_without_images_is_named(capsys: Capture, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    np.savez(
        tmp_path / "gap.npz",
        x_train=random.integers(0, 256, (700, 1, 8, 8), np.uint8),
        y_train=np.array([0, 2] * 350),
        x_test=random.integers(0, 256, (30, 1, 8, 8), np.uint8),
        y_test=np.arange(30) % 3,
    )
    name = f"data.name={tmp_path / 'gap.npz'}"
    code, _, err = call(
        capsys,
        "train",
        "digits",
        *TINY[:-2],
        name,
        "train.batch=256",
        *TINY[-1:],
        "--out",
        str(tmp_path / "run"),
    )
    assert code == 0 and "warning: no training images of class 1" in err


def test_random_crops_need_image_files(capsys: Capture, tmp_path: Path) -> None:
    words = ("train", "digits", *TINY, "data.augmentation=resized-crop")
    code, _, err = call(capsys, *words, "--out", str(tmp_path / "run"))
    assert code == 2 and "resized-crop: needs picture files" in err


def test_every_augmentation_trains(capsys: Capture, tmp_path: Path) -> None:
    root = made.folder(tmp_path / "set", each=12, sizes=((40, 30), (30, 40)))
    words = (
        *("train", "digits", *TINY[:3], "train.batch=12", TINY[-1], f"data.name={root}"),
        *("data.size=16", "data.augmentation=resized-crop", "data.loaders=0", "data.cutout=4"),
        *("data.randaugment=2", "data.holdout=0.2", "--out", str(tmp_path / "run")),
    )
    code, _, err = call(capsys, *words)
    assert code == 0, err


def test_a_number_of_labels_is_refused_for_data_in_parts(capsys: Capture, tmp_path: Path) -> None:
    call(capsys, "data", "shard", "digits", "--parts", "2", "--out", str(tmp_path / "parts"))
    name = f"data.name={tmp_path / 'parts'}"
    words = ("train", "digits", *TINY, name, "data.labels=100", "--out", str(tmp_path / "run"))
    code, _, err = call(capsys, *words)
    assert code == 2 and "data.labels: not supported for data in parts" in err


def test_a_built_in_name_is_not_taken_for_a_folder(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run in the current folder may have the name of its data."""
    monkeypatch.chdir(tmp_path)
    code, _, err = call(capsys, "train", "digits", *TINY, "--out", "digits", "--quiet")
    assert code == 0, err
    code, _, err = call(capsys, "evaluate", "digits", "--quiet", "--no-checks")
    assert code == 0, err


def test_a_model_is_evaluated_on_data_in_parts(capsys: Capture, tmp_path: Path) -> None:
    parts = str(tmp_path / "parts")
    call(capsys, "data", "shard", "digits", "--parts", "2", "--out", parts)
    words = ("--model", "cnn", "--data", parts, "--attacks", "clean", "model.width=2")
    code, out, err = call(capsys, "evaluate", *words, "--out", "none", "--json", "--no-checks")
    assert code == 0, err
    assert json.loads(out)["images"] == 360


def test_broken_images_can_be_skipped_in_parts(capsys: Capture, tmp_path: Path) -> None:
    root = made.folder(tmp_path / "set", sizes=((40, 30), (30, 40)))
    file = root / "train" / "cow" / "1.jpg"
    file.write_bytes(file.read_bytes()[:40])
    words = ("data", "shard", str(root), "--parts", "2", "--size", "16", "--out")
    code, _, err = call(capsys, *words, str(tmp_path / "a"))
    assert code == 2 and "cow/1.jpg: cannot be read" in err and not (tmp_path / "a").exists()
    code, out, err = call(capsys, *words, str(tmp_path / "b"), "--corrupt", "skip", "--json")
    assert code == 0 and sum(part["images"] for part in json.loads(out)["parts"]) == 11, err
