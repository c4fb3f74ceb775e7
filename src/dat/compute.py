"""How a worker computes, whatever the method: layout, copies, compilation, precision, pieces.

None of it changes what is computed but for rounding (and batch norm, which sees a piece at a time
where a batch is computed in pieces).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from dat.attacks import attack_mode
from dat.convolve import Ways, faster, ways
from dat.fields import SettingError, Settings, setting
from dat.models import Folded, alike, fold
from dat.objectives.base import Network

COMPILE_FROM = 5_000_000
"""Images times passes that make up for a minute of compilation, where `auto` decides."""


@dataclass(frozen=True, kw_only=True)
class Compute(Settings):
    """What is asked of the machine, not of the method."""

    layout: str = setting(
        "auto",
        "how images lie in memory: channels-last, as convolutions like it, or as given; auto is "
        "channels-last where the network can take it",
        choices=("auto", "channels-last", "given"),
    )
    fold: bool = setting(True, "attack a frozen copy of the network, with batch norms folded in")
    compile: str = setting(
        "auto",
        "compile the network that is attacked; auto does on cuda, if there is enough to do",
        choices=("auto", "on", "off"),
    )
    precision: str = setting(
        "float32",
        "in which the network computes, forward and backward; weights and sums stay in float32",
        choices=("float32", "bfloat16"),
    )
    pieces: int = setting(
        1, "in how many pieces, one after the other, a worker computes its share of a batch", ge=1
    )
    kernels: bool = setting(
        True, "convolutions by kernels of ours, on CPUs where those are faster than torch's"
    )
    recompute: bool = setting(
        False, "keep no activations inside blocks, compute them again: less memory, more time"
    )


@dataclass(frozen=True)
class Engine:
    """A network and its machine: as it is attacked, and as it learns."""

    model: nn.Module
    compute: Compute = field(default_factory=Compute)
    folded: Folded | None = None
    """The copy that is attacked."""
    format: torch.memory_format = torch.contiguous_format
    notes: tuple[str, ...] = ()
    """What was chosen, in words."""
    blocks: tuple[nn.Module, ...] = ()
    """What is computed again in the backward pass."""
    convolutions: tuple[nn.Module, ...] = ()
    """Those that our kernels compute."""
    x: Tensor | None = None
    """Some images."""

    @classmethod
    def of(cls, model: nn.Module, compute: Compute, x: Tensor, work: int) -> Engine:
        """Set up for images like `x`, and so many passes of an image in all; the model's weights
        are laid out anew. Every worker decides alike."""
        notes: list[str] = []
        last, note = _layout(model, compute.layout, x)
        form = torch.channels_last if last else torch.contiguous_format
        model.to(memory_format=form)  # type: ignore[call-overload]
        notes.append(note)
        folded = None
        if compute.fold:
            with attack_mode(model):
                folded = fold(model, x, quick=compute.kernels and compute.compile != "on")
            notes.append(folded.note)
        network, note = _compiled(folded.network if folded else model, compute, x, work)
        if folded and network is not None:
            folded = folded._replace(network=network)
        notes.append(note)
        if compute.precision != "float32":
            notes.append(compute.precision)
        blocks = _blocks(model) if compute.recompute else ()
        convolutions = _convolutions(model, compute)
        if convolutions:
            notes.append(f"{len(convolutions)} convolutions by our kernels")
        said = tuple(it for it in notes if it)
        return cls(model, compute, folded, form, said, blocks, convolutions, x)

    @classmethod
    def of_sharded(cls, model: nn.Module, compute: Compute) -> Engine:
        """For a model of which each worker has a part: it is attacked itself, as a copy would be a
        whole one, and its weights stay as torch cuts them, channels first."""
        notes: tuple[str, ...] = ("sharded: attacked as it is, channels first",)
        if compute.precision != "float32":
            notes = (*notes, compute.precision)
        blocks = _blocks(model) if compute.recompute else ()
        return cls(model, compute, notes=notes, blocks=blocks)

    def checked(self) -> Engine:
        """Itself, or without the copy if that no longer answers as the model does: something that
        is no weight has changed since it was traced."""
        if self.folded is None or self.x is None:
            return self
        self.folded.follow()
        if alike(self.model, self.folded.network, self.x):
            return self
        return replace(self, folded=None, notes=(*self.notes, "the copy was given up: not alike"))

    def lay(self, x: Tensor) -> Tensor:
        """Images as the network likes them."""
        return x.contiguous(memory_format=self.format) if x.dim() == 4 else x

    def target(self, *, eval_mode: bool) -> nn.Module:
        """The network to attack: its copy, brought up to date, or itself."""
        if self.folded is None or not eval_mode:
            return self.model
        self.folded.follow()
        return self.folded.network

    def pieces(self, count: int, most: int | None = None) -> list[slice]:
        """A worker's images, a piece at a time, in `most` pieces at most."""
        parts = min(self.compute.pieces if most is None else most, max(count, 1))
        ends = [number * count // parts for number in range(parts + 1)]
        return [slice(*pair) for pair in pairwise(ends)]

    def cast(self, network: Network) -> Network:
        """The network in the precision that was chosen; its logits are float32 again."""
        if self.compute.precision == "float32":
            return network
        kind = getattr(torch, self.compute.precision)

        def computed(x: Tensor) -> Tensor:
            with torch.autocast(x.device.type, kind):
                return network(x).float()

        return computed

    @contextmanager
    def updating(self) -> Iterator[None]:
        """For the forward pass of an update: what is kept of it, and how it is derived."""
        with ExitStack() as stack:
            stack.enter_context(faster(self.convolutions))
            for block in self.blocks:
                within = set(block.modules()) & set(self.convolutions)
                stack.enter_context(_recomputed(block, tuple(within)))
            yield


def _layout(model: nn.Module, asked: str, x: Tensor) -> tuple[bool, str]:
    """Whether the channels come last."""
    if asked == "given" or x.dim() != 4:
        return False, ""
    layers = [it for it in model.modules() if isinstance(it, nn.Conv2d)]
    if asked == "auto" and not layers:
        return False, ""
    if x.device.type == "cpu" and any(map(_corrupts, layers)):
        reason = "a strided 1 x 1 convolution of channels that are no multiple of 8"
        if asked != "auto":
            raise SettingError(f"compute.layout = {asked}: torch may crash on {reason}; use auto")
        return False, f"channels not last: {reason}"
    before = [(it, it.detach().clone()) for it in (*model.parameters(), *model.buffers())]
    try:
        with attack_mode(model), torch.no_grad():
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            model(x.contiguous(memory_format=torch.channels_last))
        return True, "channels last"
    except RuntimeError as error:
        if asked != "auto":
            reason = " ".join(str(error).split())
            raise SettingError(f"compute.layout = {asked}: the model fails ({reason})") from None
        model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
        return False, "channels not last: the model cannot take it (view? use reshape or flatten)"
    finally:
        with torch.no_grad():
            for tensor, value in before:  # a model may count its passes
                tensor.copy_(value)


def _corrupts(layer: nn.Conv2d) -> bool:
    """torch 2.13 on AVX2: where the channels lie last, the weight's gradient of a 1 x 1 convolution
    with a stride and fewer than 8 input channels is written beyond its memory. Only multiples of 8
    are taken for safe."""
    strided = layer.kernel_size == (1, 1) and max(layer.stride) > 1
    return strided and bool((layer.in_channels // layer.groups) % 8)


def _compiled(
    network: nn.Module, compute: Compute, x: Tensor, work: int
) -> tuple[nn.Module | None, str]:
    """The network compiled, if it is to be, and a word on it."""
    if compute.compile == "off" or (compute.compile == "auto" and x.device.type != "cuda"):
        return None, ""  # on CPUs folding has gained what there is to gain
    if compute.compile == "auto" and work < COMPILE_FROM:
        return None, "not compiled: little to do"
    if not compute.fold:
        raise SettingError("compute.compile = on: compiles the copy; set compute.fold = true")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path.home() / ".cache/dat/compiled"))
    compiled: Any = torch.compile(network, dynamic=False)
    try:
        probe = x.detach().clone().requires_grad_(True)
        torch.autograd.grad(compiled(probe).sum(), probe)
    except Exception as error:  # whatever a compiler or a network that it cannot take comes up with
        if compute.compile == "auto":
            return None, f"not compiled: {type(error).__name__}"
        reason = str(error).strip().splitlines()[0]
        raise SettingError(f"compute.compile = on: cannot be compiled ({reason})") from error
    return compiled, "compiled"


def _convolutions(model: nn.Module, compute: Compute) -> tuple[nn.Module, ...]:
    if not compute.kernels or compute.precision != "float32":
        return ()
    return tuple(layer for layer in model.modules() if ways(layer) != Ways())


def blocks_of(model: nn.Module) -> tuple[nn.Module, ...]:
    """Members of a sequence that have parts of their own and are no sequence themselves; of those
    within one another the inner ones."""
    sequences = (nn.Sequential, nn.ModuleList)
    found = {
        id(child): child
        for module in model.modules()
        if isinstance(module, sequences)
        for child in module.children()
        if not isinstance(child, sequences) and any(child.children())
    }
    return tuple(
        block
        for block in found.values()
        if not any(id(it) in found for it in list(block.modules())[1:])
    )


def _blocks(model: nn.Module) -> tuple[nn.Module, ...]:
    blocks = blocks_of(model)
    if not blocks:
        raise SettingError(
            "compute.recompute: the model has no blocks, modules with parts of their own within an "
            "nn.Sequential or nn.ModuleList"
        )
    return blocks


@contextmanager
def _recomputed(block: nn.Module, convolutions: tuple[nn.Module, ...]) -> Iterator[None]:
    plain: Callable[..., Any] = block.forward
    every = [it for it in block.modules() if isinstance(it, _BatchNorm)]
    norms = [norm for norm in every if norm.track_running_stats]

    @contextmanager
    def unseen(ways: list[Any]) -> Iterator[None]:
        """The second time, all is computed as the first time, with batch norms in the same ways,
        but they must not count the images again."""
        now = [vars(norm).get("forward") for norm in every]
        _set_forward(every, ways)
        before = [(norm, norm.momentum) for norm in norms]
        for norm in norms:
            norm.momentum = 0.0
        try:
            with faster(convolutions):
                yield
        finally:
            _set_forward(every, now)
            for norm, momentum in before:
                norm.momentum = momentum
                if norm.training and norm.num_batches_tracked is not None:
                    norm.num_batches_tracked.sub_(1)

    def forward(*arguments: Any, **options: Any) -> Any:
        ways = [vars(norm).get("forward") for norm in every]
        both = lambda: (nullcontext(), unseen(ways))  # noqa: E731
        return checkpoint(plain, *arguments, use_reentrant=False, context_fn=both, **options)

    block.forward = forward
    try:
        yield
    finally:
        del block.forward


def _set_forward(norms: Sequence[nn.Module], ways: Sequence[Any]) -> None:
    """Replace forward passes; none is the class's own."""
    for norm, way in zip(norms, ways, strict=True):
        if way is not None:
            norm.forward = way
        else:
            vars(norm).pop("forward", None)
