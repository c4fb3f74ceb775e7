"""A folded network has the outputs of its model, and the model is not changed."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from dat.core.smoothing import Smoothed
from dat.models import MODELS, build_model, normalized
from dat.models.folding import Affine, fold

CLASSES = 5
CLOSE = 1e-4
"""In units of the largest value."""

every_model = pytest.mark.parametrize("name", MODELS)
NARROW = {name: 8 for name in MODELS if name.startswith(("vit", "convnext"))}
"""Not 2: a layer norm of two values keeps hardly more than their order."""


def images(number: int = 6, *, channels: int = 3, size: int = 8) -> Tensor:
    shape = (number, channels, size, size)
    return torch.rand(shape, generator=torch.Generator().manual_seed(1))


def trained(net: nn.Module) -> nn.Module:
    """As after training: every batch norm has nontrivial statistics, scales and shifts."""
    random = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(-0.5, 0.5, generator=random)
        for norm in norms_of(net):
            if norm.running_mean is not None and norm.running_var is not None:
                norm.running_mean.uniform_(-0.5, 0.5, generator=random)
                norm.running_var.uniform_(0.5, 2, generator=random)
            if norm.weight is not None:
                norm.weight.uniform_(0.5, 1.5, generator=random)
                norm.weight[0] *= -1
    return net


def expected_note(norms: int) -> str:
    """The note for a number of folded batch norms."""
    special = {0: "frozen copy", 1: "1 batch norm folded"}
    return special.get(norms, f"{norms} batch norms folded")


def norms_of(net: nn.Module) -> list[_BatchNorm]:
    return [module for module in net.modules() if isinstance(module, _BatchNorm)]


def logits_and_gradient(net: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Logits, and the gradient of the input."""
    x = x.clone().requires_grad_(True)
    logits = net(x)
    weights = torch.arange(1.0, 1 + logits.shape[1])
    return logits.detach(), torch.autograd.grad((logits * weights).sum(), x)[0]


def check_outputs_match(folded: nn.Module, model: nn.Module, x: Tensor) -> None:
    was_training = [module.training for module in model.modules()]
    outputs = logits_and_gradient(copy.deepcopy(model).eval(), x)
    for actual, expected in zip(logits_and_gradient(folded, x), outputs, strict=True):
        within = CLOSE * float(expected.abs().max())
        torch.testing.assert_close(actual, expected, rtol=0, atol=within)
    assert was_training == [module.training for module in model.modules()]


def remaining_norms(folded: nn.Module) -> list[str]:
    """The batch norms that are still called."""
    assert isinstance(folded, torch.fx.GraphModule)
    calls = [str(node.target) for node in folded.graph.nodes if node.op == "call_module"]
    return [name for name in calls if isinstance(folded.get_submodule(name), _BatchNorm)]


def affines(folded: nn.Module) -> int:
    return sum(isinstance(module, Affine) for module in folded.modules())


class Net(nn.Module):
    """A convolution, a batch norm and a head, with user code in between."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.again = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, CLASSES)

    def end(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(x.mean(dim=(2, 3)))
        return logits


class DataBranch(Net):
    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x))
        return self.end(y if y.mean() > 0 else 2 * y)


class ShapeBranch(Net):
    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x))
        return self.end(y if len(x) > 1 else 2 * y)


class Noise(Net):
    """Tracing turns the random number into a constant."""

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.norm(self.conv(x)) + torch.randn(1))


class NoiseLikeInput(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.norm(self.conv(x + torch.randn_like(x))))


class AlwaysDropout(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.end(F.dropout(self.norm(self.conv(x)), 0.5))


class TwoOutputs(Net):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.norm(self.conv(x))
        return self.end(y), y


class ConvTwice(Net):
    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.again(self.conv(x)))
        return self.end(F.relu(self.again(y)))


class NormTwice(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.norm(self.again(F.relu(self.norm(self.conv(x))))))


class OutputElsewhere(Net):
    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return self.end(F.relu(self.norm(y)) + y)


class NormElsewhere(Net):
    """Its output goes to a ReLU and past it: the ReLU must not overwrite it."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x))
        return self.end(F.relu(y) + y)


class WeightElsewhere(Net):
    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm(self.again(self.conv(x))))
        return self.end(y + F.conv2d(y, self.again.weight, padding=1))


