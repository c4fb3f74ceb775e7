"""Transfer learning: a new head, other image sizes, frozen layers and layer-wise learning rates.

The functions accept any nn.Module; the order of its layers is the order of definition.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import MethodType
from typing import NamedTuple, cast

import torch
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils import skip_init

from dat.core.rng import generator
from dat.core.short_repr import short_repr

Head = nn.Linear | nn.Conv2d
NORMS = (_NormBase, nn.GroupNorm, nn.LayerNorm)


def find_head(net: nn.Module) -> tuple[str, Head]:
    """The classification head and its name: the last linear layer or 1 x 1 convolution."""
    last: tuple[str, Head] | None = None
    for name, module in net.named_modules():
        pixelwise = isinstance(module, nn.Conv2d) and module.kernel_size == (1, 1)
        if isinstance(module, Head) and (pixelwise or isinstance(module, nn.Linear)):
            last = name, module
    if last is None:
        raise ValueError(
            f"{type(net).__name__} has no head: its last layer must be linear, or a 1 x 1 "
            "convolution"
        )
    return last


def head_classes(head: Head) -> int:
    """The number of classes of a head."""
    return head.out_features if isinstance(head, nn.Linear) else head.out_channels


def replace_head(net: nn.Module, classes: int, *, seed: int = 0) -> nn.Module:
    """Replace the head by a new one for `classes` classes, whose weights depend on `seed` alone.

    The network is changed in place and returned; a network that consists of its head only is not
    changed, and the new head is returned.
    """
    if classes < 1:
        raise ValueError(f"classes = {classes}: must be at least 1")
    name, old = find_head(net)
    head = _new_head(old, classes, generator(seed, "head"))
    if not name:
        return head
    parent, _, last = name.rpartition(".")
    setattr(net.get_submodule(parent), last, head)
    return net


@torch.no_grad()
def _new_head(old: Head, classes: int, random: torch.Generator) -> nn.Module:
    """Weights uniform within 1 / sqrt(fan-in), as torch initializes linear layers."""
    weight = old.weight
    options = {"bias": old.bias is not None, "device": weight.device, "dtype": weight.dtype}
    head: nn.Module
    if isinstance(old, nn.Linear):
        inputs = old.in_features
        head = skip_init(nn.Linear, inputs, classes, **options)
    else:
        inputs = old.in_channels
        options |= {"stride": old.stride, "padding": old.padding}
        head = skip_init(nn.Conv2d, inputs, classes, 1, **options)
    bound = inputs**-0.5
    for parameter in head.parameters():
        values = torch.empty(parameter.shape).uniform_(-bound, bound, generator=random)
        parameter.copy_(values)
    return head.train(old.training)


class Resized(nn.Module):
    """A network that up-samples its input bilinearly to `size` x `size`.

    As part of the model, this keeps attacks and threat models in the pixels of the user's images.
    Grey images are repeated if the network takes more channels: `channels`, or those of its first
    convolution. Without a size, images are not resized.
    """

    def __init__(
        self, net: nn.Module, size: int | None = None, *, channels: int | None = None
    ) -> None:
        super().__init__()
        for name, value in (("size", size), ("channels", channels)):
            if value is not None and value < 1:
                raise ValueError(f"{name} = {value}: must be at least 1")
        self.net, self.size = net, size
        self.channels = first_channels(net) if channels is None else channels

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.net(_fit(x, self.size, self.channels)))

    def __repr__(self) -> str:
        net = type(self.net).__name__
        return f"Resized(size={self.size}, channels={self.channels}, net=<{net}>)"


def _fit(x: Tensor, size: int | None, channels: int | None) -> Tensor:
    """Up-sample images, and repeat grey ones, as far as necessary."""
    image_channels, height, width = x.shape[1:]
    if size is not None and (height, width) != (size, size):
        if max(height, width) > size:
            raise ValueError(
                f"images of {height} x {width} pixels cannot be up-sampled to {size} x {size}"
            )
        x = functional.interpolate(x, size=(size, size), mode="bilinear", align_corners=False)
    if channels is None or image_channels == channels:
        return x
    if image_channels != 1:
        raise ValueError(
            f"images have {image_channels} channels and the network takes {channels}: only grey "
            "images, of one channel, can be repeated"
        )
    return x.expand(-1, channels, -1, -1)


fx.wrap("_fit")  # a leaf for fx, which cannot trace its control flow


def first_channels(net: nn.Module) -> int | None:
    """The input channels of the first convolution; None if there is none."""
    convolutions = (module for module in net.modules() if isinstance(module, nn.Conv2d))
    first = next(convolutions, None)
    return None if first is None else first.in_channels


class Block(NamedTuple):
    """A block of a network."""

    name: str
    modules: list[nn.Module]
    parameters: list[nn.Parameter]

    def __repr__(self) -> str:
        return short_repr(self)


def blocks(net: nn.Module) -> list[Block]:
    """The top-level blocks of a network in order; the last one is its head.

    Wrappers are skipped, chains of stages are opened, and a normalization layer belongs to the
    block before it. Parameters outside all blocks belong to the first one.
    """
    name, head = find_head(net)
    assigned = {id(parameter) for parameter in head.parameters()}
    net_blocks: list[Block] = []
    for path, module in _stages_below(net, "", head):
        parameters = [p for p in module.parameters() if id(p) not in assigned]
        assigned.update(map(id, parameters))
        if module is head or not (parameters or _has_norm(module)):
            continue
        if isinstance(module, NORMS) and net_blocks:
            net_blocks[-1].modules.append(module)
            net_blocks[-1].parameters.extend(parameters)
        else:
            net_blocks.append(Block(path, [module], parameters))
    net_blocks.append(Block(name, [head], list(head.parameters())))
    net_blocks[0].parameters.extend(p for p in net.parameters() if id(p) not in assigned)
    return net_blocks


def _stages_below(module: nn.Module, path: str, head: nn.Module) -> list[tuple[str, nn.Module]]:
    """The stages of a network, without the wrappers around it."""
    children = list(_children(module, path))
    own_parameters = list(module.parameters(recurse=False))
    if len(children) == 1 and children[0][1] is not head and not own_parameters:
        return _stages_below(children[0][1], children[0][0], head)
    return [stage for name, child in children for stage in _stages(child, name)]


def _stages(module: nn.Module, path: str) -> list[tuple[str, nn.Module]]:
    """A Sequential of Sequentials, or one called `stages`, is a chain of stages; anything else is
    one stage."""
    children = list(_children(module, path))
    if path.endswith("stages") and isinstance(module, nn.Sequential):
        return children
    modules = (module, *(child for _, child in children))
    if not children or not all(isinstance(part, nn.Sequential) for part in modules):
        return [(path, module)]
    return [stage for name, child in children for stage in _stages(child, name)]


def _children(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """The children with parameters or statistics, with their paths."""
    for name, child in module.named_children():
        if next(child.parameters(), None) is not None or _has_norm(child):
            yield f"{path}.{name}".lstrip("."), child


def _has_norm(module: nn.Module) -> bool:
    return any(isinstance(submodule, _NormBase) for submodule in module.modules())


def freeze(net: nn.Module, layers: str) -> None:
    """Train only some layers: `all`, the `head`, or a number of blocks from the end, e.g. `2`.

    The other layers keep their weights, and their batch norms use their current running statistics,
    in train mode too.
    """
    if layers == "all":
        return
    net_blocks = blocks(net)
    count = int(layers) if layers.isdecimal() else {"head": 1}.get(layers, 0)
    if not 1 <= count <= len(net_blocks):
        names = ", ".join(block.name or type(net).__name__ for block in net_blocks)
        raise ValueError(
            f"finetune.layers = {layers!r}: must be all, head, or a number from 1 to "
            f"{len(net_blocks)}: the network's blocks are {names}"
        )
    for block in net_blocks[:-count]:
        for parameter in block.parameters:
            parameter.requires_grad_(False)
        for module in block.modules:
            for norm in module.modules():
                if isinstance(norm, _NormBase):
                    norm.eval()
                    norm.train = MethodType(_ignore_mode, norm)  # type: ignore[method-assign]


def _ignore_mode(norm: nn.Module, mode: bool = True) -> nn.Module:
    """Replaces `train` in frozen batch norms."""
    return norm


def rate_factors(net: nn.Module, decay: float) -> dict[Tensor, float]:
    """Layer-wise learning-rate factors: 1 for the head, multiplied by `decay` for each block before
    it."""
    return {
        parameter: decay**distance
        for distance, block in enumerate(reversed(blocks(net)))
        for parameter in block.parameters
    }
