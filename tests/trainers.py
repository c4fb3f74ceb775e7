"""Trainers and workers for tests, from flat keywords."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from dat.attacks import Attack
from dat.core.threat import ThreatModel
from dat.data import Batches
from dat.distributed import BaseExchange, WorkerSubgroup
from dat.train import (
    GradientExchange,
    Option,
    Options,
    Part,
    Sharding,
    Trainer,
    TrainingData,
    Worker,
)
from dat.train.batch_schedule import BatchSchedule
from dat.train.inner import inner_class
from dat.train.part import Parts
from dat.train.sampling import Sampler

DATA = {field.name for field in dataclasses.fields(TrainingData)} - {"labelled"}
EXCHANGE = {"quantizer", "protocol"}
SHARDING = {"shard", "gather"}
KEYS = set(Options.fields_by_key())
OPTIONS = {field.name for field in dataclasses.fields(Options)}


def make_trainer(**given: Any) -> Trainer:
    """A trainer. Besides its own, it takes the arguments of what it holds: those of `TrainingData`
    and `GradientExchange`, options by their keys in a recipe (`ema=0.9`), or as they are
    (`selection=Selection(by="ta")`)."""

    def take(names: set[str]) -> dict[str, Any]:
        return {name: given.pop(name) for name in sorted(names & given.keys())}

    as_they_are = {name for name in OPTIONS if isinstance(given.get(name), Option)}
    built = take(as_they_are)

    data = TrainingData(labelled=given.pop("data"), **take(DATA))
    exchange = GradientExchange(sharding=Sharding.read(take(SHARDING)), **take(EXCHANGE))
    options = dataclasses.replace(Options.read(take(KEYS), "train"), **built)
    return Trainer(data=data, exchange=exchange, options=options, **given)


def make_worker(
    *,
    batches: Batches,
    threat: ThreatModel,
    attack: Attack,
    exchange: BaseExchange,
    subgroup: WorkerSubgroup,
    attack_bn: str = "eval",
    schedule: BatchSchedule | None = None,
    parts: Iterable[Part] = (),
    **rest: Any,
) -> Worker:
    """A worker by itself, without a trainer."""
    sampler = Sampler(
        batches=batches,
        threat=threat,
        subgroup=subgroup,
        device=exchange.world.device,
        schedule=schedule or BatchSchedule(),
        replays=attack.batch_replays,
    )
    inner = inner_class(attack)(attack, threat, mode=attack_bn)
    inner.allocate(batches.sources, exchange.world.device)
    return Worker(sampler=sampler, inner=inner, exchange=exchange, parts=Parts(parts), **rest)
