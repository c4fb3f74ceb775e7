"""A cheaper copy of a network for attacks in eval mode.

An attack evaluates a fixed network and the gradients of its input many thousand times. In eval
mode, batch normalization is a scale and a shift: after a convolution or a linear layer it is folded
into the weights, elsewhere it becomes one fused multiply-add. The ReLUs after those work in place,
weights need no gradients, and images are in channels-last format, which convolutions prefer. If the
network is trained between attacks, its copy can be updated.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from dat.core.adapter import Adapted, Adapter, logits_of
from dat.core.module_state import preserve_state
from dat.core.rng import seeded
from dat.core.short_repr import short_repr
from dat.core.wrapper import ModelWrapper
from dat.kernels.convolve import use_native_convolutions

CALL = "call_function"
TOLERANCE = 1e-3
"""The largest relative error of the logits; rounding errors are a thousandth of that."""


def _no_update() -> None:
    """The network is the model itself."""


class Folded(NamedTuple):
    """The network that attacks use in place of the model."""

    network: nn.Module
    note: str
    """What was folded, or why nothing was."""
    follow: Callable[[], None] = _no_update
    """Copies the current weights of the model."""

    def __repr__(self) -> str:
        return short_repr(self)


class Affine(nn.Module):
    """Batch normalization of images in eval mode."""

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
    """The scale and shift of each channel."""
    assert norm.running_mean is not None and norm.running_var is not None
    scale = torch.rsqrt(norm.running_var + norm.eps)
    if norm.weight is not None:
        scale = scale * norm.weight.detach()
    shift = -norm.running_mean * scale
    if norm.bias is not None:
        shift = shift + norm.bias.detach()
    return scale, shift


@dataclass(frozen=True)
class FoldedNorm:
    """A layer of the copy that contains a batch norm of the model."""

    layer: nn.Module
    norm: str
    """The name of the batch norm in the model."""
    source: str | None = None
    """The name of the layer that it is folded into; None if it became an Affine."""

    def update(self, model: nn.Module) -> None:
        """Recompute the layer's weights from those of the model."""
        scale, shift = _affine(model.get_submodule(self.norm))  # type: ignore[arg-type]
        if isinstance(self.layer, Affine):
            self.layer.scale.copy_(scale.reshape(-1, 1, 1))
            self.layer.shift.copy_(shift.reshape(-1, 1, 1))
            return
        layer, source = _layer(self.layer), _layer(model.get_submodule(str(self.source)))
        weight = source.weight
        torch.mul(weight, scale.reshape(-1, *[1] * (weight.dim() - 1)), out=layer.weight)
        shift = shift if source.bias is None else torch.addcmul(shift, source.bias, scale)
        layer.bias.copy_(shift)  # type: ignore[union-attr]


OVERWRITABLE = (nn.Conv2d, nn.Linear, Affine)
"""Layers whose backward pass does not need their output."""


def fold(model: nn.Module, x: Tensor, *, quick: bool = True) -> Folded:
    """A frozen, cheaper copy of a model in eval mode with the same outputs, checked on the images
    `x`. A network that cannot be traced, or whose copy gives other outputs, is used as it is.
    `quick` enables the native convolution kernels."""
    if isinstance(model, ModelWrapper):
        inner = fold(model.network, model.preprocess(x), quick=quick)
        return Folded(model.wrap(inner.network), inner.note, inner.follow)
    for memory_format in (torch.channels_last, torch.contiguous_format):
        try:
            folded, norms = _trace(model)
        except Exception as error:  # user code may do anything with a traced value
            return Folded(model, f"not folded: cannot be traced ({type(error).__name__})")
        folded = folded.to(memory_format=memory_format)  # type: ignore[call-overload]
        for parameter in folded.parameters():
            parameter.requires_grad_(False)
        if quick and memory_format == torch.channels_last:  # the kernels return channels-last
            use_native_convolutions(folded)
        update = _updater(model, folded, norms)
        update()
        last = takes_channels_last(folded, x)
        if (last or memory_format == torch.contiguous_format) and alike(model, folded, x):
            note = f"{len(norms)} batch norm{'s' * (len(norms) != 1)} folded"
            network = folded if last else Adapted(folded, Adapter(contiguous=True))
            return Folded(network, note if norms else "frozen copy", update)
    return Folded(model, "not folded: the outputs of the copy differ")


def _trace(model: nn.Module) -> tuple[fx.GraphModule, list[FoldedNorm]]:
    """A copy with folded batch norms, whose weights are still to be computed."""
    folded = fx.symbolic_trace(copy.deepcopy(model).eval())
    norms = _fold_norms(folded)
    _work_in_place(folded)
    folded.delete_all_unused_submodules()
    folded.graph.lint()
    folded.recompile()
    return folded, norms


@torch.no_grad()
def takes_channels_last(network: nn.Module, x: Tensor) -> bool:
    """Whether the network accepts images in channels-last format."""
    with seeded(x.device, 0, "layout"):
        return Adapter().takes_channels_last(network, x)


