"""The same network for less: what an attack in eval mode can do without.

An attack asks a frozen network for logits and for gradients of its input, many thousand times.
There batch normalisation is a scale and a shift: behind a convolution or a linear layer it goes
into their weights, elsewhere one fused multiply-add does it. ReLUs behind those overwrite their
input, weights need no gradients, and images lie in memory with the channels last, as convolutions
like them.
"""

from __future__ import annotations

import copy
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval

CALL = "call_function"
TOLERANCE = 1e-3
"""How far the logits may be off, in units of their largest; rounding is a thousandth of that."""


class Folded(NamedTuple):
    """A network to attack."""

    network: nn.Module
    note: str
    """What was done, or why nothing was."""


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
        assert norm.running_mean is not None and norm.running_var is not None
        scale = torch.rsqrt(norm.running_var + norm.eps)
        if norm.weight is not None:
            scale = scale * norm.weight.detach()
        shift = -norm.running_mean * scale
        if norm.bias is not None:
            shift = shift + norm.bias.detach()
        self.register_buffer("scale", scale.reshape(-1, 1, 1))
        self.register_buffer("shift", shift.reshape(-1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addcmul(self.shift, x, self.scale)


OVERWRITABLE = (nn.Conv2d, nn.Linear, Affine)


def fold(model: nn.Module, x: Tensor) -> Folded:
    """A frozen copy of a model in eval mode that answers alike, for less; `x` are some images to
    try it on. A network that cannot be traced, or does not answer alike, is taken as it is."""
    if isinstance(model, Wrapper):
        inner = fold(model.network, x)
        return Folded(model.around(inner.network), inner.note)
    try:
        twin = fx.symbolic_trace(copy.deepcopy(model).eval())
        found = _fold_norms(twin)
        _overwrite(twin)
        twin.graph.lint()
        twin.recompile()
    except Exception as error:  # whatever a user's forward does with a value that is not there
        return Folded(model, f"not folded: cannot be traced ({type(error).__name__})")
    twin = twin.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    for parameter in twin.parameters():
        parameter.requires_grad_(False)
    if not _alike(model, twin, x):
        return Folded(model, "not folded: the copy does not answer alike")
    return Folded(twin, f"{found} batch norms folded")


def _fold_norms(twin: fx.GraphModule) -> int:
    found = 0
    for node in list(twin.graph.nodes):
        norm = _module(twin, node)
        if not isinstance(norm, nn.BatchNorm1d | nn.BatchNorm2d) or norm.running_mean is None:
            continue
        if not _once(twin, node):
            continue
        source = node.args[0]
        before = _module(twin, source) if isinstance(source, fx.Node) else None
        alone = isinstance(source, fx.Node) and len(source.users) == 1 and _once(twin, source)
        if alone and isinstance(before, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d):
            _put(twin, source.target, fuse_conv_bn_eval(before, norm))
        elif alone and isinstance(before, nn.Linear) and isinstance(norm, nn.BatchNorm1d):
            _put(twin, source.target, fuse_linear_bn_eval(before, norm))
        elif isinstance(norm, nn.BatchNorm2d):
            _put(twin, node.target, Affine(norm))
            found += 1
            continue
        else:
            continue
        node.replace_all_uses_with(source)
        twin.graph.erase_node(node)
        found += 1
    return found


def _overwrite(twin: fx.GraphModule) -> None:
    """A ReLU may overwrite what only it reads and what no backward pass looks at again."""
    for node in twin.graph.nodes:
        is_relu = isinstance(_module(twin, node), nn.ReLU) or (
            node.op == CALL and node.target in (F.relu, torch.relu)
        )
        source = node.args[0] if node.args else None
        if not is_relu or not isinstance(source, fx.Node) or len(source.users) > 1:
            continue
        if isinstance(_module(twin, source), OVERWRITABLE):
            node.op, node.target, node.args, node.kwargs = CALL, torch.relu_, (source,), {}


@torch.no_grad()
def _alike(model: nn.Module, twin: nn.Module, x: Tensor) -> bool:
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


def _module(twin: fx.GraphModule, node: fx.Node) -> nn.Module | None:
    return twin.get_submodule(str(node.target)) if node.op == "call_module" else None


def _once(twin: fx.GraphModule, node: fx.Node) -> bool:
    """A layer that is used in several places cannot take in what follows one of them."""
    return [other.target for other in twin.graph.nodes].count(node.target) == 1


def _put(twin: fx.GraphModule, name: object, module: nn.Module) -> None:
    parent, _, last = str(name).rpartition(".")
    setattr(twin.get_submodule(parent), last, module)
