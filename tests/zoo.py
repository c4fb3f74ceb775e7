"""Small networks with the habits of published ones: 3 classes, images of 3 x 8 x 8.

All have the same weights, so that those which differ in form alone must answer alike.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CHANNELS, SIZE, CLASSES, WIDTH = 3, 8, 3, 4


class Plain(nn.Module):
    """Two convolutions, a batch norm and a linear layer; flattens as torch advises."""

    def __init__(self, channels: int = CHANNELS) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, WIDTH, 3, padding=1)
        self.norm = nn.BatchNorm2d(WIDTH)
        self.conv2 = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, stride=2)
        self.head = nn.Linear(WIDTH * 16, CLASSES)

    def features(self, x: Tensor) -> Tensor:
        return F.relu(self.conv2(F.relu(self.norm(self.conv1(x)))))

    def forward(self, x: Tensor) -> Any:
        return self.head(self.features(x).flatten(1))


class Viewing(Plain):
    """Flattens with view, which no channels-last tensor takes."""

    def forward(self, x: Tensor) -> Any:
        x = self.features(x)
        return self.head(x.view(x.size(0), -1))


class InPlace(Plain):
    """Overwrites its features."""

    def __init__(self) -> None:
        super().__init__()
        self.relu = nn.ReLU(inplace=True)

    def features(self, x: Tensor) -> Tensor:
        return self.relu(self.conv2(self.relu(self.norm(self.conv1(x)))))  # type: ignore[no-any-return]


class Overwriting(Plain):
    """Normalizes its images where they are; here by 0 and 1, in steps."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x.mul_(2.0).div_(2.0).sub_(1.0).add_(1.0).mul_(1.5).div_(1.5))


class Dropping(Plain):
    """Monte Carlo dropout: random in eval mode."""

    def forward(self, x: Tensor) -> Any:
        x = F.dropout(self.features(x).flatten(1), 0.2, training=True)
        return self.head(x)


class Counting(Plain):
    """Buffers that change in every pass: one is written to, one is replaced."""

    passes: Tensor
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(CHANNELS))

    def forward(self, x: Tensor) -> Any:
        self.passes += 1
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean((0, 2, 3))
        return super().forward(x)


class Adapting(Plain):
    """Normalizes by the batch and updates its running statistics, in eval mode too."""

    def features(self, x: Tensor) -> Tensor:
        x, norm = self.conv1(x), self.norm
        F.batch_norm(x, norm.running_mean, norm.running_var, training=True)
        return F.relu(self.conv2(F.relu(norm(x))))


class Lazy(Plain):
    """Its batch norm learns the number of channels from the first images."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LazyBatchNorm2d()  # type: ignore[assignment]


class Blocked(Plain):
    """Features without gradients, as for a linear probe."""

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            x = self.features(x)
        return self.head(x.flatten(1))


class Detached(Plain):
    """The same, as even a copy has it."""

    def forward(self, x: Tensor) -> Any:
        return self.head(self.features(x).detach().flatten(1))


class Frozen(Plain):
    """Only the head learns."""

    def __init__(self) -> None:
        super().__init__()
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name.startswith("head"))


class Several(Plain):
    """Logits and features."""

    def forward(self, x: Tensor) -> Any:
        features = self.features(x).flatten(1)
        return self.head(features), features


@dataclass
class Output:
    """Like the outputs of transformers: an object with logits, and a mapping."""

    loss: Tensor | None
    logits: Tensor

    def __getitem__(self, key: str) -> Tensor:
        return getattr(self, key)  # type: ignore[no-any-return]


class WithObject(Plain):
    def forward(self, x: Tensor) -> Any:
        return Output(None, super().forward(x))


class WithDict(Plain):
    def forward(self, x: Tensor) -> Any:
        return OrderedDict(aux=x.mean(), logits=super().forward(x))


class Moving(Plain):
    """Brings its images to where its weights are, in their precision."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x.to(self.head.weight))