class NormFirst(Net):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        """The input must not change, although a ReLU follows."""
        return self.end(torch.relu(self.norm(self.conv(F.relu(self.first(x))))))


class ReluFirst(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.norm(self.conv(F.relu(x))))


class ReluBehindTanh(Net):
    """The backward pass of tanh needs its output."""

    def __init__(self) -> None:
        super().__init__()
        self.tanh = nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        return self.end(F.relu(self.tanh(self.norm(self.conv(x)))))


class WithoutStatistics(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(4, track_running_stats=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.end(F.relu(self.norm(self.conv(x))))


class WithoutScale(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(4, affine=False)
        self.last = nn.BatchNorm2d(4, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.last(F.relu(self.norm(self.conv(x)))))


class OneDimensional(Net):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(4, 6)
        self.norm_1d = nn.BatchNorm1d(6)
        self.last = nn.BatchNorm1d(CLASSES)
        self.alone = nn.BatchNorm1d(CLASSES)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x)).mean(dim=(2, 3))
        y = self.last(self.head(F.relu(self.norm_1d(self.hidden(y)))))
        logits: Tensor = self.alone(F.relu(y) - 0.1)
        return logits


class OtherConvolutions(Net):
    """Strides, groups, dilation, and a transposed convolution, which is not folded."""

    def __init__(self) -> None:
        super().__init__()
        self.strided = nn.Conv2d(4, 8, 3, stride=2, padding=1, bias=False)
        self.norm_8 = nn.BatchNorm2d(8)
        self.grouped = nn.Conv2d(8, 8, 3, padding=2, dilation=2, groups=4)
        self.norm_grouped = nn.BatchNorm2d(8, eps=0.1)
        self.back = nn.ConvTranspose2d(8, 4, 2, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm_8(self.strided(self.conv(x))))
        y = F.relu(self.norm_grouped(self.grouped(y)))
        return self.end(F.relu(self.norm(self.back(y))))


def built(kind: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return trained(kind())


@every_model
def test_every_network_has_the_same_outputs_without_batch_norms(name: str) -> None:
    net = trained(build_model(name, CLASSES, width=NARROW.get(name, 2)))
    model = normalized(net, [0.4, 0.5, 0.6], [0.2, 0.3, 0.25])
    x = images(size=16)
    folded, note, _ = fold(model, x[:4])
    assert note == expected_note(len(norms_of(model)))
    assert remaining_norms(folded) == []
    check_outputs_match(folded, model, x)
    check_outputs_match(folded, model, images(3, size=24))  # and not only on what it was tried on


@pytest.mark.parametrize("name", ["preact-resnet18", "preact-resnet50", "wrn-16-2"])
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_batch_norms_before_other_activations_are_folded(name: str, activation: str) -> None:
    model = trained(build_model(name, CLASSES, width=2, activation=activation))
    x = images(size=16)
    folded, note, follow = fold(model, x[:4])
    assert note == expected_note(len(norms_of(model)))
    check_outputs_match(folded, model, x)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
    follow()
    check_outputs_match(folded, model, x)


@every_model
@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_not_changed(name: str, training: bool) -> None:
    model = trained(build_model(name, CLASSES, width=2)).train(training)
    first = next(model.parameters())
    first.requires_grad_(False)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    for number, module in enumerate(model.modules()):
        module.training ^= number % 3 == 0
    before, parts = state(model), list(model.modules())
    fold(model, images())
    torch.testing.assert_close(state(model), before, rtol=0, atol=0)
    assert list(model.modules()) == parts


def state(model: nn.Module) -> list[object]:
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return [
        {name: value.detach().clone() for name, value in tensors.items()},
        {name: (value.data_ptr(), value.stride()) for name, value in tensors.items()},
        [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        [p.requires_grad for p in model.parameters()],
        [module.training for module in model.modules()],
    ]


@every_model
def test_a_copy_follows_what_its_model_learns(name: str) -> None:
    net = build_model(name, CLASSES, width=NARROW.get(name, 2))
    model, x = normalized(net, [0.4, 0.5, 0.6], [0.2, 0.3, 0.25]), images()
    folded, _, follow = fold(model, x)
    before = folded(x)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model.train()
    for _ in range(2):
        model(x).square().sum().backward()
        optimizer.step()
    assert torch.equal(folded(x), before)
    follow()
    assert not torch.equal(folded(x), before)
    check_outputs_match(folded, model.eval(), x)
    again = fold(model, x).network
    torch.testing.assert_close(folded(x), again(x), rtol=0, atol=0)


@every_model
def test_a_folded_network_is_frozen_and_shares_nothing(name: str) -> None:
    model = trained(build_model(name, CLASSES, width=2))
    folded, _, _ = fold(model, images())
    assert folded is not model
    assert not any(parameter.requires_grad for parameter in folded.parameters())
    theirs = {tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    ours = {tensor.data_ptr() for tensor in (*folded.parameters(), *folded.buffers())}
    assert not theirs & ours
    x = images()
    before = folded(x)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(folded(x), before)


@every_model
def test_samples_are_independent(name: str) -> None:
    folded, _, _ = fold(trained(build_model(name, CLASSES, width=2)), images())
    x = images(5)
    alone = torch.cat([folded(image.unsqueeze(0)) for image in x])
    torch.testing.assert_close(folded(x), alone, rtol=1e-4, atol=1e-4)


@every_model
def test_the_input_is_left_alone(name: str) -> None:
    x = images()
    before = x.clone()
    folded, _, _ = fold(trained(build_model(name, CLASSES, width=2)), x)
    logits_and_gradient(folded, x)
    assert torch.equal(x, before)


@every_model
def test_memory_format_of_model_and_input_makes_no_difference(name: str) -> None:
    model = trained(build_model(name, CLASSES, width=2))
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = images()
    folded, note, _ = fold(model, x)
    assert "not folded" not in note
    check_outputs_match(folded, model, x)
    check_outputs_match(folded, model, x.to(memory_format=torch.channels_last))
    for parameter in model.parameters():
        if parameter.dim() == 4:
            assert parameter.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("kind", "folded_norms"),
    [
        (ConvTwice, 1),
        (NormTwice, 0),
        (OutputElsewhere, 1),
        (NormElsewhere, 1),
        (NormFirst, 2),
        (ReluFirst, 1),
        (ReluBehindTanh, 1),
        (WithoutStatistics, 0),
        (WithoutScale, 2),
        (OneDimensional, 3),
        (OtherConvolutions, 3),
    ],
)
def test_what_a_batch_norm_may_be_behind(kind: type[Net], folded_norms: int) -> None:
    model, x = built(kind), images()
    before = x.clone()
    folded, note, _ = fold(model, x)
    assert note == expected_note(folded_norms)
    check_outputs_match(folded, model, x)
    check_outputs_match(folded, model, images(3, size=12))
    assert torch.equal(x, before)


@pytest.mark.parametrize("kind", [ConvTwice, OutputElsewhere])
def test_a_layer_that_others_use_too_keeps_its_weights(kind: type[Net]) -> None:
    folded, _, _ = fold(built(kind), images())
    assert affines(folded) == 1


def test_a_batch_norm_used_twice_stays() -> None:
    folded, _, _ = fold(built(NormTwice), images())
    assert remaining_norms(folded) == ["norm", "norm"]


@pytest.mark.parametrize("kind", [DataBranch, ShapeBranch])
def test_a_network_that_cannot_be_traced_is_used_as_it_is(kind: type[Net]) -> None:
    model = built(kind)
    folded, note, _ = fold(model, images())
    assert folded is model
    assert note.startswith("not folded: cannot be traced (")


@pytest.mark.parametrize("kind", [Noise, NoiseLikeInput, AlwaysDropout, WeightElsewhere])
def test_a_network_whose_copy_has_other_outputs_is_used_as_it_is(kind: type[Net]) -> None:
    model = built(kind).train()
    with torch.random.fork_rng(devices=[]):
        folded, note, _ = fold(model, images())
    assert folded is model
    assert note == "not folded: the outputs of the copy differ"
    assert all(module.training for module in model.modules())


def test_a_copy_has_all_of_the_outputs() -> None:
    model, x = built(TwoOutputs).eval(), images()
    folded, note, _ = fold(model, x)
    assert note == "1 batch norm folded"
    for actual, expected in zip(folded(x), model(x), strict=True):
        torch.testing.assert_close(actual, expected)


def test_a_model_with_nan_outputs_is_not_folded() -> None:
    model = built(ReluFirst)
    assert isinstance(model, Net)
    nn.init.constant_(model.head.bias, float("nan"))
    assert fold(model, images()).network is model


class Overflowing(Net):
    """The folded weights overflow; with a black pixel the result is NaN."""

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.norm(self.conv(x * 1e-30)))


def test_a_copy_with_nan_outputs_is_not_used() -> None:
    model = built(Overflowing)
    assert isinstance(model, Net)
    nn.init.constant_(model.conv.weight, 1e30)
    nn.init.constant_(model.norm.weight, 1e10)
    x = images().round()
    assert model.eval()(x).isfinite().all()
    folded, _, _ = fold(model, x)
    assert folded(x).isfinite().all()


@pytest.mark.parametrize("parametrization", [spectral_norm, weight_norm])
def test_parametrized_weights_are_supported(
    parametrization: Callable[[nn.Module], nn.Module],
) -> None:
    model = built(NormFirst)
    assert isinstance(model, Net)
    parametrization(model.conv)
    check_outputs_match(fold(model, images()).network.eval(), model, images())


class NormOfRows(Net):
    """A linear layer on each row of pixels, and a batch norm over the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Linear(24, 4)
        self.over = nn.BatchNorm1d(8)
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.transpose(1, 2).flatten(2)
        logits: Tensor = self.head(self.over(self.rows(rows)).flatten(1))
        return logits


def test_a_batch_norm_of_another_dimension_is_supported() -> None:
    model = built(NormOfRows)
    check_outputs_match(fold(model, images()).network.eval(), model, images())


def test_a_relu_overwrites_only_inputs_that_nothing_else_reads() -> None:
    overwriting = {
        NormFirst: 2,  # behind an Affine and behind a convolution
        NormElsewhere: 0,
        ReluFirst: 0,  # it would overwrite the images
        ReluBehindTanh: 0,
        OutputElsewhere: 1,
    }
    for kind, count in overwriting.items():
        folded, _, _ = fold(built(kind), images())
        assert isinstance(folded, torch.fx.GraphModule)
        in_place = [node for node in folded.graph.nodes if node.target is torch.relu_]
        assert len(in_place) == count, kind


class Sums(Net):
    """Each sum may overwrite a layer's output, but not what others read."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.one(x)  # overwrites the convolution's output
        z = F.relu(y + self.two(y))  # again, and the ReLU overwrites the sum
        w = z + z
        w = w + 1.0
        return self.end(self.again(self.conv(w + torch.tanh(z))))


def test_sums_overwrite_only_inputs_that_nothing_else_reads() -> None:
    model, x = built(Sums), images()
    folded = fold(model, x).network
    assert isinstance(folded, torch.fx.GraphModule)
    targets = [node.target for node in folded.graph.nodes]
    assert targets.count("add_") == 2 and targets.count(torch.relu_) == 1
    before = x.clone()
    check_outputs_match(folded, model, x)
    assert torch.equal(x, before)


def test_double_precision_stays_double() -> None:
    model, x = built(NormFirst).double(), images().double()
    folded, note, _ = fold(model, x)
    assert note == "2 batch norms folded"
    assert folded(x).dtype == torch.float64
    torch.testing.assert_close(folded(x), model.eval()(x))


def test_the_global_generator_is_left_alone_by_a_network_that_does_not_use_it() -> None:
    before = torch.get_rng_state()
    fold(trained(build_model("preact-resnet18", CLASSES, width=2)), images())
    assert torch.equal(before, torch.get_rng_state())


def test_a_single_image_is_enough_to_try_it_on() -> None:
    model = built(NormFirst)
    folded, note, _ = fold(model, images(1))
    assert note == "2 batch norms folded"
    check_outputs_match(folded, model, images())


def test_a_smoothed_network_is_folded_inside() -> None:
    """The vote is Python code that cannot be traced; the network inside can."""
    net = build_model("preact-resnet18", 4, width=4).eval()
    smoothed = Smoothed(net, sigma=0.1, copies=3)
    x = torch.rand(5, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    folded = fold(smoothed, x)
    assert folded.note == fold(net, x).note and "folded" in folded.note
    assert isinstance(folded.network, Smoothed) and folded.network.network is not net
    with torch.no_grad():
        torch.testing.assert_close(folded.network(x), smoothed(x), rtol=1e-4, atol=1e-5)
