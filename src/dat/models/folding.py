"""The same network for less: what an attack in eval mode can do without.

An attack asks a frozen network for logits and for gradients of its input, many thousand times.
There batch normalisation is a scale and a shift: behind a convolution or a linear layer it goes
into their weights, elsewhere one fused multiply-add does it. ReLUs behind those overwrite their
input, weights need no gradients, and images lie in memory with the channels last, as convolutions
like them. Where the network learns between attacks, its copy follows it.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from dat.convolve import quicken

CALL = "call_function"
TOLERANCE = 1e-3
"""How far the logits may be off, in units of their largest; rounding is a thousandth of that."""


def stay() -> None:
    """There is nothing to follow."""


class Folded(NamedTuple):
    """A network to attack."""

    network: nn.Module
    note: str
    """What was done, or why nothing was."""
    follow: Callable[[], None] = stay
    """Takes over what the model has learnt since."""


@runtime_checkable
class Wrapper(Protocol):
    """Something around a network that works around another one as well."""

    network: nn.Module

    def around(self, network: nn.Module) -> nn.Module: ...


class Affine(nn.Module):
    """Batch normalisation of images in eval mode."""

    scale: Tensor
    shift: Tensor

    def __init__(self, norm: _BatchNorm) -> None:
        super().__init__()
        scale, shift = _affine(norm)
        self.register_buffer("scale", scale.reshape(-1, 1, 1))
        self.register_buffer("shift", shift.reshape(-1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addcmul(self.shift, x, self.scale)


def _affine(norm: _BatchNorm) -> tuple[Tensor, Tensor]:
    """Scale and shift of every channel."""
    assert norm.running_mean is not None and norm.running_var is not None
    scale = torch.rsqrt(norm.running_var + norm.eps)
    if norm.weight is not None:
        scale = scale * norm.weight.detach()
    shift = -norm.running_mean * scale
    if norm.bias is not None:
        shift = shift + norm.bias.detach()
    return scale, shift


@dataclass(frozen=True)
class Link:
    """Where a layer of the copy comes from: a batch norm, and what it went into, if it did."""

    layer: nn.Module
    norm: str
    into: str | None = None

    def follow(self, model: nn.Module) -> None:
        scale, shift = _affine(model.get_submodule(self.norm))  # type: ignore[arg-type]
        if isinstance(self.layer, Affine):
            self.layer.scale.copy_(scale.reshape(-1, 1, 1))
            self.layer.shift.copy_(shift.reshape(-1, 1, 1))
            return
        layer, before = _layer(self.layer), _layer(model.get_submodule(str(self.into)))
        weight = before.weight
        torch.mul(weight, scale.reshape(-1, *[1] * (weight.dim() - 1)), out=layer.weight)
        shift = shift if before.bias is None else torch.addcmul(shift, before.bias, scale)
        layer.bias.copy_(shift)  # type: ignore[union-attr]


OVERWRITABLE = (nn.Conv2d, nn.Linear, Affine)


def fold(model: nn.Module, x: Tensor, *, quick: bool = True) -> Folded:
    """A frozen copy of a model in eval mode that answers alike, for less; `x` are some images to
    try it on. A network that cannot be traced, or does not answer alike, is taken as it is. `quick`
    lets our own kernels compute what they can."""
    if isinstance(model, Wrapper):
        inner = fold(model.network, x, quick=quick)
        return Folded(model.around(inner.network), inner.note, inner.follow)
    try:
        twin = fx.symbolic_trace(copy.deepcopy(model).eval())
        links = _fold_norms(twin)
        _overwrite(twin)
        twin.delete_all_unused_submodules()
        twin.graph.lint()
        twin.recompile()
    except Exception as error:  # whatever a user's forward does with a value that is not there
        return Folded(model, f"not folded: cannot be traced ({type(error).__name__})")
    twin = twin.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    for parameter in twin.parameters():
        parameter.requires_grad_(False)
    if quick:
        quicken(twin)
    follow = _follower(model, twin, links)
    follow()
    if not alike(model, twin, x):
        return Folded(model, "not folded: the copy does not answer alike")
    norms = f"{len(links)} batch norm{'s' * (len(links) != 1)} folded"
    return Folded(twin, norms if links else "frozen copy", follow)


def _follower(model: nn.Module, twin: nn.Module, links: list[Link]) -> Callable[[], None]:
    """What brings the copy up to date: layers that took in a batch norm by their links, all others
    by their names."""
    layers = {id(link.layer) for link in links}
    linked = {name for name, module in twin.named_modules() if id(module) in layers}
    known = _tensors(model).keys()  # tracing may have made constants of its own
    plain = {
        name: tensor
        for name, tensor in _tensors(twin).items()
        if name in known and name.rpartition(".")[0] not in linked
    }

    @torch.no_grad()
    def follow() -> None:
        now = _tensors(model)
        for name, tensor in plain.items():
            tensor.copy_(now[name])
        for link in links:
            link.follow(model)

    return follow


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _fold_norms(twin: fx.GraphModule) -> list[Link]:
    """Fold what can be folded; what is left to do is to fill in the numbers."""
    links: list[Link] = []
    for node in list(twin.graph.nodes):
        norm = _module(twin, node)
        if not isinstance(norm, nn.BatchNorm1d | nn.BatchNorm2d) or norm.running_mean is None:
            continue
        if not _once(twin, node):
            continue
        source = node.args[0]
        before = _module(twin, source) if isinstance(source, fx.Node) else None
        alone = isinstance(source, fx.Node) and len(source.users) == 1 and _once(twin, source)
        kinds = (nn.Conv2d, nn.BatchNorm2d), (nn.Linear, nn.BatchNorm1d)
        fits = any(isinstance(before, a) and isinstance(norm, b) for a, b in kinds)
        if alone and fits and len(_layer(before).weight) == norm.num_features:
            layer = _with_bias(before)
            _put(twin, source.target, layer)
            links.append(Link(layer, str(node.target), str(source.target)))
            node.replace_all_uses_with(source)
            twin.graph.erase_node(node)
        elif isinstance(norm, nn.BatchNorm2d):
            affine = Affine(norm)
            _put(twin, node.target, affine)
            links.append(Link(affine, str(node.target)))
    return links


def _with_bias(layer: nn.Module | None) -> nn.Module:
    """A layer of the same kind, whose numbers are to be filled in."""
    layer = _layer(layer)
    weight = layer.weight.detach().clone()
    bias = weight.new_zeros(len(weight))
    if isinstance(layer, nn.Linear):
        twin: nn.Module = nn.Linear(layer.in_features, layer.out_features, device="meta")
    else:
        twin = nn.Conv2d(
            layer.in_channels,
            layer.out_channels,
            layer.kernel_size,  # type: ignore[arg-type]
            layer.stride,  # type: ignore[arg-type]
            layer.padding,  # type: ignore[arg-type]
            layer.dilation,  # type: ignore[arg-type]
            layer.groups,
            padding_mode=layer.padding_mode,
            device="meta",
        )
    twin.weight, twin.bias = nn.Parameter(weight), nn.Parameter(bias)
    return twin


def _overwrite(twin: fx.GraphModule) -> None:
    """A ReLU and a sum may overwrite what only they read and what no backward pass looks at
    again."""
    sums = {node for node in twin.graph.nodes if _is_sum(node)}
    for node in twin.graph.nodes:
        sources = [it for it in node.args if isinstance(it, fx.Node)]
        alone = [it for it in sources if len(it.users) == 1]
        layers = [it for it in alone if isinstance(_module(twin, it), OVERWRITABLE)]
        free = [it for it in alone if it in layers or it in sums]
        if _is_relu(twin, node) and free:
            node.op, node.target, node.args, node.kwargs = CALL, torch.relu_, (free[0],), {}
        elif node in sums and len(set(sources)) == 2 and layers:
            other = sources[1] if sources[0] is layers[-1] else sources[0]
            node.op, node.target, node.args = "call_method", "add_", (layers[-1], other)


def _is_relu(twin: fx.GraphModule, node: fx.Node) -> bool:
    if node.op == CALL:
        return node.target in (F.relu, torch.relu)
    return isinstance(_module(twin, node), nn.ReLU)


def _is_sum(node: fx.Node) -> bool:
    """Of two, without a factor, into memory of its own."""
    return node.op == CALL and node.target in (operator.add, torch.add) and not node.kwargs


@torch.no_grad()
def alike(model: nn.Module, twin: nn.Module, x: Tensor) -> bool:
    """On a batch, on another one, and on a single image: a branch or a random number that tracing
    has frozen shows up as a difference."""
    was_training = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        for images in (x, 1 - x.flip(0), x[:1]):
            wanted, found = model(images), twin(images)
            if wanted.shape != found.shape or not wanted.isfinite().all():
                return False
            if not (wanted - found).abs().max() <= TOLERANCE * wanted.abs().max():  # nor NaN
                return False
        return True
    except Exception:  # a twin that fails is no twin
        return False
    finally:
        for module, training in was_training:
            module.training = training


def _layer(module: nn.Module | None) -> nn.Conv2d | nn.Linear:
    assert isinstance(module, nn.Conv2d | nn.Linear)
    return module


def _module(twin: fx.GraphModule, node: fx.Node) -> nn.Module | None:
    return twin.get_submodule(str(node.target)) if node.op == "call_module" else None


def _once(twin: fx.GraphModule, node: fx.Node) -> bool:
    """A layer that is used in several places cannot take in what follows one of them."""
    return [other.target for other in twin.graph.nodes].count(node.target) == 1


def _put(twin: fx.GraphModule, name: object, module: nn.Module) -> None:
    parent, _, last = str(name).rpartition(".")
    setattr(twin.get_submodule(parent), last, module)