class Halving(nn.Module):
    """Casts its images to half precision itself."""

    def __init__(self, net: nn.Module, *, back: bool = False) -> None:
        super().__init__()
        self.net, self.back = net.half(), back

    def forward(self, x: Tensor) -> Any:
        logits = self.net(x.half())
        return logits.float() if self.back else logits


class Autocasting(nn.Module):
    """Enters mixed precision by itself."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Any:
        with torch.autocast(x.device.type, torch.float16):
            return self.net(x)


class Auxiliary(Plain):
    """Gives more than logits in training mode only, like Inception and GoogLeNet."""

    def forward(self, x: Tensor) -> Any:
        logits = super().forward(x)
        return (logits, logits.detach()) if self.training else logits


class Exhibit(NamedTuple):
    """A network, and what may be expected of it."""

    make: Callable[[], nn.Module]
    same: bool = True
    """Answers as the plain one does, in every bit."""
    trains: bool = True
    gradients: bool = True
    """Gives gradients of its images, if only in a copy."""
    random: bool = False


def _with(net: nn.Module) -> nn.Module:
    """The same weights for all."""
    weights = Plain()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in weights.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
        weights.norm.running_var.fill_(0.5)  # type: ignore[union-attr]
    net.load_state_dict(weights.state_dict(), strict=False)
    return net


ZOO: dict[str, Exhibit] = {
    "plain": Exhibit(lambda: _with(Plain())),
    "view": Exhibit(lambda: _with(Viewing())),
    "in-place": Exhibit(lambda: _with(InPlace())),
    "overwrites-images": Exhibit(lambda: _with(Overwriting()), same=False),
    "data-parallel": Exhibit(lambda: nn.DataParallel(_with(Plain()))),
    "data-parallel-view": Exhibit(lambda: nn.DataParallel(_with(Viewing()))),
    "dropout-in-eval": Exhibit(lambda: _with(Dropping()), same=False, random=True),
    "frozen": Exhibit(lambda: _with(Frozen())),
    "counting": Exhibit(lambda: _with(Counting())),
    "no-grad": Exhibit(lambda: _with(Blocked()), trains=False),
    "detach": Exhibit(lambda: _with(Detached()), gradients=False, trains=False),
    "tuple": Exhibit(lambda: _with(Several())),
    "object": Exhibit(lambda: _with(WithObject())),
    "dict": Exhibit(lambda: _with(WithDict())),
    "double": Exhibit(lambda: _with(Plain()).double(), same=False),
    "bfloat16": Exhibit(lambda: _with(Viewing()).bfloat16(), same=False, trains=False),
    "float16": Exhibit(lambda: _with(Plain()).half(), same=False, trains=False),
    "casts-to-half": Exhibit(lambda: Halving(_with(Plain())), same=False, trains=False),
    "casts-to-half-and-back": Exhibit(
        lambda: Halving(_with(Plain()), back=True), same=False, trains=False
    ),
    "autocasts": Exhibit(lambda: Autocasting(_with(Plain())), same=False),
    "tuple-in-training": Exhibit(lambda: _with(Auxiliary())),
    "moves-images": Exhibit(lambda: _with(Moving())),
    "moves-images-double": Exhibit(lambda: _with(Moving()).double(), same=False),
}


def state(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """All that must be as it was after an evaluation."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        yield name, (tensor.detach().clone(), tensor.dtype, tensor.requires_grad, id(tensor))
        yield f"{name} lies", tensor.stride()
    for name, module in model.named_modules():
        yield f"{name} mode", module.training


def unchanged(model: nn.Module, before: dict[str, Any]) -> None:
    """Assert that it is as it was."""
    after = dict(state(model))
    assert after.keys() == before.keys()
    for name, value in before.items():
        if isinstance(value, tuple) and value and isinstance(value[0], Tensor):
            assert torch.equal(after[name][0], value[0]), name
            assert after[name][1:] == value[1:], name
        else:
            assert after[name] == value, name
