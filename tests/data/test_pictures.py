"""Pictures in files: decoded as Pillow decodes them, cut out as asked, named when broken."""

from __future__ import annotations

import io
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from dat.core.rng import Streams
from dat.data import ImageData, ReadOptions, load
from dat.data.pictures import AREA, RATIO, PictureFiles, Pictures
from tests.data import pictures as made


def splits(root: Path, **reading: object) -> tuple[ImageData, ImageData]:
    data = load(str(root), ReadOptions(**reading))  # type: ignore[arg-type]
    assert isinstance(data.train, ImageData)
    return data.train, data.test


def test_png_pictures_come_as_they_are(tmp_path: Path) -> None:
    made.folder(tmp_path, ending=".png")
    train, test = splits(tmp_path)
    assert train.names == ("ant", "bee", "cow") and len(train) == len(test) == 12
    assert train.labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert isinstance(train.images, torch.Tensor) and train.shape == (3, 24, 24)
    for row in range(12):
        expected = torch.from_numpy(made.pixels(row, 24, 24)).permute(2, 0, 1)
        assert torch.equal(train.images[row], expected)


@pytest.mark.parametrize("ending", [".jpg", ".jpeg", ".webp", ".bmp", ".PNG"])
def test_other_formats_are_read(tmp_path: Path, ending: str) -> None:
    made.folder(tmp_path, ending=ending, each=1)
    train, _ = splits(tmp_path)
    expected = torch.from_numpy(made.pixels(0, 24, 24)).permute(2, 0, 1).int()
    assert float((train.images[torch.tensor([0])][0].int() - expected).abs().float().mean()) < 4


def test_lazily_or_at_once_the_pixels_are_the_same(tmp_path: Path) -> None:
    made.folder(tmp_path, sizes=((40, 30), (25, 60), (24, 24)))
    kept, _ = splits(tmp_path, size=16, resize=20)
    later, _ = splits(tmp_path, size=16, resize=20, memory=0)
    assert isinstance(later.images, Pictures) and isinstance(kept.images, torch.Tensor)
    rows = torch.tensor([11, 0, 5, 5])
    assert torch.equal(later.images[rows], kept.images[rows])
    assert torch.equal(later.take(rows).images[torch.arange(4)], kept.images[rows])


def test_the_center_crop_agrees_with_pillow(tmp_path: Path) -> None:
    """Scale the shorter side to 20, cut out the middle 16 x 16: in one step and in two."""
    made.write(tmp_path / "a.png", 0, 40, 60)
    cropped = Pictures(PictureFiles(tmp_path, ["a.png"]), (16, 16), resize=20)[torch.tensor([0])][0]
    whole = Image.fromarray(made.pixels(0, 40, 60)).resize((30, 20), Image.Resampling.BILINEAR)
    expected = torch.from_numpy(np.array(whole.crop((7, 2, 23, 18)))).permute(2, 0, 1)
    assert int((cropped.int() - expected.int()).abs().max()) <= 2


def test_large_jpegs_are_decoded_smaller_and_look_the_same(tmp_path: Path) -> None:
    made.write(tmp_path / "a.jpg", 0, 640, 800)
    small = Pictures(PictureFiles(tmp_path, ["a.jpg"]), (32, 32))[torch.tensor([0])][0]
    with Image.open(tmp_path / "a.jpg") as whole:
        expected = whole.resize((32, 32), Image.Resampling.BILINEAR, box=(80, 0, 720, 640))
    difference = small.int() - torch.from_numpy(np.array(expected)).permute(2, 0, 1).int()
    assert float(difference.abs().float().mean()) < 3


def test_random_crops_are_by_the_sample_and_within_their_bounds(tmp_path: Path) -> None:
    made.folder(tmp_path, sizes=((60, 80),))
    later, _ = splits(tmp_path, size=16, memory=0)
    assert isinstance(later.images, Pictures)
    rows = torch.arange(12)
    whole = later.images.read_random(rows, Streams(7, rows))
    half = later.images.read_random(rows[6:], Streams(7, rows[6:]))
    assert torch.equal(whole[6:], half)
    assert not torch.equal(whole, later.images.read_random(rows, Streams(8, rows)))
    boxes = _boxes(later.images)
    areas = [(right - left) * (down - up) / 4800 for left, up, right, down in boxes]
    ratios = [(right - left) / (down - up) for left, up, right, down in boxes]
    assert min(areas) > AREA[0] - 0.01 and max(areas) <= AREA[1]
    assert min(ratios) > RATIO[0] - 0.05 and max(ratios) < RATIO[1] + 0.05
    assert np.mean(areas) == pytest.approx(0.5, abs=0.06)  # large ones fit less often
    assert all(
        left >= 0 and right <= 80 and up >= 0 and down <= 60 for left, up, right, down in boxes
    )


