"""From one task to another: a new head, images of another size, layers that learn less or nothing.

Every function takes any nn.Module. Its order is that in which modules are defined.
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

from dat.rng import generator

Head = nn.Linear | nn.Conv2d
NORMS = (_NormBase, nn.GroupNorm, nn.LayerNorm)


def find_head(net: nn.Module) -> tuple[str, Head]:
    """The name of the classification head, and itself: the last layer that only mixes features."""
    found: tuple[str, Head] | None = None
    for name, module in net.named_modules():
        pixelwise = isinstance(module, nn.Conv2d) and module.kernel_size == (1, 1)
        if isinstance(module, Head) and (pixelwise or isinstance(module, nn.Linear)):
            found = name, module
    if found is None:
        raise ValueError(
            f"{type(net).__name__} has no head: its last layer must be linear, or a 1 x 1 "
            "convolution"
        )
    return found


def head_classes(head: Head) -> int:
    return head.out_features if isinstance(head, nn.Linear) else head.out_channels


def replace_head(net: nn.Module, classes: int, *, seed: int = 0) -> nn.Module:
    """The network with a fresh head for so many classes, a function of `seed` alone.

    It is changed in place; a network that is nothing but a head is replaced.
    """
    if classes < 1:
        raise ValueError(f"classes = {classes}: must be at least 1")
    name, old = find_head(net)
    head = _fresh(old, classes, generator(seed, "head"))
    if not name:
        return head
    parent, _, last = name.rpartition(".")
    setattr(net.get_submodule(parent), last, head)
    return net


@torch.no_grad()
def _fresh(old: Head, classes: int, random: torch.Generator) -> nn.Module:
    """Uniform within 1 / sqrt(fan-in), torch's own rule for linear layers."""
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
        drawn = torch.empty(parameter.shape).uniform_(-bound, bound, generator=random)
        parameter.copy_(drawn)
    return head.train(old.training)


class Resized(nn.Module):
    """A network on images that are up-sampled to `size` x `size`, bilinearly, in front of it.

    Inside the model, it leaves attacks and threat models in the pixels of the user's images. Grey
    images are repeated for a network that takes more channels: `channels`, or else those of its
    first convolution. Without a size images stay as large as they are.
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
        return cast(Tensor, self.net(_fitted(x, self.size, self.channels)))

    def extra_repr(self) -> str:
        return f"size={self.size}, channels={self.channels}"


def _fitted(x: Tensor, size: int | None, channels: int | None) -> Tensor:
    given, height, width = x.shape[1:]
    if size is not None and (height, width) != (size, size):
        if max(height, width) > size:
            raise ValueError(
                f"images of {height} x {width} pixels cannot be up-sampled to {size} x {size}"
            )
        x = functional.interpolate(x, size=(size, size), mode="bilinear", align_corners=False)
    if channels is None or given == channels:
        return x
    if given != 1:
        raise ValueError(
            f"images have {given} channels and the network takes {channels}: only grey images, of "
            "one channel, can be repeated"
        )
    return x.expand(-1, channels, -1, -1)


fx.wrap("_fitted")  # one step to a tracer, which could not follow its questions


def first_channels(net: nn.Module) -> int | None:
    """How many channels the first convolution takes; none if there is none."""
    convolutions = (module for module in net.modules() if isinstance(module, nn.Conv2d))
    first = next(convolutions, None)
    return None if first is None else first.in_channels


class Block(NamedTuple):
    """A piece of a network."""

    name: str
    modules: list[nn.Module]
    parameters: list[nn.Parameter]


def blocks(net: nn.Module) -> list[Block]:
    """A network's top-level blocks in order, and its head as the last one.

    What is only wrapped around a network is passed over, a chain of stages is opened up, and a
    normalisation belongs to the block before it. Parameters outside of all are the first block's.
    """
    name, head = find_head(net)
    taken = {id(parameter) for parameter in head.parameters()}
    found: list[Block] = []
    for path, module in _pieces(net, "", head):
        rest = [p for p in module.parameters() if id(p) not in taken]
        taken.update(map(id, rest))
        if module is head or not (rest or _has_norm(module)):
            continue
        if isinstance(module, NORMS) and found:
            found[-1].modules.append(module)
            found[-1].parameters.extend(rest)
        else:
            found.append(Block(path, [module], rest))
    found.append(Block(name, [head], list(head.parameters())))
    found[0].parameters.extend(p for p in net.parameters() if id(p) not in taken)
    return found


def _pieces(module: nn.Module, path: str, head: nn.Module) -> list[tuple[str, nn.Module]]:
    """The children that have something to learn, below all that is only wrapped around them."""
    pieces = list(_inside(module, path))
    if len(pieces) == 1 and pieces[0][1] is not head and not list(module.parameters(recurse=False)):
        return _pieces(pieces[0][1], pieces[0][0], head)
    return [stage for name, piece in pieces for stage in _stages(piece, name)]


def _stages(module: nn.Module, path: str) -> list[tuple[str, nn.Module]]:
    """A Sequential of Sequentials is a chain of stages; anything else is one block."""
    pieces = list(_inside(module, path))
    chained = all(isinstance(it, nn.Sequential) for it in (module, *(it for _, it in pieces)))
    if not pieces or not chained:
        return [(path, module)]
    return [stage for name, piece in pieces for stage in _stages(piece, name)]


def _inside(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        if next(child.parameters(), None) is not None or _has_norm(child):
            yield f"{path}.{name}".lstrip("."), child


def _has_norm(module: nn.Module) -> bool:
    return any(isinstance(it, _NormBase) for it in module.modules())


def freeze(net: nn.Module, layers: str) -> None:
    """Let only some layers learn: `all`, the `head`, or the last so many blocks, e.g. `2`.

    The others keep their weights, and their batch norms the statistics that they have; in training,
    too, they normalise by those.
    """
    if layers == "all":
        return
    found = blocks(net)
    count = int(layers) if layers.isdecimal() else {"head": 1}.get(layers, 0)
    if not 1 <= count <= len(found):
        names = ", ".join(block.name or type(net).__name__ for block in found)
        raise ValueError(
            f"finetune.layers = {layers!r}: must be all, head, or a number from 1 to {len(found)}: "
            f"the network's blocks are {names}"
        )
    for block in found[:-count]:
        for parameter in block.parameters:
            parameter.requires_grad_(False)
        for module in block.modules:
            for norm in module.modules():
                if isinstance(norm, _NormBase):
                    norm.eval()
                    norm.train = MethodType(_stay, norm)  # type: ignore[method-assign]


def _stay(norm: nn.Module, mode: bool = True) -> nn.Module:
    """In place of `train`."""
    return norm


def rate_factors(net: nn.Module, decay: float) -> dict[Tensor, float]:
    """Layer-wise rates: 1 for the head, and for each block before it `decay` times as much."""
    return {
        parameter: decay**distance
        for distance, block in enumerate(reversed(blocks(net)))
        for parameter in block.parameters
    }
