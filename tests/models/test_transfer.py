"""A new head, other image sizes, frozen layers and layer-wise learning rates."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from dat.models import (
    MODELS,
    Resized,
    blocks,
    build_model,
    find_head,
    fold,
    freeze,
    normalized,
    rate_factors,
    replace_head,
)
from dat.optim import OPTIMIZERS, OptimizerSettings, scale_rates, set_rate

HEADS = {
    "cnn": "head.2",
    "mnist-cnn": "head.2",
    **dict.fromkeys(("preact-resnet18", "preact-resnet34", "preact-resnet50"), "linear"),
    **dict.fromkeys(("resnet18", "resnet34", "resnet50"), "fc"),
    "wrn-28-10": "linear",
    **dict.fromkeys(("convnext-tiny", "convnext-tiny-convstem"), "head.fc"),
    **dict.fromkeys(("vit-4", "vit-16", "vit-16-convstem"), "head"),
}
PREACT = ["conv", "stages.0", "stages.1", "stages.2", "stages.3", "linear"]
RESNET = ["conv1", "layer1", "layer2", "layer3", "layer4", "fc"]
CONVNEXT = ["stem", "stages.0", "stages.1", "stages.2", "stages.3", "head", "head.fc"]
VIT = ["patches", "blocks", "head"]
BLOCKS = {
    "cnn": ["features", "head", "head.2"],
    "mnist-cnn": ["features", "head", "head.2"],
    **dict.fromkeys(("preact-resnet18", "preact-resnet34", "preact-resnet50"), PREACT),
    **dict.fromkeys(("resnet18", "resnet34", "resnet50"), RESNET),
    "wrn-28-10": ["conv", "stages.0", "stages.1", "stages.2", "linear"],
    **dict.fromkeys(("convnext-tiny", "convnext-tiny-convstem"), CONVNEXT),
    **dict.fromkeys(("vit-4", "vit-16", "vit-16-convstem"), VIT),
}


def images(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def weights_of(net: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in net.state_dict().items()}


class Convolutional(nn.Module):
    """A network without linear layers, like SqueezeNet."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Conv2d(3, 6, 3, padding=1)
        self.classifier = nn.Sequential(nn.Conv2d(6, 9, 1, stride=2, bias=False), nn.ReLU())

    def forward(self, x: Tensor) -> Any:
        return self.classifier(self.body(x)).mean((2, 3))


# The head


@pytest.mark.parametrize("name", MODELS)
def test_only_the_head_is_new(name: str) -> None:
    net = build_model(name, 7, width=2).eval()
    before = weights_of(net)
    assert replace_head(net, 4, seed=3) is net
    assert net(images(2, 3, 32, 32)).shape == (2, 4)
    for key, value in net.state_dict().items():
        assert torch.equal(value, before[key]) is not key.startswith(HEADS[name]), key
    assert find_head(net)[0] == HEADS[name]


def test_the_head_follows_from_the_seed_alone() -> None:
    state = torch.get_rng_state()
    one, same, other = (
        replace_head(build_model("cnn", 7, width=2, seed=seed), 4, seed=head)
        for seed, head in ((0, 1), (5, 1), (0, 2))
    )
    head, again, different = (find_head(net)[1].weight for net in (one, same, other))
    assert torch.equal(head, again)
    assert not torch.equal(head, different)
    bound = head.shape[1] ** -0.5
    assert 0.8 * bound < float(head.detach().abs().max()) <= bound
    assert torch.equal(torch.get_rng_state(), state)


def test_a_convolution_may_be_the_head() -> None:
    net = replace_head(Convolutional().double().eval(), 4)
    name, head = find_head(net)
    assert name == "classifier.0"
    assert isinstance(head, nn.Conv2d)
    assert (head.stride, head.bias, head.weight.dtype) == ((2, 2), None, torch.float64)
    assert not head.training
    assert net(images(2, 3, 8, 8).double()).shape == (2, 4)


def test_a_network_may_be_nothing_but_a_head() -> None:
    assert replace_head(nn.Linear(5, 3), 2)(images(4, 5)).shape == (4, 2)


