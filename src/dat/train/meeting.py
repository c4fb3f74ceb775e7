"""Where a trainer's workers meet: how each computes, what they send, and what a step needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dat.attacks import PGD, Attack
from dat.comm import Exchange, Norms, ShardedExchange, Team
from dat.compute import Engine, blocks_of
from dat.rng import seeded
from dat.train.agreement import check_data
from dat.train.carried import Carried
from dat.train.sharding import state_of
from dat.train.step import Worker

if TYPE_CHECKING:
    from dat.train.trainer import Trainer


def meet(trainer: Trainer) -> Worker:
    """This worker among the others; from here on all have the first one's weights."""
    world = trainer.world
    engine = _engine(trainer)
    exchange = _sharded(trainer) if trainer.sharded else _exchange(trainer)
    team = Team(world, trainer.team, exchange.ledger)
    check_data(trainer.supply, trainer.batch, world)
    return Worker(
        supply=trainer.supply,
        threat=trainer.threat,
        attack=trainer.attack,
        objective=trainer.objective,
        exchange=exchange,
        engine=engine,
        team=team,
        norms=Norms.of(trainer.bn, team, world=world, ledger=exchange.ledger, group=trainer.ghost),
        optimizer=trainer.minimiser,
        seed=trainer.seed,
        augmentation=trainer.augmentation,
        attack_bn=trainer.attack_bn,
        weights=trainer.weight_attack,
        growth=trainer.growth,
        carried=carried(trainer, trainer.attack),
        stopping=trainer.stopping,
    )


def carried(trainer: Trainer, attack: Attack) -> Carried | None:
    """The perturbations that an attack keeps, if it keeps any."""
    return Carried.of(attack, trainer.supply.sources, trainer.threat, trainer.world.device)


def _engine(trainer: Trainer) -> Engine:
    if trainer.sharded:
        return Engine.of_sharded(trainer.model, trainer.compute)
    device, attack = trainer.world.device, trainer.attack
    some = trainer.supply.sources[0].data
    images, _ = some.batch(torch.arange(min(8, len(some))), device)
    work = trainer.epochs * trainer.samples * attack.cost() // trainer.world.size
    if isinstance(attack, PGD) and attack.patience is not None:
        work = 0  # nothing is compiled for batches of all sizes
    with seeded(device, trainer.seed, "engine"):
        return Engine.of(trainer.model, trainer.compute, images, work)


def _exchange(trainer: Trainer) -> Exchange:
    return Exchange(
        trainer.model,
        trainer.world,
        quantizer=trainer.quantizer,
        protocol=trainer.protocol,
        seed=trainer.seed,
        norms_meet=trainer.bn == "sync",
    )


def _sharded(trainer: Trainer) -> ShardedExchange:
    """Cut the model up; the optimizer's moments are those of parts as well."""
    assert trainer.shard is not None
    exchange = ShardedExchange(
        trainer.model,
        trainer.world,
        size=trainer.shard,
        blocks=blocks_of(trainer.model),
        gather=trainer.gather,
        quantizer=trainer.quantizer,
        seed=trainer.seed,
        norms_meet=trainer.bn == "sync",
    )
    trainer.minimise(exchange.shards)
    trainer.best.copied = lambda model: exchange.parted(state_of(model))
    return exchange
