"""Former arguments of `Trainer`, and where they belong now."""

from __future__ import annotations

from collections.abc import Iterable

DATA = "data=TrainingData(labelled=..., {}=...)"
EXCHANGE = "exchange=GradientExchange({}=...)"
SHARDING = "exchange=GradientExchange(sharding=Sharding({}=...))"
OPTIONS = "options=Options({}=...)"
MOVED = {
    **{
        name: DATA.format(name)
        for name in ("holdout", "unlabelled", "mix", "augmentation", "parts", "loaders")
    },
    "quantizer": EXCHANGE.format("quantizer"),
    "protocol": EXCHANGE.format("protocol"),
    "shard": SHARDING.format("size"),
    "gather": SHARDING.format("gather"),
    "growth": OPTIONS.format("batch_schedule"),
    "team": OPTIONS.format("subgroup"),
    "attack_bn": OPTIONS.format("attack_mode"),
    "bn": OPTIONS.format("batch_norm"),
    "ghost": OPTIONS.format("batch_norm"),
    "weight_attack": OPTIONS.format("awp"),
    "sentinel": OPTIONS.format("overfitting_monitor"),
    "guard": OPTIONS.format("guard"),
    "guard_most": OPTIONS.format("guard"),
    "ema": OPTIONS.format("averaging"),
    "selection": OPTIONS.format("selection"),
    "select_by": OPTIONS.format("selection"),
    "select_every": OPTIONS.format("selection"),
    "listeners": "callbacks=[...]",
    "saver": "callbacks=[..., Checkpointer(...)]",
    "stopping": "callbacks=[..., Checkpointer(..., stopping=...)]",
}


def refuse_moved(given: Iterable[str]) -> None:
    """Refuse former arguments with a TypeError that names the new place."""
    for name in given:
        if name in MOVED:
            raise TypeError(f"Trainer({name}=...) has moved: use {MOVED[name]}")