def test_what_has_no_head_is_refused() -> None:
    with pytest.raises(ValueError, match="Sequential has no head: its last layer must be linear"):
        replace_head(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten()), 5)
    with pytest.raises(ValueError, match="classes = 0: must be at least 1"):
        replace_head(nn.Linear(5, 3), 0)


# Images of another size


def test_images_are_up_sampled_in_front_of_the_network() -> None:
    x = images(2, 1, 4, 5)
    expected = functional.interpolate(x, (8, 8), mode="bilinear", align_corners=False)
    assert torch.equal(Resized(nn.Identity(), 8)(x), expected)
    assert torch.equal(Resized(nn.Identity(), 8)(expected), expected)
    assert torch.equal(Resized(nn.Identity())(x), x)


def test_a_grey_image_is_repeated() -> None:
    net = build_model("cnn", 3, channels=3, width=2)
    x = images(2, 1, 6, 6)
    assert torch.equal(Resized(net)(x), net(x.repeat(1, 3, 1, 1)))
    assert torch.equal(Resized(nn.Identity(), 6, channels=2)(x), x.repeat(1, 2, 1, 1))
    three = images(2, 3, 6, 6)
    assert torch.equal(Resized(net)(three), net(three))


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((2, 2, 6, 6), "images have 2 channels and the network takes 3: only grey images"),
        ((2, 3, 6, 9), "images of 6 x 9 pixels cannot be up-sampled to 8 x 8"),
    ],
)
def test_images_that_do_not_fit(shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Resized(build_model("cnn", 3, width=2), 8)(images(*shape))


@pytest.mark.parametrize("option", [{"size": 0}, {"channels": 0}])
def test_sizes_are_positive(option: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=" = 0: must be at least 1"):
        Resized(nn.Identity(), **option)


def test_gradients_are_in_the_users_pixels() -> None:
    x = images(2, 1, 4, 4).requires_grad_(True)
    net = Resized(build_model("cnn", 3, width=2), 8)
    (gradient,) = torch.autograd.grad(net(x).sum(), x)
    assert gradient.shape == x.shape
    assert (gradient != 0).any()


@pytest.mark.parametrize("name", ["preact-resnet18", "resnet50"])
def test_a_resized_network_is_folded(name: str) -> None:
    net = normalized(build_model(name, 3, width=2), [0.5] * 3, [0.2] * 3)
    model = Resized(net, 16, channels=3).eval()
    folded = fold(model, images(4, 1, 8, 8))
    assert folded.note.endswith("batch norms folded")
    x = images(3, 1, 8, 8, seed=1)
    torch.testing.assert_close(folded.network(x), model(x), rtol=1e-4, atol=1e-5)


# Blocks


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_blocks_are_in_order_and_whole(name: str, wrapped: bool) -> None:
    net = build_model(name, 3, width=2)
    model = Resized(normalized(net, [0.5] * 3, [0.2] * 3), 16) if wrapped else net
    net_blocks = blocks(model)
    prefix = "net.net." if wrapped else ""
    assert [block.name for block in net_blocks] == [f"{prefix}{name}" for name in BLOCKS[name]]
    parameters = [id(p) for block in net_blocks for p in block.parameters]
    assert sorted(parameters) == sorted(map(id, model.parameters()))


def test_normalisations_and_loose_parameters_have_a_block() -> None:
    net = nn.Sequential(
        nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, affine=False), nn.ReLU()
    )
    net.append(nn.Sequential(nn.Flatten(), nn.BatchNorm1d(4), nn.Linear(4, 2)))
    net.register_parameter("token", nn.Parameter(torch.ones(1)))
    net_blocks = blocks(net)
    assert [block.name for block in net_blocks] == ["0", "1", "4", "4.2"]
    assert net_blocks[1].modules == [net[1], net[2]]
    assert [len(block.parameters) for block in net_blocks] == [3, 2, 2, 2]
    assert blocks(nn.Linear(3, 2))[0].name == ""


def test_a_head_may_be_defined_before_the_body() -> None:
    class Reversed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 2)
            self.conv = nn.Conv2d(3, 4, 3)

    assert [block.name for block in blocks(Reversed())] == ["conv", "fc"]


# Freezing


