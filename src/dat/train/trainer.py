"""The training loop around Algorithm 1: epochs, learning rate, and the hooks of the options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from dat.attacks import PGD, Attack
from dat.core import devices
from dat.core.mistakes import Mistakes
from dat.core.rng import seeded
from dat.core.short_repr import short_repr
from dat.core.threat import ThreatModel
from dat.core.tracing import watched
from dat.data import ImageData, Partitions, Stream
from dat.distributed import WorkerSubgroup, World
from dat.evaluation import Accuracy
from dat.objectives import Adversarial, Objective
from dat.optim import LAMBSettings, Layerwise, Piecewise, Schedule, set_rate
from dat.train.callbacks import Callback
from dat.train.checkpointer import Checkpoint, Checkpointer
from dat.train.consistency import check_data, check_replicas
from dat.train.data import TrainingData
from dat.train.engine import Compute, Engine
from dat.train.errors import ADVICE, NotFinite
from dat.train.exchange import ErrorFeedback, GradientExchange
from dat.train.inner import InnerMaximization, inner_class
from dat.train.moved import refuse_moved
from dat.train.optimizer import TrainerOptimizer, connect_optimizer, make_optimizer
from dat.train.options import Options
from dat.train.overfitting_monitor import Collapse, RobustnessHistory
from dat.train.part import EpochEnd, Parts
from dat.train.records import EpochRecord, EpochTally
from dat.train.sampling import Sampler
from dat.train.selection import BestWeights
from dat.train.sharding import first_not_finite
from dat.train.step import StepReport, dat_step
from dat.train.timing import StepTimer
from dat.train.worker import Worker


@dataclass(kw_only=True)
class Trainer:
    """Trains `model` on the workers of `world`; every worker creates one and calls `fit`."""

    model: nn.Module
    data: TrainingData | ImageData | Partitions | Stream | Dataset[Any] | tuple[Tensor, Tensor]
    """The training data; a worker keeps only its share."""
    threat: ThreatModel = field(default_factory=ThreatModel)
    attack: Attack = field(default_factory=PGD)
    objective: Objective = field(default_factory=Adversarial)
    optimizer: TrainerOptimizer = field(default_factory=LAMBSettings)
    """Settings (`dat.LAMB(lr=0.05)`), a function of the model, or an optimizer of its parameters.
    The optimizer is `worker.optimizer`."""
    schedule: Schedule = field(default_factory=Piecewise)
    epochs: int = 30
    batch: int = 256
    """The global batch size, over all workers."""
    exchange: GradientExchange = field(default_factory=GradientExchange)
    """How the workers sum their gradients."""
    compute: Compute = field(default_factory=Compute)
    """Memory layout, precision and compilation of the network."""
    options: Options = field(default_factory=Options)
    """AWP, weight averaging, model selection, ..."""
    seed: int = 0
    world: World = field(default_factory=World.join)
    callbacks: Sequence[Callback] = ()

    __repr__ = short_repr

    def __new__(cls, **given: Any) -> Trainer:
        refuse_moved(given)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if self.epochs < 1:
            raise ValueError("epochs must be at least 1")
        self.images = data = TrainingData.of(self.data)
        """The training data."""
        self._check_settings()
        self._check_labels(data)
        if not self.sharded:  # sharding moves one block at a time to the device
            self.model.to(self.world.device)
        self.samples = len(data)
        subgroup = self.options.subgroup.size
        self.batches = data.batches(self.world, batch=self.batch, subgroup=subgroup, seed=self.seed)
        self._optimizer = None if self.sharded else make_optimizer(self)
        self.parts = Parts(option.build(self) for option in self.options.each())
        # drop all data but this worker's share
        labelled, *rest = (source.data for source in self.batches.sources)
        self.images = replace(data, labelled=labelled, unlabelled=rest[0] if rest else None)
        self.data = self.images
        self.records: list[EpochRecord] = []
        """The finished epochs."""
        self.tally = EpochTally()
        """Running totals of the current epoch."""
        self.updates = 0
        """Number of optimizer steps so far."""
        self.discarded_seconds = 0.0
        """Training time of epochs that were undone."""
        self._timer = StepTimer(self.world.device)
        self._unsharded: dict[str, nn.Module] = {}

    def _check_settings(self) -> None:
        mistakes, options = Mistakes(), self.options.each()
        checks = [self.exchange.check, self.compute.check, *(option.check for option in options)]
        for check in (*checks, self.exchange.sharding.check):
            with mistakes.collected():
                check(self)
        mistakes.refuse()

    def _check_labels(self, data: TrainingData) -> None:
        if data.unlabelled is None or data.unlabelled.has_labels:
            return
        self.objective.check_labels()
        if self.attack.reads_labels:
            raise ValueError(
                f"attack {type(self.attack).__name__}: needs labels, and some images have none; "
                "use pgd (its own loss, no patience), fgsm or n-fgsm, or pseudo-labels"
            )

    # The components of a run

    @property
    def sharded(self) -> bool:
        """Whether each worker holds only a shard of the model."""
        return self.exchange.sharding.active

    @property
    def checkpointer(self) -> Checkpointer | None:
        """The callback that writes checkpoints, if there is one."""
        return next(
            (callback for callback in self.callbacks if isinstance(callback, Checkpointer)), None
        )

    @property
    def collapses(self) -> list[Collapse]:
        """The collapses that the overfitting monitor has detected."""
        return self.parts.one(RobustnessHistory).collapses

    @property
    def steps(self) -> int:
        """Updates in the current epoch."""
        return self.steps_in(len(self.records))

    def steps_in(self, epoch: int) -> int:
        """Updates in an epoch, counted from 0. Leftover batches that do not fill an update are
        dropped, different ones in every epoch."""
        attack = self.worker.inner.attack if hasattr(self, "worker") else self.attack
        updates = self.batches.steps // self.options.batch_schedule.batches(epoch)
        return updates * attack.batch_replays

    def batch_in(self, epoch: int) -> int:
        """Images per update in an epoch, counted from 0."""
        return self.batch * self.options.batch_schedule.batches(epoch)

    def trust_ratios(self) -> dict[str, float]:
        """LALR's trust ratios in the last step, by parameter name."""
        optimizer = self.worker.optimizer
        if not isinstance(optimizer, Layerwise):
            return {}
        names = {id(p): name for name, p in self.model.named_parameters()}
        return {names[id(p)]: float(ratio) for p, ratio in optimizer.trust_ratios()}

    def models(self) -> dict[str, nn.Module]:
        """The model and, if enabled, its moving average, by file-name prefix."""
        return {"": self.model} | self.parts.models()

    def unsharded_models(self) -> dict[str, nn.Module]:
        """The same models, unsharded: if the model is sharded, the copies that `gather_weights`
        made at the end of the epoch."""
        return self._unsharded or self.models()

    def gather_weights(self) -> None:
        """Gather a sharded model's weights on every worker, until the epoch is over."""
        if self.sharded:
            unshard = self.worker.exchange.unsharded_model
            self._unsharded = {name: unshard(model) for name, model in self.models().items()}

    def best_model(self, name: str = "") -> nn.Module:
        """The weights with the best held-out accuracy. If the model is sharded, this is a
        collective call that returns an unsharded copy."""
        return self.worker.exchange.unsharded_model(self.parts.one(BestWeights).best.models[name])

    def best_epoch(self, name: str = "") -> int | None:
        return self.parts.one(BestWeights).best.results.get(name, (None, None))[1]

    def best_accuracy(self, name: str = "") -> Accuracy | None:
        """The held-out accuracy of the best weights; None without held-out images."""
        return self.parts.one(BestWeights).best.results[name][0]

    # Joining the other workers

    def _join(self) -> None:
        """Join the other workers and create this `Worker`; all start from rank 0's weights."""
        world, options = self.world, self.options
        engine = self._engine()
        exchange = self.exchange.connect(self)
        optimizer = self._optimizer or make_optimizer(self)
        connect_optimizer(optimizer, exchange)
        subgroup = WorkerSubgroup(world, options.subgroup.size, exchange.ledger)
        check_data(self.batches, self.batch, world)
        self.threat.check_shape(self.batches.sources[0].data.shape)
        inner = self._inner(self.attack)
        self.worker = Worker(
            sampler=Sampler(
                batches=self.batches,
                threat=self.threat,
                subgroup=subgroup,
                device=world.device,
                augmentation=self.images.augmentation,
                schedule=options.batch_schedule,
                replays=self.attack.batch_replays,
                seed=self.seed,
            ),
            inner=inner,
            objective=self.objective,
            exchange=exchange,
            engine=engine,
            norms=options.batch_norm.norms(subgroup, world, exchange.ledger),
            optimizer=optimizer,
            parts=self.parts,
            should_stop=self._should_stop,
        )
        self.parts.add(ErrorFeedback(exchange), inner)
        self.parts.call("on_fit_start", self)

    def _engine(self) -> Engine:
        if self.sharded:
            return Engine.of_sharded(self.model, self.compute)
        images = self.batches.sources[0].data
        x, _ = images.batch(torch.arange(min(8, len(images))), self.world.device)
        work = self.epochs * self.samples * self.attack.cost() // self.world.size
        if self.attack.early_stopping:
            work = 0  # batches of varying size would be compiled again and again
        with seeded(self.world.device, self.seed, "engine"):
            engine = Engine.of(self.model, self.compute, x, work)
            return engine.checked(self.world)

    def _inner(self, attack: Attack) -> InnerMaximization:
        mode = self.options.attack_mode.batch_norm
        inner = inner_class(attack)(attack, self.threat, mode=mode, seed=self.seed)
        inner.allocate(self.batches.sources, self.world.device)
        return inner

    def use_attack(self, attack: Attack) -> None:
        """Continue training with another attack."""
        worker, inner = self.worker, self._inner(attack)
        self.parts.replace(worker.inner, inner)
        worker.inner = inner
        worker.sampler = replace(worker.sampler, replays=attack.batch_replays)

    def _should_stop(self) -> bool:
        return any(callback.should_stop() for callback in self.callbacks)

    # Training

    def fit(self, resume: Checkpoint | None = None) -> list[EpochRecord]:
        """Train; afterwards `model` holds the last weights and `best_model` the best ones.

        A resumed run ends with bitwise the same weights as an uninterrupted one.
        """
        self._join()
        if resume:
            if resume.updates:
                self._warm_up()
            resume.restore(self)
        self.notify("on_fit_start")
        try:
            while len(self.records) < self.epochs:
                if not self._epoch(len(self.records)):
                    break
            self.worker.exchange.close()
        finally:
            self.batches.close()
            self.notify("on_fit_end")
        return self.records

    def _epoch(self, epoch: int) -> bool:
        """Run an epoch, which may be undone. Returns whether training continues."""
        trained = self._train(epoch)
        if trained is None:
            return True
        self.gather_weights()
        end = EpochEnd(epoch)
        for evaluate in self.parts.hooks("evaluate"):
            evaluate(self, end)
            if end.rolled_back:
                self.discarded_seconds += trained["seconds"]
                self.tally = EpochTally()
                return not end.stop
        self.parts.call("on_epoch_end", self, end)
        record = EpochRecord(
            epoch=epoch + 1,
            batch=self.batch_in(epoch),
            **trained,
            **end.metrics,
            trust_ratios=self.trust_ratios() or None,
        )
        self.records.append(record)
        self.tally = EpochTally()
        self.notify("on_epoch_end", record)
        self._unsharded = {}
        return True

    def _train(self, epoch: int) -> dict[str, Any] | None:
        """Take the steps of an epoch. Returns their metrics, or None after a rollback to an earlier
        epoch."""
        self.model.train()
        steps = self.steps_in(epoch)
        if self.tally.step == 0 and epoch:
            with seeded(self.world.device, self.seed, "engine"):
                self.worker.engine = self.worker.engine.checked(self.world)
        self.tally.start()
        with devices.tf32(self.compute.tf32):
            if not self._take_steps(epoch, steps):
                return None
        self.read_times()
        tally = self.tally
        costs = tally.costs(self.world, steps)
        self._check_weights(epoch)
        return {
            "lr": self.worker.optimizer.param_groups[0]["lr"],
            "loss": tally.loss / max(tally.taken, 1),
            "train_ra": tally.right / max(tally.taken, 1),
            **costs,
        }

    def _take_steps(self, epoch: int, steps: int) -> bool:
        """Take the remaining steps of an epoch; False after a rollback to an earlier epoch."""
        while self.tally.step < steps:
            step = self.tally.step
            set_rate(self.worker.optimizer, self.schedule(epoch + step / steps, self.epochs))
            report = self.parts.take_step(epoch, step, partial(self._step, epoch, step))
            if report is None:
                if len(self.records) != epoch:  # rolled back to an earlier epoch
                    return False
                continue
            self.parts.call("on_step_end", self)
            self.updates += 1
            self.tally.add(report)
            self.notify("on_step_end", epoch, report)
        return True

    def _step(self, epoch: int, step: int) -> StepReport:
        stream = (self.seed, "model", epoch, step, self.world.rank)
        with seeded(self.world.device, *stream), watched(self._timer):
            return dat_step(self.worker, epoch, step)

    def _warm_up(self) -> None:
        """Take a dummy step before a checkpoint's state is loaded. DDP reorders its buckets after
        the first backward pass; without this step, the gradient sums of a resumed run would be
        rounded differently from those of an uninterrupted one."""
        self.model.train()
        worker = self.worker
        batch = worker.draw(0, 0)
        outcome = worker.forward(batch, batch.x.clone().requires_grad_(True))
        receive = worker.exchange.all_gather_stats(torch.zeros(1, device=self.world.device))
        worker.backward(outcome, batch)
        receive()
        worker.optimizer.zero_grad()
        worker.exchange.reset_error_feedback()
        worker.exchange.ledger.read_and_reset()

    def read_times(self) -> None:
        """Add the times of the last steps to the tally; on a GPU this synchronizes."""
        self.tally.add_times(self._timer.read())

    def _check_weights(self, epoch: int) -> None:
        """Never evaluate or save weights that are not finite. Replicas are equal, so all workers
        raise or none does."""
        exchange = self.worker.exchange
        if (name := first_not_finite(exchange, self.model)) is not None:
            raise NotFinite(f"epoch {epoch + 1}: {name} is not finite; {ADVICE}")
        check_replicas(self.model, self.world, exchange.shards.size if exchange.shards else 1)

    def notify(self, event: str, *details: object) -> None:
        """Call this method of every callback."""
        for callback in self.callbacks:
            getattr(callback, event)(self, *details)
