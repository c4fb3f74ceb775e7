"""How a worker runs its network: memory layout, compilation, precision, micro-batches.

None of it changes the results beyond rounding, with one exception: if a batch is computed in
pieces, batch norms see one piece at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from dat import models
from dat.attacks import attack_mode
from dat.core import devices
from dat.core.lazy import nn, torch
from dat.core.settings import SettingError, Settings, setting
from dat.kernels import convolve
from dat.objectives.base import Network
from dat.train.activation_checkpointing import recomputed, required_blocks
from dat.train.compilation import compile_attacked, compile_update

if TYPE_CHECKING:
    from torch import Tensor

    from dat.core.precision import GradientScaling
    from dat.distributed import World
    from dat.train.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class Compute(Settings):
    """Settings of the computation that do not depend on the method."""

    layout: str = setting(
        "auto",
        "memory layout of images: channels-last, faster for convolutions, or as given; auto: "
        "channels-last if the network supports it",
        choices=("auto", "channels-last", "given"),
    )
    fold: bool = setting(True, "attack a frozen copy of the network with folded batch norms")
    compile: str = setting(
        "auto",
        "torch.compile the attacked network; auto: on GPUs, if the run is long enough to pay off",
        choices=("auto", "on", "off"),
    )
    compile_update: bool = setting(
        False, "torch.compile the model in the update, too, for its forward and backward pass"
    )
    precision: str = setting(
        "float32",
        "precision of forward and backward passes; weights and sums stay in float32; float16 "
        "scales the loss",
        choices=("float32", "bfloat16", "float16"),
    )
    tf32: bool = setting(
        False,
        "on NVIDIA GPUs, let float32 convolutions and matrix products of training round their "
        "inputs to 10 bits (TF32), which is faster; evaluation never does",
    )
    pieces: int = setting(
        1, "micro-batches that a worker splits its share of a batch into, to save memory", ge=1
    )
    kernels: bool = setting(
        True, "use DAT's own convolution kernels on CPUs where they are faster than PyTorch's"
    )
    recompute: bool = setting(
        False, "activation checkpointing: recompute activations inside blocks to save memory"
    )

    def check(self, trainer: Trainer) -> None:
        """Refuse what torch.compile does not support in the update."""
        reason = ""
        if self.recompute:
            reason = "torch.compile decides what to recompute; set compute.recompute = false"
        elif trainer.objective.second_derivatives:
            reason = "second derivatives are not supported; use another objective than gradalign"
        elif trainer.options.batch_norm.scope != "local" or trainer.options.subgroup.size > 1:
            reason = "only local batch norm is supported; use train.bn local and train.team 1"
        if self.compile_update and reason:
            raise SettingError(f"compute.compile_update = true: {reason}")

    def sharding_conflict(self) -> str:
        """Which setting does not support a sharded model, and what to set."""
        if self.layout == "channels-last":
            return "torch shards weights in channels-first layout; use compute.layout auto"
        if self.compile == "on":
            return "only an unsharded copy of the network is compiled; use compute.compile auto"
        if self.compile_update:
            return "only an unsharded model is compiled; use compute.compile_update false"
        if self.pieces > 1:
            return "workers may have different numbers of pieces; use compute.pieces 1"
        return ""


@dataclass(frozen=True)
class Engine:
    """Runs a network: the copy that is attacked, and the model that learns."""

    model: nn.Module
    compute: Compute = field(default_factory=Compute)
    folded: models.Folded | None = None
    """The copy that is attacked."""
    format: torch.memory_format = field(default_factory=lambda: torch.contiguous_format)
    notes: tuple[str, ...] = ()
    """The choices made, as readable text."""
    blocks: tuple[nn.Module, ...] = ()
    """The blocks whose activations are recomputed in the backward pass."""
    convolutions: tuple[nn.Module, ...] = ()
    """The convolutions that DAT's own kernels compute."""
    compiled: Callable[..., Any] | None = None
    """The compiled `forward` of the model, for the update."""
    x: Tensor | None = None
    """Sample images."""
    adapter: models.Adapter = field(default_factory=lambda: models.Adapter())
    """Adapts the model's inputs and outputs."""

    @classmethod
    def of(cls, model: nn.Module, compute: Compute, x: Tensor, work: int) -> Engine:
        """Set up for images like `x` and a total of `work` passes of one image. Changes the memory
        layout of the model's weights. Every worker makes the same choices."""
        notes: list[str] = []
        adapter = models.Adapter.of(model, x)
        _check_dtype(model)
        channels_last, note = _layout(model, compute.layout, x, adapter)
        form = torch.channels_last if channels_last else torch.contiguous_format
        model.to(memory_format=form)  # type: ignore[call-overload]
        notes.append(note)
        folded = None
        if compute.fold:
            with attack_mode(model):
                given = models.Adapted(model, adapter) if adapter else model
                with devices.tf32(False):
                    quick = compute.kernels and compute.compile != "on"
                    folded = models.fold(given, x, quick=quick)
            notes.append(folded.note)
        network, note = compile_attacked(folded.network if folded else model, compute, x, work)
        if folded and network is not None:
            folded = folded._replace(network=network)
        notes.append(note)
        if compute.precision != "float32":
            notes.append(compute.precision)
        blocks = required_blocks(model) if compute.recompute else ()
        convolutions = _convolutions(model, compute)
        if convolutions:
            notes.append(f"{len(convolutions)} convolutions in native kernels")
        compiled = compile_update(model) if compute.compile_update else None
        notes.append("update compiled" if compiled else "")
        choices = tuple(note for note in notes if note)
        return cls(
            *(model, compute, folded, form, choices, blocks, convolutions, compiled, x, adapter)
        )

    @classmethod
    def of_sharded(cls, model: nn.Module, compute: Compute) -> Engine:
        """Set up for a sharded model. The attack runs on the model itself, because a copy would be
        unsharded, and the weights stay channels first, as torch shards them."""
        notes: tuple[str, ...] = ("sharded: attacked without a copy, channels first",)
        if compute.precision != "float32":
            notes = (*notes, compute.precision)
        blocks = required_blocks(model) if compute.recompute else ()
        return cls(model, compute, notes=notes, blocks=blocks)

    def checked(self, world: World) -> Engine:
        """This engine, but without the folded copy if its outputs differ from the model's on any
        worker, because something other than weights has changed since it was traced."""
        if not self.compute.fold or self.x is None:
            return self
        same = torch.tensor([self._copy_matches()], dtype=torch.int32)
        if bool(world.gather(same).all()) or self.folded is None:
            return self
        note = "folded copy dropped: its outputs differ from the model's"
        return replace(self, folded=None, notes=(*self.notes, note))

    def _copy_matches(self) -> bool:
        """Compared without TF32, whose rounding would hide differences."""
        if self.folded is None or self.x is None:
            return False
        self.folded.follow()
        original = models.Adapted(self.model, self.adapter)
        with devices.tf32(False):
            return models.alike(original, self.folded.network, self.x)

    def to_memory_format(self, x: Tensor) -> Tensor:
        """Images in the network's memory layout."""
        return x.contiguous(memory_format=self.format) if x.dim() == 4 else x

    def target(self, *, eval_mode: bool) -> nn.Module:
        """The network to attack: the folded copy with current weights, or the model itself."""
        if self.folded is None or not eval_mode:
            return self.model
        self.folded.follow()
        return self.folded.network

    def pieces(self, count: int, most: int | None = None) -> list[slice]:
        """Split `count` images into at most `most` pieces."""
        pieces = min(self.compute.pieces if most is None else most, max(count, 1))
        ends = [number * count // pieces for number in range(pieces + 1)]
        return [slice(*pair) for pair in pairwise(ends)]

    def cast(self, network: Network, scaling: GradientScaling | None = None) -> Network:
        """The network with its adapter, in the configured precision; its logits are float32. An
        attack in float16 passes its `scaling`."""
        from dat.core.precision import PRECISIONS, autocast

        def logits(x: Tensor) -> Tensor:  # the adapter may only be needed in training mode
            return self.adapter(network, x, training=self.model.training)

        cast = autocast(logits, PRECISIONS[self.compute.precision])
        return scaling(cast) if scaling else cast

    @contextmanager
    def updating(self) -> Iterator[None]:
        """A context for an update's forward pass: recomputed activations, and faster kernels or a
        compiled network."""
        with ExitStack() as stack:
            if self.compiled is not None:
                self.model.forward = self.compiled
                stack.callback(delattr, self.model, "forward")
            stack.enter_context(convolve.native_convolutions(self.convolutions))
            for block in self.blocks:
                within = set(block.modules()) & set(self.convolutions)
                stack.enter_context(recomputed(block, tuple(within)))
            yield


def _check_dtype(model: nn.Module) -> None:
    """Refuse low-precision weights: small updates would be rounded away."""
    low_precision = (torch.float16, torch.bfloat16)
    trainable = (parameter for parameter in model.parameters() if parameter.requires_grad)
    dtype = next((p.dtype for p in trainable if p.dtype in low_precision), None)
    if dtype:
        raise ValueError(
            f"the model's weights are {str(dtype).removeprefix('torch.')}: train them in float32 "
            "(model.float()), then set compute.precision = bfloat16 for mixed precision"
        )


def _layout(model: nn.Module, layout: str, x: Tensor, adapter: models.Adapter) -> tuple[bool, str]:
    """Whether to use channels last, and a note."""
    if layout == "given" or x.dim() != 4:
        return False, ""
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    if layout == "auto" and not convolutions:
        return False, ""
    if not devices.is_accelerator(x.device) and any(map(_corrupts, convolutions)):
        reason = "a strided 1 x 1 convolution whose input channels are not a multiple of 8"
        if layout != "auto":
            raise SettingError(f"compute.layout = {layout}: torch may crash on {reason}; use auto")
        return False, f"not channels last: {reason}"
    tensors = (*model.parameters(), *model.buffers())
    before = [(tensor, tensor.detach().clone()) for tensor in tensors]
    try:
        with attack_mode(model), torch.no_grad():
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            replace(adapter, contiguous=False)(
                model, x.contiguous(memory_format=torch.channels_last)
            )
        return True, "channels last"
    except RuntimeError as error:
        if layout != "auto":
            reason = " ".join(str(error).split())
            raise SettingError(
                f"compute.layout = {layout}: the model fails ({reason}); use auto"
            ) from None
        model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
        return False, "not channels last: the model fails (a view? use reshape or flatten)"
    finally:
        with torch.no_grad():
            for tensor, value in before:  # buffers may count forward passes
                tensor.copy_(value)


def _corrupts(layer: nn.Conv2d) -> bool:
    """torch 2.13 on AVX2 writes the weight gradient of a channels-last, strided 1 x 1 convolution
    with fewer than 8 input channels out of bounds. Only multiples of 8 are considered safe."""
    strided = layer.kernel_size == (1, 1) and max(layer.stride) > 1
    return strided and bool((layer.in_channels // layer.groups) % 8)


def _convolutions(model: nn.Module, compute: Compute) -> tuple[nn.Module, ...]:
    if not compute.kernels or compute.precision != "float32" or compute.compile_update:
        return ()
    return tuple(
        layer
        for layer in model.modules()
        if convolve.native_passes(layer) != convolve.NativePasses()
    )
