"""Every registered network, and the published parameter counts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from dat.models import MODELS, build_model
from dat.models.factory import find_factory

PUBLISHED = {
    "preact-resnet18": (10, 11_171_146),
    "resnet50": (1000, 25_557_032),
    "wrn-28-10": (10, 36_479_194),
    # ViT-S/16 has 22,050,664, among them a class token and 197 positions, which ours has not
    "vit-16": (1000, 22_050_664 - (1 + 197) * 384),
}
CLASSES = 7
NARROW = 2

every_model = pytest.mark.parametrize("name", MODELS)


def count(name: str, classes: int, width: int | None = None) -> int:
    with torch.device("meta"):
        net = find_factory(name)(classes, width=width)
    return sum(parameter.numel() for parameter in net.parameters())


def images(number: int, *, channels: int = 3, size: int = 16) -> Tensor:
    shape = (number, channels, size, size)
    return torch.rand(shape, generator=torch.Generator().manual_seed(1))


def narrow(name: str, channels: int = 3, width: int = NARROW) -> nn.Module:
    return build_model(name, CLASSES, channels=channels, width=width)


@pytest.mark.parametrize(("name", "classes", "parameters"), [(n, *v) for n, v in PUBLISHED.items()])
def test_parameter_count_is_the_published_one(name: str, classes: int, parameters: int) -> None:
    assert count(name, classes) == parameters


@every_model
def test_a_smaller_width_shrinks_the_network(name: str) -> None:
    assert count(name, CLASSES, 1) < count(name, CLASSES, NARROW) < count(name, CLASSES) / 4


@every_model
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [8, 28, 32, 64])
def test_any_image_size_gives_logits(name: str, channels: int, size: int) -> None:
    logits = narrow(name, channels).eval()(images(2, channels=channels, size=size))
    assert logits.shape == (2, CLASSES)
    assert logits.isfinite().all()


@every_model
def test_gradient_reaches_every_parameter(name: str) -> None:
    net = narrow(name, width=4)
    names, parameters = zip(*net.named_parameters(), strict=True)
    loss = cross_entropy(net(images(8, size=32)), torch.arange(8) % CLASSES)
    gradients = torch.autograd.grad(loss, parameters)  # refuses an unused parameter
    unreached = [key for key, value in zip(names, gradients, strict=True) if not value.any()]
    assert unreached == []


@every_model
def test_samples_are_independent_in_evaluation(name: str) -> None:
    net = narrow(name).eval()
    batch = images(4)
    together = net(batch)
    alone = torch.cat([net(image.unsqueeze(0)) for image in batch])
    torch.testing.assert_close(together, alone)


@every_model
def test_initial_signal_neither_dies_nor_explodes(name: str) -> None:
    logits = narrow(name, width=4)(images(8, size=32))
    assert 1e-2 < logits.std() < 1e2


def test_cnn_has_no_batch_statistics() -> None:
    assert list(narrow("cnn").buffers()) == []


def test_resnet50_has_the_parameter_names_of_torchvision() -> None:
    keys = narrow("resnet50").state_dict().keys()
    assert {"conv1.weight", "bn1.running_mean", "fc.bias"} < keys
    assert {"layer1.0.downsample.0.weight", "layer1.0.downsample.1.bias"} < keys
    assert {"layer3.5.conv2.weight", "layer4.2.bn3.num_batches_tracked"} < keys


def test_the_mnist_network_is_the_published_one() -> None:
    net = find_factory("mnist-cnn")(10, channels=1)
    assert sum(parameter.numel() for parameter in net.parameters()) == 166_406
