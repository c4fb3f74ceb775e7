"""Adapters for third-party models, so that attacks can call them: images in, logits out.

Attacks pass float32 images in channels-last format, which convolutions prefer, and expect a tensor
of logits. A published model may flatten with `view`, which needs contiguous images; compute in
double or half precision, or cast its images to half itself; overwrite its input; or return a tuple
or an object with `logits`. What a model needs is detected once, by calling it on some images, and
depends on nothing else, so every worker detects the same. A model that needs nothing is not
wrapped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from dat.core.module_state import preserve_state
from dat.core.precision import scale_gradients
from dat.core.rng import seeded
from dat.core.wrapper import ModelWrapper

LOGITS = "logits"


@dataclass(frozen=True)
class Adapter:
    """The conversions around a model's forward pass."""

    contiguous: bool = False
    """Make images contiguous, channels first."""
    dtype: torch.dtype | None = None
    """Convert images to this dtype; None: leave them as they are."""
    clone: bool = False
    """Pass a copy of the images, as the model overwrites them."""
    convert: bool = False
    """Convert the output: it is not a tensor, or less precise than the images."""
    half: bool = False
    """Scale the gradients of the images, as the model computes in float16, at least in part."""

    @classmethod
    def of(cls, model: nn.Module, x: Tensor) -> Adapter:
        """Detect what the model needs for images like `x`. A model that fails in any case needs
        nothing; its error is left to the caller."""
        with preserve_state(model), seeded(x.device, 0, "adapter"), torch.no_grad():
            model.eval()
            images, dtype = x.clone(), None
            with _outputs_in_half(model) as halves:
                output = _output_or_none(model, images)
                if output is None and _dtype(model) not in (None, x.dtype):
                    dtype = _dtype(model)
                    output = _output_or_none(model, x.to(dtype))
            logits = logits_of(output)
            if logits is None:
                return cls()
            adapter = cls(
                dtype=dtype,
                clone=dtype is None and not torch.equal(images, x),
                convert=logits is not output or _precision(logits, x) != logits.dtype,
                half=bool(halves) or logits.dtype == torch.float16,
            )
            return replace(adapter, contiguous=not adapter.takes_channels_last(model, x))

    def takes_channels_last(self, network: nn.Module, x: Tensor) -> bool:
        """Whether a network that accepts `x` also accepts it in channels-last format."""
        if x.dim() != 4:
            return True
        # memory_format would not do: with one channel, both formats match, and strides would stay
        last = _restrided(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return _output_or_none(network, self.preprocess(last)) is not None

    def __bool__(self) -> bool:
        return self != Adapter()

    def preprocess(self, x: Tensor) -> Tensor:
        """The images in the form that the model expects."""
        if self.contiguous:  # with canonical strides, even if there is one channel
            x = _restrided(x)
        if self.dtype is not None:
            x = x.to(self.dtype)
        return x.clone() if self.clone else x

    def __call__(
        self, network: Callable[[Tensor], Any], x: Tensor, *, training: bool = False
    ) -> Tensor:
        """Logits, at least as precise as the images. Gradients are not scaled in training: the
        scales would affect the weights too, and batch norms make images depend on each other."""

        def forward(images: Tensor) -> Tensor:
            output = network(self.preprocess(images))
            if isinstance(output, Tensor) and not self.convert:
                return output
            logits = logits_of(output)
            if logits is None:
                raise ValueError(f"the model returns a {type(output).__name__} without logits")
            return logits.to(_precision(logits, images))

        return scale_gradients(forward, x) if self.half and not training else forward(x)


class Adapted(ModelWrapper):
    """A model with its adapter."""

    def __init__(self, network: nn.Module, adapter: Adapter) -> None:
        super().__init__()
        self.network, self.adapter = network, adapter

    def forward(self, x: Tensor) -> Tensor:
        return self.adapter(self.network, x, training=self.training)

    def wrap(self, network: nn.Module) -> Adapted:
        """The same adapter around another network."""
        return Adapted(network, self.adapter)

    def preprocess(self, x: Tensor) -> Tensor:
        """The input that the wrapped network receives."""
        return self.adapter.preprocess(x)

    def extra_repr(self) -> str:
        return str(self.adapter)


def adapted(model: nn.Module, x: Tensor) -> nn.Module:
    """The model, with an adapter if it needs one for images like `x`."""
    if isinstance(model, ModelWrapper):
        inner = adapted(model.network, model.preprocess(x))
        return model if inner is model.network else model.wrap(inner)
    adapter = Adapter.of(model, x)
    return Adapted(model, adapter) if adapter else model


def checked_logits(model: nn.Module, x: Tensor) -> Tensor:
    """The logits of these images; raises unless the model takes them and returns logits."""
    with torch.no_grad(), seeded(x.device, 0, "check"):
        try:
            logits = model(x)
        except Exception as error:  # user code may raise anything
            raise ValueError(
                f"the model cannot take images of shape {tuple(x.shape[1:])} "
                f"({' '.join(str(error).split())})"
            ) from error
    if not isinstance(logits, Tensor) or logits.dim() != 2 or logits.shape[0] != len(x):
        actual = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise ValueError(
            f"the model gives {actual} for {len(x)} images: must be ({len(x)}, classes)"
        )
    return logits


def lies_contiguous(model: nn.Module) -> bool:
    """Whether any part of the model needs contiguous images."""
    return any(
        isinstance(module, Adapted) and module.adapter.contiguous for module in model.modules()
    )


def computes_in_half(model: nn.Module) -> bool:
    """Whether any part of the model scales gradients for float16."""
    return any(isinstance(module, Adapted) and module.adapter.half for module in model.modules())


def logits_of(output: Any) -> Tensor | None:
    """The logits in a model's output: the output itself, its `logits` attribute or key, or the
    first item of a sequence; None if there are none."""
    if isinstance(output, Tensor):
        return output
    logits = getattr(output, LOGITS, None)
    if logits is None and isinstance(output, Mapping):
        logits = output.get(LOGITS)
    if logits is None and isinstance(output, tuple | list) and output:
        logits = output[0]
    return logits if isinstance(logits, Tensor) else None


def _restrided(x: Tensor) -> Tensor:
    """Contiguous with canonical strides, which torch checks even for dimensions of size 1."""
    return x.flatten(1).unflatten(1, x.shape[1:])  # type: ignore[no-any-return]


def _precision(logits: Tensor, images: Tensor) -> torch.dtype:
    """The dtype of the loss: double precision is kept, half precision is not enough."""
    return torch.promote_types(logits.dtype, images.dtype)


def _output_or_none(network: nn.Module, x: Tensor) -> Any:
    """The output of the network, or None if it fails."""
    try:
        return network(x)
    except torch.OutOfMemoryError:  # not the model's fault
        raise
    except Exception:  # user code may raise anything
        return None


@contextmanager
def _outputs_in_half(model: nn.Module) -> Iterator[list[nn.Module]]:
    """Collect the modules with float16 outputs: logits may be float32 although the gradients pass
    through float16."""
    modules: list[nn.Module] = []

    def record(module: nn.Module, _: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.dtype == torch.float16:
            modules.append(module)

    handles = [module.register_forward_hook(record) for module in model.modules()]
    try:
        yield modules
    finally:
        for handle in handles:
            handle.remove()


def _dtype(model: nn.Module) -> torch.dtype | None:
    """The dtype of the first floating-point parameter or buffer."""
    tensors = (*model.parameters(), *model.buffers())
    return next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), None)