def _boxes(view: Pictures) -> list[tuple[float, float, float, float]]:
    from dat.data.pictures import TRIES, _random_crop

    uniform = Streams(1, torch.arange(2000)).uniform(torch.Size((2000, TRIES, 4)), torch.float64)
    return [_random_crop(row.numpy())(80, 60, view) for row in uniform]


def test_grey_pictures_have_one_channel(tmp_path: Path) -> None:
    for split in ("train", "test"):
        for name in ("a", "b"):
            (tmp_path / split / name).mkdir(parents=True)
            grey = Image.fromarray(np.full((8, 8), 77, np.uint8))
            grey.save(tmp_path / split / name / "0.png")
    train, _ = splits(tmp_path)
    assert train.shape == (1, 8, 8) and int(train.images[torch.tensor([0])].max()) == 77


def test_a_folder_without_a_test_set_is_split_once_and_for_all(tmp_path: Path) -> None:
    made.folder(tmp_path, splits=("",), each=10)
    train, test = splits(tmp_path, test_share=0.3)
    assert train.counts().tolist() == [7, 7, 7] and test.counts().tolist() == [3, 3, 3]
    again, _ = splits(tmp_path, test_share=0.3)
    assert torch.equal(train.images[torch.arange(21)], again.images[torch.arange(21)])


