"""Checks across settings; each yields its mistakes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from dat.attacks import ATTACKS
from dat.attacks.suites import suite
from dat.objectives import TRADES

if TYPE_CHECKING:
    from dat.config.groups import EvaluateConfig
    from dat.config.schema import RunConfig


def check_additional_images(config: RunConfig) -> Iterator[str]:
    data = config.data
    if data.unlabelled == "rest" and data.labels is None:
        yield "data.unlabelled = rest: requires data.labels"
    if data.synthetic is not None and data.unlabelled is not None:
        yield "data.synthetic: cannot be combined with data.unlabelled"
    if data.pseudo_labels is not None and data.unlabelled is None:
        yield "data.pseudo_labels: requires data.unlabelled, the images to label"


def check_monitor(config: RunConfig) -> Iterator[str]:
    monitor = config.train.options.overfitting_monitor
    if monitor.rewinds and config.data.holdout == 0:
        yield (
            f"train.sentinel = {monitor.action}: needs held-out images; set data.holdout above 0"
        )
    if monitor.action == "rescue" and type(config.attack) is ATTACKS[monitor.rescue]:
        yield (
            f"train.rescue = {monitor.rescue}: this is the attack that would collapse; use another"
        )


def check_random_start(config: RunConfig) -> Iterator[str]:
    if isinstance(config.objective, TRADES) and not getattr(config.attack, "random_start", True):
        yield (
            "attack.random_start = false: the KL divergence of objective trades has zero gradient "
            "at the clean image, so the attack cannot leave it; set it to true"
        )


def check_suites(config: EvaluateConfig) -> Iterator[str]:
    for name in config.attacks:
        try:
            suite(name)
        except ValueError as error:
            yield f"attacks: {error}"


def check_warmup(config: RunConfig) -> Iterator[str]:
    warmup, epochs = config.schedule.warmup, config.train.epochs
    if warmup > epochs:
        yield f"schedule.warmup = {warmup:g}: must be at most train.epochs = {epochs}"


ACROSS_GROUPS = (check_additional_images, check_monitor, check_random_start, check_warmup)
