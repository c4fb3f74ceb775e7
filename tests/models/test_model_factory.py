"""Names, seeds and user factories."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dat.models import MODELS, build_model

USER_CODE = """
import torch
from torch import nn

torch.rand(3)  # draws at import, as user code may

SIZE = 8

def plain(classes):
    return nn.Linear(4, classes)

class Net(nn.Linear):
    def __init__(self, classes: int, *, width: int = 5):
        super().__init__(width, classes)

def record(**sizes):
    net = nn.Identity()
    net.sizes = sizes
    return net

def none():
    return nn.Flatten()

def needs_more(classes, secret):
    return nn.Linear(secret, classes)

def not_a_module(classes):
    return [classes]

class Timm(nn.Linear):
    # as in timm, `channels` are the widths of the stages
    def __init__(self, num_classes=1000, in_chans=3, channels=(4, 8), depth=1):
        assert len(channels) == 2
        super().__init__(in_chans * depth, num_classes)

def timm(pretrained=False, **kwargs):
    torch.rand(1)
    return Timm(**dict({"in_chans": 3}, **kwargs))

class Vision(nn.Linear):
    def __init__(self, num_classes=1000):
        super().__init__(4, num_classes)

def vision(*, weights=None, **kwargs):
    return Vision(**kwargs)

def transformer(num_labels, num_channels):
    return nn.Linear(num_channels, num_labels)

def fixed(**kwargs):
    return nn.Linear(4, 5, **kwargs)
"""


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module in the current folder, which is not on the path yet."""
    (tmp_path / "mynets.py").write_text(USER_CODE)
    (tmp_path / "broken.py").write_text("import a_package_nobody_has\n")
    (tmp_path / "empty.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    yield "mynets"
    for name in ("mynets", "broken", "empty"):
        sys.modules.pop(name, None)


def weights(net: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(net.parameters())


@pytest.mark.parametrize("name", MODELS)
def test_weights_are_a_function_of_the_seed(name: str) -> None:
    first = weights(build_model(name, 3, width=2, seed=5))
    torch.rand(1)
    assert torch.equal(first, weights(build_model(name, 3, width=2, seed=5)))
    assert not torch.equal(first, weights(build_model(name, 3, width=2, seed=6)))


@pytest.mark.parametrize("name", [*MODELS, "mynets:Net"])
def test_the_global_generator_is_left_as_it_was(name: str, user_module: str) -> None:
    before = torch.get_rng_state()
    build_model(name, 3, width=2)
    assert torch.equal(before, torch.get_rng_state())


def test_user_weights_are_a_function_of_the_seed(user_module: str) -> None:
    first, again, other = (
        weights(build_model(f"{user_module}:Net", 3, seed=seed)) for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_user_class_gets_what_its_signature_has(user_module: str) -> None:
    assert weights(build_model(f"{user_module}:Net", 3)).numel() == 3 * 5 + 3
    assert weights(build_model(f"{user_module}:Net", 3, width=2)).numel() == 3 * 2 + 3


def test_user_function_may_take_fewer_arguments(user_module: str) -> None:
    plain = build_model(f"{user_module}:plain", 3, channels=1, width=2)
    assert weights(plain).numel() == 4 * 3 + 3
    assert isinstance(build_model(f"{user_module}:none", 3), nn.Flatten)


def test_keyword_catch_all_gets_everything_but_a_width_of_none(user_module: str) -> None:
    net = build_model(f"{user_module}:record", 3, channels=1)
    assert vars(net)["sizes"] == {"classes": 3, "channels": 1}
    net = build_model(f"{user_module}:record", 3, width=4)
    assert vars(net)["sizes"] == {"classes": 3, "channels": 3, "width": 4}


@pytest.mark.parametrize(
    ("factory", "shape"),
    [
        ("Timm", (3, 1)),
        ("timm", (3, 1)),
        ("vision", (3, 4)),
        ("transformer", (3, 1)),
        ("fixed", (5, 4)),
    ],
)
def test_a_factory_gets_sizes_under_the_names_that_it_has(
    factory: str, shape: tuple[int, int], user_module: str
) -> None:
    name = f"{user_module}:{factory}"
    net = build_model(name, 3, channels=1, seed=4)
    assert isinstance(net, nn.Linear)
    assert tuple(net.weight.shape) == shape
    assert torch.equal(weights(net), weights(build_model(name, 3, channels=1, seed=4)))


def test_arguments_are_passed_on_and_must_be_accepted(user_module: str) -> None:
    net = build_model(f"{user_module}:timm", 3, args={"depth": 2})
    assert isinstance(net, nn.Linear) and net.in_features == 6
    for name in ("timm", "plain"):
        with pytest.raises(ValueError, match=r"called with .*: TypeError: .*'deep'"):
            build_model(f"{user_module}:{name}", 3, args={"deep": 2})
    with pytest.raises(ValueError, match=r"cnn'.*comes without weights"):
        build_model("cnn", 3, pretrained=True)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("resnet-50", "model.name = 'resnet-50': unknown: did you mean resnet50?"),
        ("wrn-30-10", "^model.name = 'wrn-30-10': must be wrn-DEPTH-WIDTH, with a depth of 6 n"),
        ("wrn-4-10", "must be wrn-DEPTH-WIDTH"),
        ("zzz", "choose from cnn, convnext-tiny"),
        ("no.such.module:net", "cannot import no.such.module .*move it to"),
        ("broken:net", "cannot import broken .*a_package_nobody_has"),
        ("mynets:plane", "has no function or class 'plane': did you mean plain?"),
        ("mynets:SIZE", "has no function or class 'SIZE'"),
        ("empty:net", "has no function or class 'net'; define it"),
        ("mynets:needs_more", "called with classes: TypeError: .*secret"),
        ("mynets:not_a_module", "returned a list; it must return an nn.Module"),
        ("mynets:", "package.module:name"),
        (":net", "package.module:name"),
        (".mynets:net", "package.module:name"),
    ],
)
def test_an_error_is_one_line_that_says_what_to_do(
    name: str, message: str, user_module: str
) -> None:
    with pytest.raises(ValueError, match=message) as error:
        build_model(name, 3)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("size", ["classes", "channels", "width"])
def test_sizes_are_positive(size: str) -> None:
    sizes: dict[str, Any] = {"classes": 3, "channels": 3, "width": 2} | {size: 0}
    with pytest.raises(ValueError, match=f"{size} = 0: must be at least 1"):
        build_model("cnn", **sizes)