def damage(file: Path) -> None:
    raw = file.read_bytes()
    file.write_bytes(raw[: len(raw) // 2])


@pytest.mark.parametrize("memory", [2.0, 0.0])
def test_an_unreadable_picture_is_named_or_skipped(
    tmp_path: Path,
    memory: float,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("DAT_DATA", str(tmp_path / "cache"))
    root = made.folder(tmp_path / "set")
    damage(root / "train" / "bee" / "2.jpg")
    (root / "val" / "cow" / "0.jpg").write_bytes(b"")
    with pytest.raises(ValueError, match=r"bee/2\.jpg: cannot be read .*data\.corrupt=skip"):
        splits(root, memory=memory)[0].tensor()
    for _ in range(2):
        train, test = splits(root, memory=memory, corrupt="skip")
        assert train.counts().tolist() == [4, 3, 4] and test.counts().tolist() == [4, 4, 3]
        assert len(train.images[torch.arange(11)]) == 11
    printed = capsys.readouterr().err
    assert (
        printed.count("bee/2.jpg") == 1 and printed.count("cow/0.jpg") == 1
    )  # once, then remembered
    made.write(root / "train" / "bee" / "2.jpg", 3)
    train, _ = splits(root, memory=memory, corrupt="skip")
    assert len(train) == 12


def test_errors_in_a_folder_are_reported(tmp_path: Path) -> None:
    def refused(name: str, **reading: object) -> str:
        with pytest.raises(ValueError, match=r"^data\.name = ") as error:
            splits(tmp_path / name, **reading)
        return str(error.value)

    (tmp_path / "empty").mkdir()
    assert "neither class folders of pictures, nor arrays" in refused("empty")
    made.folder(tmp_path / "one", splits=("train",))
    assert "has a train folder, but no test or val" in refused("one")
    made.folder(tmp_path / "hollow")
    (tmp_path / "hollow" / "train" / "dog").mkdir()
    assert "dog: contains no pictures" in refused("hollow")
    made.folder(tmp_path / "more", splits=("train",))
    made.folder(tmp_path / "more", splits=("val",), classes=("ant", "dog"))
    assert "class dog has no training pictures" in refused("more")
    made.folder(tmp_path / "flat", splits=("train",))
    made.write(tmp_path / "flat" / "val" / "0.jpg", 0)
    assert "no class folders; sort the pictures into one folder per class" in refused("flat")
    made.folder(tmp_path / "sizes", sizes=((24, 24), (30, 20)))
    assert "pictures differ in size, e.g. 24 x 24 and 20 x 30; set data.size" in refused("sizes")
    made.folder(tmp_path / "text", each=1)
    for file in (tmp_path / "text").rglob("*.jpg"):
        file.write_text("no picture")
    assert "none of the pictures can be read" in refused("text")


def test_an_unreadable_folder_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made.folder(tmp_path)
    original = Path.iterdir

    def locked(self: Path) -> object:
        if self.name == "bee":
            raise PermissionError(13, "Permission denied")
        return original(self)

    monkeypatch.setattr(Path, "iterdir", locked)
    with pytest.raises(ValueError, match=r"bee: cannot be read \(Permission denied\)"):
        splits(tmp_path)


def test_a_picture_that_is_too_large_is_refused_as_a_bomb(tmp_path: Path) -> None:
    """A real one: a few kilobytes that would become 250 megapixels; Pillow's own limit is 179."""
    made.folder(tmp_path, each=2)
    bomb = io.BytesIO()
    Image.new("1", (25_000, 10_000)).save(bomb, "PNG")
    (tmp_path / "train" / "ant" / "0.jpg").write_bytes(bomb.getvalue())
    with pytest.raises(ValueError, match=r"ant/0\.jpg: cannot be read \(Image size"):
        splits(tmp_path)


@settings(max_examples=300)
@given(
    width=st.integers(1, 900),
    height=st.integers(1, 900),
    size=st.integers(1, 64),
    resize=st.one_of(st.none(), st.integers(1, 80)),
)
def test_the_center_crop_lies_inside(
    width: int, height: int, size: int, resize: int | None
) -> None:
    from dat.data.pictures import _center_crop

    view = Pictures(PictureFiles(Path(), ["x"]), (size, size), resize)
    left, up, right, down = _center_crop(width, height, view)
    assert 0 <= left < right <= width and 0 <= up < down <= height


def test_any_size_is_scaled(tmp_path: Path) -> None:
    """Sizes whose middle rounds to just outside, which Pillow refuses."""
    sizes = [(52, 49), (49, 52), (97, 31), (1, 1), (3, 200)]
    for number, (height, width) in enumerate(sizes):
        made.write(tmp_path / f"{number}.png", number, height, width)
    files = PictureFiles(tmp_path, [f"{number}.png" for number in range(len(sizes))])
    assert Pictures(files, (32, 32))[torch.arange(len(sizes))].shape == (5, 3, 32, 32)


def test_sixteen_bits_are_refused(tmp_path: Path) -> None:
    made.folder(tmp_path, each=2)
    deep = Image.fromarray(np.full((24, 24), 40_000, np.uint16))
    deep.save(tmp_path / "train" / "bee" / "1.png")
    with pytest.raises(ValueError, match=r"bee/1\.png: cannot be read \(16 bits per pixel"):
        splits(tmp_path)


def test_a_class_may_be_called_train(tmp_path: Path) -> None:
    made.folder(tmp_path, splits=("",), classes=("bus", "car", "train"), each=5)
    train, test = splits(tmp_path)
    assert train.names == ("bus", "car", "train") and (len(train), len(test)) == (12, 3)


def test_the_file_name_does_not_decide_the_format(tmp_path: Path) -> None:
    """Formats that Pillow hands to other programs, such as EPS, are never opened."""
    made.folder(tmp_path, each=2)
    evil = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 24 24\n%%EOF\n"
    (tmp_path / "train" / "ant" / "0.jpg").write_bytes(evil)
    with pytest.raises(ValueError, match=r"0\.jpg: cannot be read \(cannot identify image file"):
        splits(tmp_path)


@pytest.mark.parametrize("name", ["data.pkl", "data.pt"])
def test_a_pickle_is_never_opened(tmp_path: Path, name: str) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[object, ...]:
            return os.mkdir, (str(tmp_path / "boom"),)

    import pickle

    (tmp_path / name).write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(ValueError, match="pickles are never read"):
        load(str(tmp_path / name))
    box = np.empty(1, object)
    box[0] = Bomb()
    raw = io.BytesIO()
    np.savez(raw, x_train=box, y_train=box, x_test=box, y_test=box)
    (tmp_path / "a.npz").write_bytes(raw.getvalue())
    with pytest.raises(ValueError, match="allow_pickle=False"):
        load(str(tmp_path / "a.npz"))
    assert not (tmp_path / "boom").exists()
