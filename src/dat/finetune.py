"""From a pre-trained model to another task: what is taken over, and what network comes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dat.config import FinetuneConfig, RunConfig, merge
from dat.data import Splits, load
from dat.models import (
    Normalize,
    Resized,
    build_model,
    find_head,
    freeze,
    head_classes,
    normalized,
    rate_factors,
    replace_head,
)
from dat.optim import OuterOracle, scale_rates
from dat.train import fill, read_weights


@dataclass(frozen=True)
class Origin:
    """A pre-trained model: a run of ours, or a factory of the user's, and its weights."""

    name: str
    weights: Path
    run: RunConfig | None = None

    def edits(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The settings with those that the origin decides laid over them."""
        asked = FinetuneConfig.read(settings.get("finetune", {}), "finetune")
        if asked.weights is not None:
            raise ValueError(f"finetune.weights = {asked.weights}: give it as --weights")
        free = {"width": None} if self.run is None else {}
        wanted = free | dict(settings.get("model", {}))
        for key, value in wanted.items():
            if key not in free:
                raise ValueError(
                    f"model.{key} = {value}: the network is that of {self.name}; leave it out"
                )
        if not self.weights.is_file():
            raise ValueError(f"{self.weights}: no such weights")
        model = wanted | {"name": self.name} if self.run is None else self.run.model.dump()
        return merge(settings, {"model": model, "finetune": {"weights": str(self.weights)}})

    def resolution(self) -> int | None:
        """The pixels along a side of the images that it was trained on, as far as is known."""
        if self.run is None:
            return None
        if self.run.finetune.size is not None:
            return self.run.finetune.size
        try:
            return max(load(self.run.data.name, self.run.data.reading()).test.shape[1:])
        except (ValueError, OSError) as error:
            raise ValueError(
                f"{self.name}: cannot tell how large its images were ({error}); set finetune.size"
            ) from None


def settle(
    config: RunConfig, data: Splits, resolution: Callable[[], int | None] | None = None
) -> RunConfig:
    """Write down what the weights decide; images smaller than `resolution` are up-sampled to it,
    unless the config has a size."""
    tuned = config.finetune
    if tuned.weights is None:
        if tuned != FinetuneConfig():
            raise ValueError("finetune.weights = none: name weights to start from (dat finetune)")
        return config
    path = Path(tuned.weights).resolve()
    state = read_weights(path)
    part = _part(_whole(config, data), state)
    name, head = find_head(part)
    rows = state.get(f"{name}.weight")
    known = head_classes(head) if rows is None else len(rows)
    channels = tuned.channels or _channels(part, state) or data.test.channels
    size = tuned.size
    if size is None and resolution is not None:
        size = resolution()
        size = size if size is not None and size > max(data.test.shape[1:]) else None
    tuned = replace(
        tuned, weights=str(path), classes=tuned.classes or known, channels=channels, size=size
    )
    _check_images(tuned, data)
    return replace(config, finetune=tuned)


def finetuned(config: RunConfig, data: Splits, *, start: bool) -> nn.Module:
    """The pre-trained network with a head for this data, after `settle`.

    To `start` training it has the pre-trained weights, and the layers that do not learn are frozen.
    Else no file is needed: the run's own weights are still to come.
    """
    whole, tuned = _whole(config, data), config.finetune
    if start:
        path = Path(str(tuned.weights))
        state = read_weights(path)
        fill(_part(whole, state), state, path)
    replace_head(whole, data.test.classes, seed=config.seed)
    if start:
        freeze(_bare(whole), tuned.layers)
    return whole


def outer_oracle(
    config: RunConfig,
) -> OuterOracle | Callable[[nn.Module], torch.optim.Optimizer]:
    """The config's optimizer, with layer-wise rates where they are asked for."""
    if config.finetune.decay == 1.0:
        return config.optimizer

    def layered(model: nn.Module) -> torch.optim.Optimizer:
        factors = rate_factors(model, config.finetune.decay)
        return scale_rates(config.optimizer(model, batch=config.train.batch), factors)

    return layered


def _whole(config: RunConfig, data: Splits) -> Resized:
    """The network as it was pre-trained, behind a normalisation that still does nothing: ours is in
    the weights, and a model of the user's sees to it itself."""
    tuned = config.finetune
    classes = tuned.classes or data.test.classes
    channels = tuned.channels or data.test.channels
    net = build_model(
        config.model.name, classes, channels=channels, width=config.model.width, seed=config.seed
    )
    if head_classes(find_head(net)[1]) != classes:  # a factory with a number of its own
        net = replace_head(net, classes, seed=config.seed)
    model = normalized(net, [0.0] * channels, [1.0] * channels)
    return Resized(model, tuned.size, channels=channels)


def _bare(whole: Resized) -> nn.Module:
    return whole.net.get_submodule("net")


def _part(whole: Resized, state: Mapping[str, Tensor]) -> nn.Module:
    """Whose weights these are: the bare network's, ours with the normalisation, or those of a
    fine-tuned run; the one that has most of the names."""
    parts = (_bare(whole), whole.net, whole)
    return max(parts, key=lambda part: len(part.state_dict().keys() & state.keys()))


def _channels(part: nn.Module, state: Mapping[str, Tensor]) -> int | None:
    """The channels of the images that these are the weights for."""
    for name, module in part.named_modules():
        if isinstance(module, Normalize) and f"{name}.mean" in state:
            return len(state[f"{name}.mean"])
        if isinstance(module, nn.Conv2d) and f"{name}.weight" in state:
            return state[f"{name}.weight"].shape[1] * module.groups
    return None


def _check_images(tuned: FinetuneConfig, data: Splits) -> None:
    given, height, width = data.test.shape
    if given not in (1, tuned.channels):
        raise ValueError(
            f"finetune.channels = {tuned.channels}: the images have {given}: must be {given}; only "
            "grey images are repeated"
        )
    if tuned.size is not None and tuned.size < max(height, width):
        raise ValueError(
            f"finetune.size = {tuned.size}: the images are {height} x {width}: must be at least "
            f"{max(height, width)}, or none"
        )
