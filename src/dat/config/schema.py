"""RunConfig: all settings of a run, typed, documented and validated; saved with every run."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dat.attacks import ATTACKS, Attack
from dat.config.checks import ACROSS_GROUPS
from dat.config.groups import (
    CommConfig,
    DataConfig,
    EvaluateConfig,
    FinetuneConfig,
    ModelConfig,
    TrainConfig,
)
from dat.config.synonyms import SYNONYMS
from dat.core.settings import SettingError, Settings, component, parse_argument, section, setting
from dat.core.short_repr import short_repr
from dat.core.threat import ThreatModel
from dat.distributed import PROTOCOLS, QUANTIZERS, Protocol, Quantizer
from dat.models import MODELS, NAME_PATTERNS
from dat.objectives import OBJECTIVES, Objective
from dat.optim import OPTIMIZERS, SCHEDULES, OptimizerSettings, Schedule
from dat.train.engine import Compute

__all__ = [
    "COMPONENTS",
    "CommConfig",
    "DataConfig",
    "EvaluateConfig",
    "FinetuneConfig",
    "ModelConfig",
    "RunConfig",
    "TrainConfig",
    "merge",
    "parse_edits",
]


@dataclass(frozen=True, kw_only=True)
class RunConfig(Settings):
    """All settings of a run."""

    synonyms = SYNONYMS
    checks = ACROSS_GROUPS

    about: str = setting("", "one-line description of the run")
    seed: int = setting(0, "seed of all random numbers", ge=0)
    data: DataConfig = section(DataConfig, "what to train on")
    model: ModelConfig = section(ModelConfig, "what to train")
    finetune: FinetuneConfig = section(FinetuneConfig, "fine-tuning of a pre-trained network")
    threat: ThreatModel = section(ThreatModel, "what the adversary may do")
    attack: Attack = component(ATTACKS, "pgd", "the attack in training (inner maximization)")
    objective: Objective = component(OBJECTIVES, "at", "training loss: lambda * clean loss + phi")
    optimizer: OptimizerSettings = component(OPTIMIZERS, "lamb", "optimizer (outer minimization)")
    schedule: Schedule = component(SCHEDULES, "piecewise", "learning rate schedule")
    train: TrainConfig = section(TrainConfig, "length of training, batch size, options")
    evaluate: EvaluateConfig = section(EvaluateConfig, "evaluation of the trained model")
    quantizer: Quantizer = component(QUANTIZERS, "bucket", "wire format of gradients")
    protocol: Protocol = component(
        PROTOCOLS,
        "default",
        "how workers exchange gradients; default: dense at 32 bits, otherwise chunked",
    )
    compute: Compute = section(Compute, "layout, precision and compilation of the network")
    comm: CommConfig = section(CommConfig, "where the workers run and how they communicate")

    __repr__ = short_repr


COMPONENTS = {
    field.name: field.metadata["default"]
    for field in dataclasses.fields(RunConfig)
    if "registry" in field.metadata
}
"""The groups that hold a component, with the default component of each."""


DEFAULT_NAMES = {**COMPONENTS, "model": ModelConfig().name}


def merge(base: Mapping[str, Any], edits: Mapping[str, Any]) -> dict[str, Any]:
    """Override `base` with `edits`, group by group.

    An edit that selects another component drops the settings of the old one: the steps of PGD mean
    nothing to FGSM, and a learning rate tuned for LAMB does not suit SGD.
    """
    merged = dict(base)
    for key, edit in edits.items():
        group, edit = _expanded(key, base.get(key, {})), _expanded(key, edit)
        if isinstance(edit, Mapping) and isinstance(group, Mapping):
            name = group.get("name", DEFAULT_NAMES.get(key))
            replaced = edit.get("name", name) != name
            if key == "model":
                merged[key] = _merged_model(group, edit, replaced=replaced)
            else:
                merged[key] = dict(edit) if key in COMPONENTS and replaced else {**group, **edit}
        else:
            merged[key] = edit
    return merged


OF_ONE_NETWORK = ("args", "pretrained", "mean", "std")
"""Settings of `model` that mean nothing to another network; nor does the width to one whose name
says it, or of a library."""


def _merged_model(
    group: Mapping[str, Any], edit: Mapping[str, Any], *, replaced: bool
) -> dict[str, Any]:
    """The settings of a network; arguments are merged one by one."""
    name = edit.get("name")
    sized = any(re.fullmatch(form, str(name)) for _, form in NAME_PATTERNS) and name not in MODELS
    dropped = (*OF_ONE_NETWORK, "width") if sized else OF_ONE_NETWORK
    kept = {k: v for k, v in group.items() if not (replaced and k in dropped)}
    merged = {**kept, **edit}
    old, new = kept.get("args"), edit.get("args")
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        merged["args"] = {**old, **new}
    return merged


def _expanded(key: str, value: object) -> object:
    """Expand the short form: `attack: fgsm` means `attack: {name: fgsm}`."""
    named = key in COMPONENTS or key in ("data", "model")
    return {"name": value} if named and isinstance(value, str) else value


def parse_edits(arguments: Sequence[str]) -> dict[str, Any]:
    """Parse arguments like `attack.steps=5 seed=1` into nested groups."""
    edits: dict[str, Any] = {}
    for argument in arguments:
        path, equals, value = argument.partition("=")
        name, dot, key = path.partition(".")
        if not equals or not all(path.split(".")):
            raise SettingError(
                f"{argument!r}: settings are given as key=value, e.g. attack.steps=5"
            )
        edit: Any = {key: value} if dot else _expanded(name, value)
        inner, dot, argument_name = key.partition(".")
        if dot and (name, inner) == ("model", "args"):
            edit = {"args": {argument_name: _parsed(path, value)}}
        group = edits.get(name)
        if not isinstance(edit, dict) or not isinstance(group, dict):
            edits[name] = edit
        elif name == "model":
            edits[name] = _merged_model(group, edit, replaced=False)
        else:
            edits[name] = {**group, **edit}
    return edits


def _parsed(path: str, value: str) -> Any:
    try:
        return parse_argument(value)
    except ValueError as error:
        raise SettingError(f"{path} = {error}") from None