def _updater(model: nn.Module, folded: nn.Module, norms: list[FoldedNorm]) -> Callable[[], None]:
    """A function that copies the model's weights into the copy: folded layers are recomputed, all
    others are matched by name."""
    layers = {id(norm.layer) for norm in norms}
    recomputed = {name for name, module in folded.named_modules() if id(module) in layers}
    known = _tensors(model).keys()  # tracing may add constants
    copied = {
        name: tensor
        for name, tensor in _tensors(folded).items()
        if name in known and name.rpartition(".")[0] not in recomputed
    }

    @torch.no_grad()
    def update() -> None:
        current = _tensors(model)
        for name, tensor in copied.items():
            tensor.copy_(current[name])
        for norm in norms:
            norm.update(model)

    return update


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _fold_norms(folded: fx.GraphModule) -> list[FoldedNorm]:
    """Fold the batch norms where possible; their weights are computed later."""
    norms: list[FoldedNorm] = []
    for node in list(folded.graph.nodes):
        norm = _module(folded, node)
        if not isinstance(norm, nn.BatchNorm1d | nn.BatchNorm2d) or norm.running_mean is None:
            continue
        if not _used_once(folded, node):
            continue
        source = node.args[0]
        before = _module(folded, source) if isinstance(source, fx.Node) else None
        only_user = isinstance(source, fx.Node) and len(source.users) == 1
        kinds = (nn.Conv2d, nn.BatchNorm2d), (nn.Linear, nn.BatchNorm1d)
        fits = any(isinstance(before, a) and isinstance(norm, b) for a, b in kinds)
        foldable = only_user and _used_once(folded, source) and fits
        if foldable and len(_layer(before).weight) == norm.num_features:
            layer = _with_bias(before)
            _replace(folded, source.target, layer)
            norms.append(FoldedNorm(layer, str(node.target), str(source.target)))
            node.replace_all_uses_with(source)
            folded.graph.erase_node(node)
        elif isinstance(norm, nn.BatchNorm2d):
            affine = Affine(norm)
            _replace(folded, node.target, affine)
            norms.append(FoldedNorm(affine, str(node.target)))
    return norms


def _with_bias(layer: nn.Module | None) -> nn.Module:
    """A layer of the same kind with a bias; its weights are computed later."""
    layer = _layer(layer)
    weight = layer.weight.detach().clone()
    bias = weight.new_zeros(len(weight))
    if isinstance(layer, nn.Linear):
        biased: nn.Module = nn.Linear(layer.in_features, layer.out_features, device="meta")
    else:
        biased = nn.Conv2d(
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
    biased.weight, biased.bias = nn.Parameter(weight), nn.Parameter(bias)
    return biased


def _work_in_place(folded: fx.GraphModule) -> None:
    """Let ReLUs and sums overwrite inputs that nothing else reads, including backward passes."""
    sums = {node for node in folded.graph.nodes if _is_sum(node)}
    for node in folded.graph.nodes:
        sources = [source for source in node.args if isinstance(source, fx.Node)]
        unshared = [source for source in sources if len(source.users) == 1]
        layers = [
            source for source in unshared if isinstance(_module(folded, source), OVERWRITABLE)
        ]
        free = [source for source in unshared if source in layers or source in sums]
        if _is_relu(folded, node) and free:
            node.op, node.target, node.args, node.kwargs = CALL, torch.relu_, (free[0],), {}
        elif node in sums and len(set(sources)) == 2 and layers:
            other = sources[1] if sources[0] is layers[-1] else sources[0]
            node.op, node.target, node.args = "call_method", "add_", (layers[-1], other)


def _is_relu(folded: fx.GraphModule, node: fx.Node) -> bool:
    if node.op == CALL:
        return node.target in (F.relu, torch.relu)
    return isinstance(_module(folded, node), nn.ReLU)


def _is_sum(node: fx.Node) -> bool:
    """An out-of-place sum of two tensors, without alpha."""
    return node.op == CALL and node.target in (operator.add, torch.add) and not node.kwargs


@torch.no_grad()
def alike(model: nn.Module, folded: nn.Module, x: Tensor) -> bool:
    """Whether the outputs agree on a batch, on another one and on a single image. Control flow or
    random numbers that tracing has frozen show up as a difference."""
    try:
        with preserve_state(model):
            model.eval()
            for images in (x, 1 - x.flip(0), x[:1]):
                expected, actual = logits_of(model(images)), logits_of(folded(images))
                if expected is None or actual is None or expected.shape != actual.shape:
                    return False
                if not expected.isfinite().all():
                    return False
                error = (expected - actual).abs().max()
                if not error <= TOLERANCE * expected.abs().max():  # False for NaN, too
                    return False
            return True
    except Exception:  # a copy that raises does not agree
        return False


def _layer(module: nn.Module | None) -> nn.Conv2d | nn.Linear:
    assert isinstance(module, nn.Conv2d | nn.Linear)
    return module


def _module(folded: fx.GraphModule, node: fx.Node) -> nn.Module | None:
    return folded.get_submodule(str(node.target)) if node.op == "call_module" else None


def _used_once(folded: fx.GraphModule, node: fx.Node) -> bool:
    """Whether the module is called once; otherwise, folding would affect its other calls."""
    return [other.target for other in folded.graph.nodes].count(node.target) == 1


def _replace(folded: fx.GraphModule, name: object, module: nn.Module) -> None:
    parent, _, last = str(name).rpartition(".")
    setattr(folded.get_submodule(parent), last, module)
