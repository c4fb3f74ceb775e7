"""Every registered network, and the published parameter counts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from dat.core.rng import seeded
from dat.models import MODELS, build_model
from dat.models.factory import find_factory
from dat.models.layers import DropPath, drop_path_rates

PUBLISHED = {
    "preact-resnet18": (10, 11_171_146),
    "resnet18": (1000, 11_689_512),
    "resnet34": (1000, 21_797_672),
    "resnet50": (1000, 25_557_032),
    "wrn-28-10": (10, 36_479_194),
    "wrn-34-10": (10, 46_160_474),
    "convnext-tiny": (1000, 28_589_128),
    "convnext-small": (1000, 50_223_688),
    "convnext-base": (1000, 88_591_464),
    # ViT-S/16 has 22,050,664, among them a class token and 197 positions, which ours has not
    "vit-16": (1000, 22_050_664 - (1 + 197) * 384),
}
PUBLISHED_MILLIONS = {
    "wrn-34-20": (10, 184.5),
    "wrn-70-16": (10, 266.8),
    "wrn-82-8": (10, 79.1),
    "wrn-94-16": (10, 365.9),
    "convnext-atto": (1000, 3.70),
    "convnext-femto": (1000, 5.22),
    "convnext-pico": (1000, 9.05),
    "convnext-nano": (1000, 15.59),
    "convnext-tiny-convstem": (1000, 28.63),
    "convnext-small-convstem": (1000, 50.26),
    "convnext-base-convstem": (1000, 88.75),
    "vit-16-convstem": (1000, 22.78 - (1 + 197) * 384 / 1e6),
}
"""As papers round them."""
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


@pytest.mark.parametrize("name", PUBLISHED_MILLIONS)
def test_parameter_count_rounds_to_the_published_one(name: str) -> None:
    classes, millions = PUBLISHED_MILLIONS[name]
    assert count(name, classes) / 1e6 == pytest.approx(
        millions, abs=0.05 if millions > 60 else 0.006
    )


@pytest.mark.parametrize("depth", ["34", "50"])
def test_a_preact_resnet_has_the_convolutions_of_its_resnet(depth: str) -> None:
    """All but the first: the stem for small images is 3 x 3."""
    shapes = []
    for name in (f"preact-resnet{depth}", f"resnet{depth}"):
        with torch.device("meta"):
            net = find_factory(name)(10)
        convolutions = [m for m in net.modules() if isinstance(m, nn.Conv2d)]
        shapes.append(sorted((m.weight.shape, m.stride) for m in convolutions[1:]))
    assert shapes[0] == shapes[1]


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


@pytest.mark.parametrize(
    "name", ["cnn", "mnist-cnn", "preact-resnet18", "preact-resnet50", "wrn-10-1"]
)
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_another_activation_has_the_same_weights_and_other_outputs(
    name: str, activation: str
) -> None:
    relu = build_model(name, CLASSES, width=2).eval()
    other = build_model(name, CLASSES, width=2, activation=activation).eval()
    for key, value in relu.state_dict().items():
        assert torch.equal(value, other.state_dict()[key]), key
    x = images(3)
    assert not torch.equal(relu(x), other(x))
    was = []
    hooks = {"silu": nn.functional.silu, "gelu": nn.functional.gelu}
    for module in other.modules():
        was += [getattr(module, "activation", None) is hooks[activation]]
        was += [isinstance(module, nn.SiLU if activation == "silu" else nn.GELU)]
    assert any(was)


def test_a_network_without_a_choice_of_activation_says_so() -> None:
    with pytest.raises(ValueError, match=r"called with .*activation: TypeError"):
        build_model("resnet18", 3, width=2, activation="silu")


@pytest.mark.parametrize("name", ["wrn-16-2", "convnext-atto", "convnext-pico-convstem"])
@pytest.mark.parametrize("size", [8, 28])
def test_members_of_families_take_any_image_size(name: str, size: int) -> None:
    net = build_model(name, CLASSES, channels=1, width=2).eval()
    assert net(images(2, channels=1, size=size)).shape == (2, CLASSES)


@pytest.mark.parametrize("name", ["convnext-atto", "vit-4"])
def test_paths_are_dropped_in_training_by_the_seed_alone(name: str) -> None:
    net = build_model(name, CLASSES, width=8, args={"drop_path_rate": 0.5})
    for parameter in net.parameters():  # the residual branches of ConvNeXt begin at 1e-6
        if parameter.dim() == 1:
            nn.init.constant_(parameter, 0.5)
    plain = build_model(name, CLASSES, width=8)
    plain.load_state_dict(net.state_dict())
    x, cpu = images(4), torch.device("cpu")
    assert torch.equal(net.eval()(x), plain.eval()(x))
    net.train()
    outputs = []
    for step in (1, 1, 2):
        with seeded(cpu, 0, "model", step):
            outputs.append(net(x))
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])


def test_a_dropped_path_keeps_its_mean() -> None:
    x = torch.ones(4000, 3, 2)
    dropped = DropPath(0.25).train()(x)
    rows = dropped.flatten(1)
    assert torch.equal(rows, rows[:, :1].expand(-1, 6))  # whole images
    assert set(rows[:, 0].tolist()) == {0.0, float(torch.tensor(1 / 0.75))}
    assert abs(float(dropped.mean()) - 1) < 0.03  # four standard deviations
    with pytest.raises(ValueError, match="drop_path_rate = 1: must be at least 0 and below 1"):
        DropPath(1)
    assert drop_path_rates(0.3, 4) == pytest.approx([0, 0.1, 0.2, 0.3])
