"""Built-in sets, files of arrays, a user's own function."""

from __future__ import annotations

import gc
import pickle
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dat.data import SOURCES, ImageData, Splits, load

Arrays = dict[str, Any]


@pytest.fixture(scope="module")
def digits() -> Splits:
    return load("digits")


def test_digits_do_not_change(digits: Splits) -> None:
    assert (len(digits.train), len(digits.test)) == (1437, 360)
    for half in (digits.train, digits.test):
        assert half.images.shape[1:] == (1, 8, 8)
        assert half.images.dtype == torch.float32
        assert half.tensor().min() == 0 and half.tensor().max() == 1
        assert half.classes == 10
        assert half.labels.unique().tolist() == list(range(10))


def test_the_split_of_digits_never_changes(digits: Splits) -> None:
    again = load("digits")
    assert torch.equal(digits.train.tensor(), again.train.tensor())
    assert torch.equal(digits.test.labels, again.test.labels)
    assert digits.test.labels[:12].tolist() == [3, 3, 4, 3, 6, 3, 4, 6, 0, 9, 0, 4]


def test_no_digit_is_in_both_sets(digits: Splits) -> None:
    from sklearn.datasets import load_digits

    both = torch.cat((digits.train.tensor(), digits.test.tensor())).flatten(1).mul(16).tolist()
    assert sorted(both) == sorted(load_digits().data.tolist())


@pytest.mark.parametrize("name", SOURCES)
def test_statistics_are_those_of_the_training_pixels(name: str) -> None:
    splits = load(name)
    x, _ = splits.train.batch(torch.arange(len(splits.train)), torch.device("cpu"))
    channels = x.double().transpose(0, 1).flatten(1)
    assert splits.mean == pytest.approx(channels.mean(1).tolist(), abs=1e-6)
    assert splits.std == pytest.approx(channels.std(1).tolist(), abs=1e-6)


def test_statistics_of_bytes_are_in_units_of_one() -> None:
    images = torch.tensor([0, 255, 51, 102], dtype=torch.uint8).reshape(2, 2, 1, 1)
    data = ImageData.of(images, torch.tensor([0, 1]))
    splits = Splits.of(data, data)
    assert splits.mean == pytest.approx((0.1, 0.7))
    assert splits.std == pytest.approx((0.2 / 2**0.5, 0.6 / 2**0.5))


def test_a_constant_channel_has_a_deviation_to_divide_by() -> None:
    data = ImageData.of(torch.zeros(4, 1, 2, 2), torch.arange(4))
    assert Splits.of(data, data).std == (1e-3,)


def test_both_halves_have_images_of_one_shape() -> None:
    train = ImageData.of(torch.zeros(2, 1, 8, 8), torch.arange(2))
    test = ImageData.of(torch.zeros(2, 3, 8, 8), torch.arange(2))
    with pytest.raises(ValueError, match=r"training images are \(1, 8, 8\) and test .* \(3, 8, 8"):
        Splits.of(train, test)


# A file of arrays


def arrays(**changes: Any) -> Arrays:
    random = np.random.default_rng(0)
    good = {
        "x_train": random.integers(0, 256, (6, 3, 4, 5), dtype=np.uint8),
        "y_train": np.array([0, 1, 2, 0, 1, 2]),
        "x_test": random.integers(0, 256, (2, 3, 4, 5), dtype=np.uint8),
        "y_test": np.array([3, 0]),
    }
    return {name: value for name, value in (good | changes).items() if value is not None}


def save(folder: Path, **changes: Any) -> str:
    path = folder / "my.npz"
    np.savez(path, **arrays(**changes))
    return str(path)


def test_a_file_of_arrays_is_read(tmp_path: Path) -> None:
    splits = load(save(tmp_path))
    assert torch.equal(splits.train.tensor(), torch.from_numpy(arrays()["x_train"]))
    assert splits.test.labels.tolist() == [3, 0]
    assert splits.train.classes == splits.test.classes == 4  # the test set has the highest label


