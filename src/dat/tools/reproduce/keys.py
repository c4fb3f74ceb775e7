"""The key of a run: a hash of everything that decides its outcome, and the name of its folder.

`KEYED` is a snapshot of the settings that all keys contain, whatever their values. A setting that
was added later is part of a key only where it differs from its default, so a new setting keeps the
runs made before it, and nothing has to be listed. A run's recipe spells these later settings out:
if the default of one changes, a run made under the old default is not mistaken for a new one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from dat.config.schema import RunConfig, merge

KEYED = {
    "": "about seed",
    "data": "name holdout parts weigh_by size resize corrupt test_share memory loaders labels "
    "unlabelled pseudo_labels confidence unlabelled_share unlabelled_weight epoch_by augmentation "
    "cutout randaugment magnitude",
    "model": "name width",
    "finetune": "weights classes channels size layers decay",
    "threat": "norm eps",
    "attack": "name",
    "attack fgsm": "step_ratio random_start",
    "attack n-fgsm": "noise step_ratio",
    "attack pgd": "steps step_size random_start restarts loss carry reset patience",
    "attack free": "replays step_ratio random_start",
    "attack yopo": "steps inner step_size random_start",
    "attack apgd": "steps loss eot",
    "attack apgd-t": "targets first steps eot",
    "attack fab": "targets first steps overshoot pull retreat",
    "attack square": "queries share loss",
    "objective": "name",
    "objective at": "clean_weight label_smoothing",
    "objective trades": "beta label_smoothing",
    "objective mart": "beta",
    "objective alp": "clean_weight pairing_weight",
    "objective gradalign": "align_weight",
    "objective smooth": "sigma copies votes update",
    "objective stability": "sigma copies votes stability_weight",
    "optimizer": "name",
    "optimizer lamb": "lr weight_decay preset betas zeta c_l c_u debias decay_1d adapt_1d",
    "optimizer lars": "lr weight_decay preset momentum c_l c_u trust_coefficient decay_1d adapt_1d",
    "optimizer sgd": "lr weight_decay momentum nesterov decay_1d",
    "optimizer lsgd": "lr weight_decay momentum nesterov decay_1d base_batch",
    "schedule": "name",
    "schedule piecewise": "warmup warmup_by milestones factor",
    "schedule cosine": "warmup warmup_by final",
    "schedule cyclic": "warmup warmup_by peak_at",
    "schedule constant": "warmup warmup_by",
    "train": "epochs batch team attack_bn awp awp_warmup sentinel rescue guard save_every "
    "save_keep ema select_by select_steps select_every",
    "evaluate": "attacks precision images batch",
    "quantizer": "name",
    "quantizer bucket": "bits rounding error_feedback dense_below dense_vectors size norm",
    "quantizer tensor": "bits rounding error_feedback dense_below dense_vectors",
    "quantizer vector": "bits rounding error_feedback dense_below dense_vectors",
    "protocol": "name",
    "protocol server": "rank",
    "protocol hybrid": "inside",
    "compute": "layout fold compile precision pieces kernels recompute",
    "comm": "device backend threads deterministic allocator pin timeout",
}
"""Settings that are in every key, by group and by component. Frozen: do not add new settings."""
FIRST_DEFAULTS: dict[str, Any] = {
    "train.bn": "local",
    "train.ghost": 32,
    "train.grow": [],
    "train.grow_by": 2,
    "comm.shard": None,
    "comm.gather": "attack",
}
"""The value at which a later setting is left out of keys, if that must not follow its default. Only
a changed default needs a line here, with the old value: runs that predate the setting have it."""
IGNORED = ("train.log", "evaluate.report")
"""Settings that change no result."""


def keyed_settings(config: RunConfig, stated: Collection[str] = ()) -> dict[str, Any]:
    """The settings that are part of a run's key, in their groups; later ones that are `stated` are
    part of it even at their defaults."""
    values = config.dump()
    for path, value, is_later, default in _settings(config):
        left_out = is_later and value == default and path not in stated
        if left_out or path in IGNORED:
            group, _, name = path.rpartition(".")
            del (values[group] if group else values)[name]
    return {name: value for name, value in values.items() if value != {}}


def later_settings(config: RunConfig) -> dict[str, Any]:
    """The settings that came after `KEYED`, in their groups."""
    later: dict[str, Any] = {}
    for path, value, is_later, _ in _settings(config):
        if is_later and path not in FIRST_DEFAULTS and path not in IGNORED:
            group, _, name = path.rpartition(".")
            (later.setdefault(group, {}) if group else later)[name] = value
    return later


def differences(recipe: Mapping[str, Any], later: Mapping[str, Any]) -> set[str]:
    """The later settings that have other values in a run's recipe. If one is missing there, the run
    predates it."""
    saved = dict(flat(merge({}, recipe)))
    return {path for path, value in flat(later) if saved.get(path, value) != value}


def flat(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Nested settings as dotted names with their values; the arguments of a network are one."""
    for key, value in values.items():
        path = f"{above}{key}"
        if isinstance(value, dict) and path != "model.args":
            yield from flat(value, f"{path}.")
        else:
            yield path, value


def _settings(config: RunConfig) -> Iterator[tuple[str, Any, bool, Any]]:
    """Every setting as its dotted name and its value; whether it is a later one, and the value at
    which that is left out."""
    values = dict(flat(config.dump()))
    for path, _, field, _ in config.entries():
        group, _, name = path.rpartition(".")
        component = f"{group} {values.get(f'{group}.name')}"
        known = f"{KEYED.get(group, '')} {KEYED.get(component, '')}".split()
        default = field.metadata.get("default", field.default)
        default = list(default) if isinstance(default, tuple) else default
        yield path, values[path], name not in known, FIRST_DEFAULTS.get(path, default)
