"""The loop around Algorithm 1: epochs, learning rate, checkpoints by held-out robust accuracy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from dat.attacks import PGD, Attack, Free
from dat.comm import Buckets, Default, Protocol, Quantizer, ShardedExchange, Shards, World
from dat.compute import Compute
from dat.data import Augmentation, Dealing, ImageData, Mix, Parts, supply
from dat.evaluation import Accuracy
from dat.objectives import Adversarial, Objective
from dat.optim import EMA, LAMB, Layerwise, OuterOracle, Piecewise, Schedule, set_rate
from dat.rng import seeded
from dat.stages import watched
from dat.threat import ThreatModel
from dat.train.agreement import check_replicas
from dat.train.checks import check
from dat.train.growth import Growth
from dat.train.meeting import carried, meet
from dat.train.perturbation import WeightAttack
from dat.train.records import EpochRecord, Listener, Tally
from dat.train.resume import Resumption, Saver
from dat.train.selection import Best, HeldOut
from dat.train.sentinel import Collapse, Moment, Sentinel, Watch
from dat.train.sharding import broken, parts_alike, state_of
from dat.train.step import ADVICE, NotFinite, StepReport, dat_step, never
from dat.train.timing import Split


@dataclass(kw_only=True)
class Trainer:
    """Trains `model` on the workers of `world`; every worker makes one and calls `fit`."""

    model: nn.Module
    data: ImageData | Parts
    """The whole training set, or its parts; the worker then keeps only what it owns."""
    unlabelled: ImageData | None = None
    """More images, with pseudo-labels or without any; the worker keeps a part of them as well."""
    mix: Mix = field(default_factory=Mix)
    """How they go into a batch."""
    holdout: ImageData | Parts | None = None
    """Held-out training images by whose RA the best weights are chosen; none: the last are."""
    threat: ThreatModel = field(default_factory=ThreatModel)
    attack: Attack = field(default_factory=PGD)
    objective: Objective = field(default_factory=Adversarial)
    optimizer: OuterOracle | Callable[[nn.Module], torch.optim.Optimizer] = field(
        default_factory=LAMB
    )
    schedule: Schedule = field(default_factory=Piecewise)
    epochs: int = 30
    batch: int = 256
    """The global batch, over all workers."""
    growth: Growth = field(default_factory=Growth)
    """From when on an update takes several of them."""
    team: int = 1
    """Workers that have the same images and share out an image's noisy copies."""
    parts: int | None = None
    """How many parts the data is split into; none: `dat.data.default_parts`."""
    augmentation: Augmentation = field(default_factory=Augmentation)
    loaders: int | None = None
    """Processes that decode pictures; none: this worker's share of the cores."""
    attack_bn: str = "eval"
    bn: str = "local"
    """Over which images batch normalisation goes: those of a worker's share, `sync`: of all
    workers' shares, or `ghost`: of a share, `ghost` at a time."""
    ghost: int = 32
    compute: Compute = field(default_factory=Compute)
    """How the network is computed on this machine."""
    selection: Attack = field(default_factory=PGD)
    """The attack on the held-out images."""
    select_by: str = "ra"
    """What is highest at the best weights: robust accuracy, or `ta` for standard training."""
    select_every: int = 1
    """Epochs from one measurement on the held-out images to the next; the last one is measured."""
    ema: float = 0.0
    sentinel: Sentinel = field(default_factory=Sentinel)
    """Watches single-step training for a collapse."""
    weight_attack: WeightAttack = field(default_factory=WeightAttack)
    """AWP, if it is asked for."""
    quantizer: Quantizer = field(default_factory=Buckets)
    """In how many bits the gradient is sent; 32 unless another is asked for."""
    protocol: Protocol = field(default_factory=Default)
    """Who sends what to whom."""
    shard: int | None = None
    """Over how many neighbouring workers the weights are sharded; none: every worker has all."""
    gather: str = "attack"
    """How long sharded weights stay gathered: for an `attack`, or a `block` at a time."""
    seed: int = 0
    world: World = field(default_factory=World.join)
    listeners: Sequence[Listener] = ()
    guard: str = "stop"
    """When a loss or gradient is not finite: `stop`, `skip` the step, or `rollback` to the last
    checkpoint and leave the step out then."""
    guard_most: int = 10
    """So many steps may be left out."""
    saver: Saver | None = None
    """Writes checkpoints; every worker has one, or none."""
    stopping: Callable[[], bool] = never
    """Whether this worker was asked to stop; all of them then do, after the step."""

    def __post_init__(self) -> None:
        check(self)
        if not self.sharded:  # else a block comes to the device when it is cut up
            self.model.to(self.world.device)
        self.samples = len(self.data) + len(self.unlabelled or ())
        dealing = Dealing(
            batch=self.batch,
            parts=self.parts,
            workers=self.world.size // self.team,
            place=self.world.rank // self.team,
            seed=self.seed,
            loaders=torch.get_num_threads() if self.loaders is None else self.loaders,
            random_crops=self.augmentation.kind == "resized-crop",
        )
        self.supply = supply(self.data, self.unlabelled, self.mix, dealing)
        self.growth.check(self.epochs, self.batch, self.supply.steps)
        judging = {"threat": self.threat, "attack": self.selection, "seed": self.seed}
        held = self.holdout
        self._held = None if held is None else HeldOut.of(held, self.world, **judging)
        self.data, *rest = (source.data for source in self.supply.sources)
        self.unlabelled = rest[0] if rest else None
        if not self.sharded:
            self.minimise()
        self._averaged: EMA | None = None
        self.best = Best(self.select_by)
        self.watch = Watch(self.sentinel)
        self.records: list[EpochRecord] = []
        """The epochs that are over."""
        self.tally = Tally()
        """What the current one has come to so far."""
        self._split = Split(self.world.device)
        self.updates = 0
        """Outer steps that were taken."""
        self.left_out: list[list[int]] = []
        """Steps, by epoch and number, that broke and were left out."""
        self.discarded_seconds = 0.0
        """Training time of epochs that were undone."""
        self._wholes: dict[str, nn.Module] = {}

    @property
    def sharded(self) -> bool:
        """Whether a worker has but a part of the model."""
        return self.shard is not None and self.shard > 1

    def minimise(self, shards: Shards | None = None) -> None:
        """Make the optimizer of the parameters as they are, whole or cut up."""
        if isinstance(self.optimizer, OuterOracle):
            self.minimiser = self.optimizer(self.model, batch=self.batch)
        else:
            self.minimiser = self.optimizer(self.model)
        if isinstance(self.minimiser, Layerwise):
            self.minimiser.shards = shards
        for group in self.minimiser.param_groups:
            group.setdefault("initial_lr", group["lr"])

    def trust_ratios(self) -> dict[str, float]:
        """LALR's ratio of each adapted layer in the last step, by its name."""
        if not isinstance(self.minimiser, Layerwise):
            return {}
        names = {id(p): name for name, p in self.model.named_parameters()}
        return {names[id(p)]: float(ratio) for p, ratio in self.minimiser.trust_ratios()}

    def _connect(self) -> None:
        """Meet the other workers."""
        self.worker = meet(self)
        if self.ema:
            exchange = self.worker.exchange
            cut = exchange.parted() if isinstance(exchange, ShardedExchange) else self.model
            self._averaged = EMA(cut, self.ema)

    @property
    def steps(self) -> int:
        """Updates in the current epoch."""
        return self.steps_in(len(self.records))

    def steps_in(self, epoch: int) -> int:
        """Updates in an epoch, counted from 0. Batches that do not make up a whole update are left
        out, other ones in every epoch."""
        attack = self.worker.attack if hasattr(self, "worker") else self.attack
        updates = self.supply.steps // self.growth.factor(epoch)
        return updates * (attack.replays if isinstance(attack, Free) else 1)

    def batch_in(self, epoch: int) -> int:
        """Images in an update of an epoch, counted from 0."""
        return self.batch * self.growth.factor(epoch)

    def fit(self, resume: Resumption | None = None) -> list[EpochRecord]:
        """Train; afterwards `model` holds the last weights and `best_model` the best.

        What is resumed goes on where it was, and ends with the same bits.
        """
        self._connect()
        if resume:
            if resume.updates:
                self._rehearse()
            resume.restore(self)
        self._tell("started")
        records = self.records
        try:
            while len(records) < self.epochs:
                epoch = len(records)
                trained = self._train(epoch)
                if trained is None:
                    continue
                self._gather()
                measured = self._measured(epoch)
                collapse = self._watch(epoch, measured)
                if collapse and collapse.back_to is not None:
                    self.discarded_seconds += trained["seconds"]
                    self._go_back(collapse, collapse.back_to)
                    self.tally = Tally()
                    if collapse.action == "stop":
                        break
                    continue
                record = EpochRecord(
                    epoch=epoch + 1,
                    batch=self.batch_in(epoch),
                    **trained,
                    **self._keep(epoch, measured),
                    trust_ratios=self.trust_ratios() or None,
                )
                records.append(record)
                self.tally = Tally()
                self._tell("epoch_ended", record)
                self._wholes = {}
                if self.saver:
                    self.saver.epoch_ended(self)
            self.worker.exchange.close()
        finally:
            self.supply.close()
            if self.saver:
                self.saver.close()
            self._tell("ended")
        return records

    @property
    def _moment(self) -> Moment:
        return self.model, self.worker.optimizer, self._averaged

    def _watch(self, epoch: int, measured: dict[str, Accuracy | None]) -> Collapse | None:
        """Look for catastrophic overfitting; all workers see the same."""
        if self._held is None or not self.sentinel.watches(self.worker.attack):
            return None
        accuracy = measured.get("")
        if accuracy is None:
            few = self._held.some(self.sentinel.images)
            accuracy = few.accuracy(self.objective.deployed(self.whole_models()[""]))
        collapse = self.watch.look(epoch + 1, accuracy.ra, self._moment)
        if collapse:
            self._tell("collapsed", collapse)
        return collapse

    def _go_back(self, collapse: Collapse, to: int) -> None:
        """To the last good epoch, to stop there or to go on with another attack."""
        self.watch.go_back(self._moment)
        self.worker.exchange.forget()
        self._gather()
        if collapse.action == "rescue":
            self.use_attack(self.sentinel.rescue)
        elif not self.best.found:  # nothing was measured so far
            self._keep(to - 1, self._accuracies())

    def use_attack(self, attack: Attack) -> None:
        """Go on with another attack."""
        self.worker = replace(self.worker, attack=attack, carried=carried(self, attack))

    def models(self) -> dict[str, nn.Module]:
        """The raw weights and, where they are kept, the averaged ones, by file-name prefix."""
        averaged = {"ema-": self._averaged.module} if self._averaged else {}
        return {"": self.model} | averaged

    def whole_models(self) -> dict[str, nn.Module]:
        """The same, each in whole: of a sharded model copies, while an epoch ends."""
        return self._wholes or self.models()

    def _gather(self) -> None:
        """Let every worker have the whole weights of a sharded model for a while."""
        if self.sharded:
            self._wholes = {name: self._whole(model) for name, model in self.models().items()}

    def _whole(self, model: nn.Module) -> nn.Module:
        exchange = self.worker.exchange
        return exchange.whole(state_of(model)) if isinstance(exchange, ShardedExchange) else model

    def best_model(self, name: str = "") -> nn.Module:
        """The weights that did best on the held-out images; if the model is sharded, a whole copy,
        which all workers ask for together."""
        return self._whole(self.best.models[name])

    def best_epoch(self, name: str = "") -> int:
        return self.best.found[name][1]

    def best_accuracy(self, name: str = "") -> Accuracy | None:
        """What they did there; none without held-out images."""
        return self.best.found[name][0]

    def _train(self, epoch: int) -> dict[str, Any] | None:
        """The steps of an epoch, and what they came to; none if all of it was undone."""
        self.model.train()
        tally, steps = self.tally, self.steps_in(epoch)
        if tally.step == 0 and epoch:
            with seeded(self.world.device, self.seed, "engine"):
                self.worker = replace(self.worker, engine=self.worker.engine.checked())
        tally.start()
        while tally.step < steps:
            step = tally.step
            factor = self.schedule(epoch + step / steps, self.epochs)
            set_rate(self.worker.optimizer, factor)
            report = self._step(epoch, step)
            if report is None:
                if len(self.records) != epoch:  # undone to an earlier one
                    return None
                tally = self.tally
                continue
            if self._averaged:
                self._averaged.update(self.model)
            self.updates += 1
            tally.add(report)
            self._tell("step_ended", epoch, report)
            if self.saver:
                self.saver.step_ended(self, stop=report.stop)
        self.read_times()
        costs = tally.costs(self.world, steps)
        self._check_weights(epoch)
        return {
            "lr": self.worker.optimizer.param_groups[0]["lr"],
            "loss": tally.loss / max(tally.taken, 1),
            "train_ra": tally.right / max(tally.taken, 1),
            **costs,
        }

    def _step(self, epoch: int, step: int) -> StepReport | None:
        """A step; none if it broke and was left out, or undone with those before it."""
        if [epoch, step] in self.left_out:
            self.tally.step += 1
            return None
        buffers = [(it, it.clone()) for it in self.model.buffers()] if self.guard != "stop" else []
        try:
            chance = (self.seed, "model", epoch, step, self.world.rank)
            with seeded(self.world.device, *chance), watched(self._split):
                return dat_step(self.worker, epoch, step)
        except NotFinite as error:
            if self.guard == "stop" or len(self.left_out) >= self.guard_most:
                raise
            self.left_out.append([epoch, step])
            self._tell("left_out_step", str(error), len(self.left_out))
        self.worker.exchange.ledger.close()
        self.worker.exchange.forget()
        if self.guard == "rollback" and self.saver:
            self.saver.go_back(self)
        else:
            for buffer, before in buffers:
                buffer.copy_(before)
            self.tally.step += 1
        return None

    def _rehearse(self) -> None:
        """A step that changes nothing, before the state of a checkpoint is loaded. DDP orders its
        buckets after the first backward pass; the sums of a step would else be rounded otherwise
        than in a run that was never interrupted."""
        self.model.train()
        batch = self.worker.draw(0, 0)
        outcome = self.worker.forward(batch, batch.x.clone().requires_grad_(True))
        settle = self.worker.exchange.share(torch.zeros(1, device=self.world.device))
        self.worker.backward(outcome, batch)
        settle()
        self.worker.optimizer.zero_grad()
        self.worker.exchange.forget()
        self.worker.exchange.ledger.close()

    def read_times(self) -> None:
        """Bring the tally's times up to the last step; on CUDA that waits for it."""
        self.tally.add_times(self._split.read())

    def _check_weights(self, epoch: int) -> None:
        """No broken weights are ever measured or saved; replicas are equal, so all see the same."""
        exchange = self.worker.exchange
        if (name := broken(exchange, self.model)) is not None:
            raise NotFinite(f"epoch {epoch + 1}: {name} is not finite; {ADVICE}")
        check_replicas(self.model, self.world, parts_alike(exchange))

    def _measured(self, epoch: int) -> dict[str, Accuracy | None]:
        """Accuracies on the held-out images, in the epochs in which they are measured."""
        last = epoch + 1 == self.epochs
        if self._held is not None and (epoch + 1) % self.select_every and not last:
            return {}
        return self._accuracies()

    def _accuracies(self) -> dict[str, Accuracy | None]:
        """Of the raw weights and of the averaged ones; none without held-out images."""
        if self._held is None:
            return dict.fromkeys(self.models())
        deployed = self.objective.deployed
        found = self.whole_models().items()
        return {name: self._held.accuracy(deployed(it)) for name, it in found}

    def _keep(self, epoch: int, measured: dict[str, Accuracy | None]) -> dict[str, float]:
        """Keep the best weights; what was measured, as a record has it."""
        found: dict[str, float] = {}
        for name, accuracy in measured.items():
            model = self.models()[name]
            if self.best.consider(name, model, accuracy, epoch + 1):
                self._tell("best_found", name, self.whole_models()[name])
            if accuracy is not None:
                where = name.rstrip("-") or "holdout"
                found |= {f"{where}_ta": accuracy.ta, f"{where}_ra": accuracy.ra}
        return found

    def _tell(self, event: str, *details: object) -> None:
        for listener in self.listeners:
            getattr(listener, event)(self, *details)