def test_compressed_arrays_are_read(tmp_path: Path) -> None:
    path = tmp_path / "small.npz"
    np.savez_compressed(path, **arrays())
    assert len(load(str(path)).train) == 6


def test_channels_may_come_last(tmp_path: Path) -> None:
    first = arrays()
    last = {name: first[name].transpose(0, 2, 3, 1) for name in ("x_train", "x_test")}
    splits = load(save(tmp_path, **last))
    assert torch.equal(splits.train.tensor(), torch.from_numpy(first["x_train"]))
    assert splits.test.tensor().is_contiguous()


@pytest.mark.parametrize("shape", [(6, 3, 3, 3), (6, 1, 5, 3), (6, 3, 5, 1)])
def test_a_leading_dimension_of_one_or_three_is_channels(
    shape: tuple[int, ...], tmp_path: Path
) -> None:
    x = np.arange(np.prod(shape), dtype=np.uint8).reshape(shape)
    assert load(save(tmp_path, x_train=x, x_test=x[:2])).train.images.shape == shape


def test_grey_float_images_are_read(tmp_path: Path) -> None:
    x = np.linspace(0, 1, 6 * 20).reshape(6, 4, 5)
    splits = load(save(tmp_path, x_train=x, x_test=x[:2]))
    assert splits.train.images.shape == (6, 1, 4, 5)
    assert splits.train.tensor().max() == 1


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.int64])
def test_labels_of_any_integer_type_are_read(dtype: type, tmp_path: Path) -> None:
    good = arrays()
    changed = {name: good[name].astype(dtype) for name in ("y_train", "y_test")}
    assert load(save(tmp_path, **changed)).train.labels.tolist() == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32, np.uint64])
def test_labels_of_large_unsigned_types_are_read(dtype: type, tmp_path: Path) -> None:
    good = arrays()
    changed = {name: good[name].astype(dtype) for name in ("y_train", "y_test")}
    assert load(save(tmp_path, **changed)).train.labels.tolist() == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"y_test": None},
            "my.npz: missing: y_test; must contain x_train, y_train, x_test, y_test",
        ),
        ({"x_train": None, "y_train": None}, "missing: x_train, y_train; must contain"),
        (
            {"y_train": np.array(list("abcabc"))},
            "my.npz: y_train is <U1: labels must be integers",
        ),
        ({"y_train": np.zeros(5, int)}, r"labels have shape \(5,\): must be one per image, \(6,\)"),
        ({"y_train": np.zeros(6)}, "y_train is float64: labels must be integers"),
        ({"y_train": np.full(6, -1)}, "label -1 of image 0"),
        ({"x_train": np.full((6, 3, 4, 5), 2.0)}, "image 0 has pixels from 2 to 2"),
        ({"x_test": np.zeros((2, 3, 4, 4), np.uint8)}, "must have the same shape"),
    ],
)
def test_wrong_arrays_are_refused(changes: Arrays, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        load(save(tmp_path, **changes))


@pytest.mark.parametrize("y", [np.zeros(0, int), np.zeros(6, complex)], ids=["none", "complex"])
def test_invalid_labels_are_refused(y: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="labels"):
        load(save(tmp_path, y_train=y))


leaves_the_file_open = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"  # see the test after next
)


@leaves_the_file_open
@pytest.mark.parametrize("keep", [0, 10, 0.5, 0.99])
def test_a_truncated_file_is_refused(keep: float, tmp_path: Path) -> None:
    path = Path(save(tmp_path))
    content = path.read_bytes()
    path.write_bytes(content[: int(keep if keep >= 1 else keep * len(content))])
    with pytest.raises(ValueError, match=r"data\.name = .*my\.npz: "):
        load(str(path))


