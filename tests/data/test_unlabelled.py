"""Images without labels from folders, arrays and sets; pseudo-labels and their file."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dat.data import ImageData, PseudoLabels, load, load_unlabelled

GREY = ImageData.of(torch.zeros(2, 1, 4, 5), torch.tensor([0, 2]))
BYTES = ImageData.of(torch.zeros(2, 3, 4, 5, dtype=torch.uint8), torch.tensor([0, 2]))


def picture(path: Path, value: int, size: tuple[int, int] = (5, 4)) -> None:
    path.parent.mkdir(exist_ok=True)
    Image.new("RGB", size, (value, value, value)).save(path)


def test_a_folder_of_pictures(tmp_path: Path) -> None:
    picture(tmp_path / "b.png", 255)
    picture(tmp_path / "below" / "a.webp", 0)
    picture(tmp_path / "a.png", 51)
    (tmp_path / "notes.txt").write_text("no picture")
    grey = load_unlabelled(str(tmp_path), GREY)
    assert grey.tensor().shape == (3, 1, 4, 5) and grey.tensor().is_floating_point()
    assert not grey.has_labels and grey.classes == 3
    assert grey.tensor()[:, 0, 0, 0].tolist() == pytest.approx([0.2, 1.0, 0.0])
    color = load_unlabelled(str(tmp_path), BYTES)
    assert color.images.shape == (3, 3, 4, 5) and color.images.dtype == torch.uint8
    assert color.tensor()[:, 2, 0, 0].tolist() == [51, 255, 0]


@pytest.mark.parametrize("name", ["x.npy", "x.npz"])
def test_a_file_of_arrays(tmp_path: Path, name: str) -> None:
    images = np.random.default_rng(0).integers(0, 255, (7, 4, 5, 3), dtype=np.uint8)
    path = tmp_path / name
    np.save(path, images) if name.endswith("npy") else np.savez(path, x=images)
    unlabelled = load_unlabelled(str(path), BYTES)
    assert torch.equal(unlabelled.tensor(), torch.from_numpy(images).permute(0, 3, 1, 2))


def test_a_dataset_whose_labels_are_ignored() -> None:
    digits = load("digits").train
    unlabelled = load_unlabelled("digits", digits)
    assert torch.equal(unlabelled.tensor(), digits.tensor()) and not unlabelled.has_labels


def test_bad_sources_are_refused(tmp_path: Path) -> None:
    def refused(name: str) -> str:
        with pytest.raises(ValueError, match=r"data\.unlabelled = ") as error:
            load_unlabelled(name, GREY)
        return str(error.value)

    assert "contains no pictures" in refused(str(tmp_path))
    assert "no such file" in refused(str(tmp_path / "x.npz"))
    np.savez(tmp_path / "y.npz", y=np.zeros(3))
    assert "contains none of x, images" in refused(str(tmp_path / "y.npz"))
    (tmp_path / "z.npy").write_bytes(pickle.dumps({"x": 1}))
    assert "not an array of images" in refused(str(tmp_path / "z.npy"))
    np.save(tmp_path / "o.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    assert "not an array of images" in refused(str(tmp_path / "o.npy"))
    np.save(tmp_path / "f.npy", np.full((2, 1, 4, 5), 200.0))
    assert "must be in [0, 1]" in refused(str(tmp_path / "f.npy"))
    picture(tmp_path / "a.png", 3)
    picture(tmp_path / "b.png", 3, size=(6, 4))
    assert "pictures differ in size, e.g. 5 x 4 and 6 x 4" in refused(str(tmp_path))
    (tmp_path / "b.png").write_bytes(b"no png")
    assert "b.png: cannot be read" in refused(str(tmp_path))
    (tmp_path / "b.png").unlink()
    (tmp_path / "a.png").unlink()
    picture(tmp_path / "c.png", 3, size=(6, 4))
    assert "its images are (1, 4, 6), the labelled ones (1, 4, 5)" in refused(str(tmp_path))


def test_pseudo_labels_come_back_from_their_file(tmp_path: Path) -> None:
    made = PseudoLabels(torch.tensor([1, 0]), torch.tensor([0.9, 0.4]))
    made.save(tmp_path / "p.npz", GREY)
    pseudo = PseudoLabels.read(tmp_path / "p.npz", GREY.without_labels())
    assert torch.equal(pseudo.labels, made.labels)
    assert torch.equal(pseudo.confidences, made.confidences)
    assert pseudo.applied(GREY.without_labels()).labels.tolist() == [1, 0]
    assert pseudo.applied(GREY.without_labels(), 0.5).labels.tolist() == [1]
    with pytest.raises(ValueError, match=r"data.confidence = 0.95: leaves no images; .* 0.9"):
        pseudo.applied(GREY, 0.95)


def test_a_file_for_other_images_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.npz"
    PseudoLabels(torch.tensor([1, 0]), torch.tensor([0.9, 0.4])).save(path, GREY)
    other = ImageData.of(torch.ones(2, 1, 4, 5), torch.tensor([0, 2]))
    with pytest.raises(ValueError, match="is for other images; create it again"):
        PseudoLabels.read(path, other)
    with pytest.raises(ValueError, match="no such file; create it with dat label"):
        PseudoLabels.read(tmp_path / "nothing.npz", GREY)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match="not a file written by dat label"):
        PseudoLabels.read(path, GREY)