@pytest.mark.parametrize("layers", ["all", "head", "1", "2", "5", "6"])
def test_the_last_blocks_learn(layers: str) -> None:
    model = normalized(build_model("preact-resnet18", 3, width=2), [0.5] * 3, [0.2] * 3)
    freeze(model, layers)
    count = {"all": 6, "head": 1}.get(layers) or int(layers)
    for number, block in enumerate(reversed(blocks(model))):
        assert {p.requires_grad for p in block.parameters} == {number < count}
        inner = [module for outer in block.modules for module in outer.modules()]
        norms = [module for module in inner if isinstance(module, nn.BatchNorm2d)]
        assert {module.train().training for module in norms} <= {number < count}


def test_frozen_statistics_stay_in_every_mode_and_copy() -> None:
    net = nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 2))
    freeze(net, "2")
    twin = copy.deepcopy(net)
    for frozen in (net, twin):
        assert frozen.train() is frozen
        before = weights_of(frozen)
        shifted = frozen(images(8, 3, 3, 3) + 5)
        assert all(torch.equal(value, before[key]) for key, value in frozen.state_dict().items())
        assert torch.equal(frozen.eval()(images(8, 3, 3, 3) + 5), shifted)
        assert frozen[1].train().training
    assert twin[0].train() is twin[0]


@pytest.mark.parametrize("layers", ["0", "4", "-1", "body", ""])
def test_unknown_layers_are_refused(layers: str) -> None:
    message = f"finetune.layers = '{layers}': must be all, head, or a number from 1 to 3: the netw"
    with pytest.raises(ValueError, match=message):
        freeze(build_model("cnn", 3, width=2), layers)


# Layer-wise rates


@pytest.mark.parametrize("config", [kind() for kind in OPTIMIZERS.values()], ids=list(OPTIMIZERS))
def test_each_block_has_its_rate(config: OptimizerSettings) -> None:
    net = build_model("preact-resnet18", 3, width=2)
    freeze(net, "5")
    plain = config(net, batch=512)
    peak = plain.param_groups[0]["lr"]
    optimizer = scale_rates(config(net, batch=512), rate_factors(net, 0.5))
    for factor in (1.0, 0.1):
        set_rate(optimizer, factor)
        rates = {p: group["lr"] for group in optimizer.param_groups for p in group["params"]}
        for distance, block in enumerate(reversed(blocks(net)[1:])):
            for parameter in block.parameters:
                assert rates[parameter] == pytest.approx(peak * 0.5**distance * factor)
    assert len(rates) == sum(p.requires_grad for p in net.parameters())
    assert optimizer.param_groups[0]["initial_lr"] == peak
    old = {p: group for group in plain.param_groups for p in group["params"]}
    other = old[optimizer.param_groups[0]["params"][0]].keys() - {"params", "lr", "initial_lr"}
    for group in optimizer.param_groups:  # nothing else about a group has changed
        for parameter in group["params"]:
            assert all(group[key] == old[parameter][key] for key in other)


@pytest.mark.parametrize("config", [kind() for kind in OPTIMIZERS.values()], ids=list(OPTIMIZERS))
def test_a_steps_length_follows_the_rate(config: OptimizerSettings) -> None:
    """The first step of every optimizer is proportional to its learning rate."""

    def moved(decay: float) -> list[float]:
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)).double()
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.copy_(images(*parameter.shape, seed=1))
                parameter.grad = images(*parameter.shape, seed=2).double()
        before = [p.detach().clone() for p in net.parameters()]
        scale_rates(config(net), rate_factors(net, decay)).step()
        pairs = zip(net.parameters(), before, strict=True)
        return [float((new - old).detach().norm()) for new, old in pairs]

    expected = [0.01, 0.01, 0.1, 0.1, 1.0, 1.0]
    ratios = [scaled / unscaled for scaled, unscaled in zip(moved(0.1), moved(1.0), strict=True)]
    assert ratios == pytest.approx(expected)


def test_parameters_without_a_factor_keep_their_rate() -> None:
    first = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(nn.Sequential(first, nn.Linear(4, 3)).parameters(), lr=0.1)
    scale_rates(optimizer, {first.weight: 0.5})
    assert [(g["lr"], len(g["params"])) for g in optimizer.param_groups] == [(0.1, 3), (0.05, 1)]