@leaves_the_file_open
@pytest.mark.parametrize("content", [b"hello", b"PK\x03\x04" + bytes(100), bytes(100)])
def test_another_kind_of_file_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "my.npz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"data\.name = .*my\.npz: "):
        load(str(path))


def test_a_refused_file_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "my.npz"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(ValueError, match=r"my\.npz"):
            load(str(path))
        gc.collect()
    assert [str(warning.message) for warning in caught] == []


def test_a_damaged_array_is_refused(tmp_path: Path) -> None:
    path = Path(save(tmp_path))
    content = bytearray(path.read_bytes())
    content[200:240] = bytes(40)
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"data\.name = .*my\.npz: "):
        load(str(path))


class Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.trace,)


@pytest.mark.parametrize("name", ["x_train", "y_test"])
def test_a_pickle_in_a_file_is_refused_and_not_run(name: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    pickle.loads(pickle.dumps(Payload(trace)))
    trace.unlink()  # it does what it says
    with pytest.raises(ValueError, match="allow_pickle=False"):
        load(save(tmp_path, **{name: np.array([Payload(trace)], dtype=object)}))
    assert not trace.exists()


def test_a_file_that_is_a_pickle_is_refused_and_not_run(tmp_path: Path) -> None:
    path, trace = tmp_path / "my.npz", tmp_path / "trace"
    path.write_bytes(pickle.dumps(Payload(trace)))
    with pytest.raises(ValueError, match=r"my\.npz"):
        load(str(path))
    assert not trace.exists()


# A user's own function

USER_CODE = """
import torch
from dat.data import ImageData, Splits

def half(n):
    return ImageData.of(torch.arange(n * 4).reshape(n, 1, 2, 2) / 100, torch.arange(n) % 2)

def pair():
    return half(5), half(2)

def splits():
    return Splits(half(4), half(2), (0.25,), (0.5,))

def junk():
    return half(5)

def half_a_pair():
    return half(5), None

def needs(name):
    return pair()

CONSTANT = 5
"""


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module in the current directory, which is not on the path yet."""
    (tmp_path / "mydata.py").write_text(USER_CODE)
    (tmp_path / "mybroken.py").write_text("import a_package_nobody_has\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    yield "mydata"
    for name in ("mydata", "mybroken"):
        sys.modules.pop(name, None)


def test_a_function_may_return_a_pair(user_module: str) -> None:
    made = load(f"{user_module}:pair")
    assert (len(made.train), len(made.test)) == (5, 2)
    assert made.mean == pytest.approx((0.095,))


def test_a_function_may_return_its_own_statistics(user_module: str) -> None:
    made = load(f"{user_module}:splits")
    assert (made.mean, made.std) == ((0.25,), (0.5,))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "no.such.module:f",
            "data.name = 'no.such.module:f': cannot import no.such.module .No module named 'no'",
        ),
        (
            "mybroken:f",
            "data.name = 'mybroken:f': cannot import mybroken .No module named 'a_package",
        ),
        (
            "mydata:pairs",
            "data.name = 'mydata:pairs': mydata has no function or class 'pairs'",
        ),
        ("mydata:", "data.name = 'mydata:': must have the form package.module:name"),
        ("mydata:junk", r"data.name = 'mydata:junk': must return \(train, test\)"),
        (":pair", "package.module:name"),
        ("digit", "data.name = 'digit': unknown: did you mean digits?"),
        (
            "zzz",
            "unknown: choose from cifar10, .* .or an .npz file, a folder of pictures, or package",
        ),
        ("nowhere/my.npz", "data.name = nowhere/my.npz: no such file"),
        (".npz", "no such file"),
    ],
)
def test_unknown_names_are_refused(name: str, message: str, user_module: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        load(name)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["mydata:CONSTANT", "mydata:needs", "mydata:half_a_pair", ".m:f"])
def test_unusable_functions_are_refused(name: str, user_module: str) -> None:
    with pytest.raises(ValueError, match=f"data.name = {name!r}"):
        load(name)
