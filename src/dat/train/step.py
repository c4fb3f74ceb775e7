"""Algorithm 1 of the paper: one iteration, as one worker lives it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from dat.attacks import PGD, Attack, Free, attack_mode
from dat.comm import BaseExchange, Norms, Team, Traffic
from dat.compute import Engine
from dat.data import UNLABELLED, Augmentation, Drawn, Supply, as_floats
from dat.objectives import Batch, Objective, Outcome
from dat.objectives.base import Network
from dat.rng import Draws
from dat.stages import stage, staged
from dat.threat import ThreatModel
from dat.train.carried import Carried, Visit
from dat.train.growth import Growth
from dat.train.perturbation import WeightAttack


class NotFinite(ArithmeticError):
    """A loss, a gradient or a weight became NaN or infinite; every worker raises it alike."""

    everywhere = True


class NoGradient(ValueError):
    """A trainable parameter takes no part in the loss; every worker raises it alike."""

    everywhere = True


ADVICE = "the weights of the last whole epoch are kept. Lower optimizer.lr, or add schedule.warmup"


def never() -> bool:
    """Nobody asks to stop."""
    return False


class StepReport(NamedTuple):
    """A step in a few numbers: the global batch's, and what this worker sent."""

    loss: float
    accuracy: float
    """Share of the adversarial examples that were classified right, in percent."""
    traffic: Traffic
    stop: bool = False
    """Some worker was asked to stop."""


@dataclass(frozen=True)
class Worker:
    """Everything that worker i needs to take part."""

    supply: Supply
    """D(i): the images this worker owns, and when it draws which of them."""
    threat: ThreatModel
    attack: Attack
    objective: Objective
    exchange: BaseExchange
    engine: Engine
    """How the network is computed."""
    team: Team
    """Who has the same images."""
    norms: Norms
    """Over which images batch normalisation goes."""
    optimizer: torch.optim.Optimizer
    seed: int = 0
    augmentation: Augmentation = field(default_factory=Augmentation)
    attack_bn: str = "eval"
    weights: WeightAttack = field(default_factory=WeightAttack)
    growth: Growth = field(default_factory=Growth)
    replayed: list[Tensor] = field(default_factory=list)
    """Free AT: the adversarial images of the last replay."""
    carried: Carried | None = None
    """The perturbations of the last epoch, if the attack goes on from them."""
    stopping: Callable[[], bool] = never
    """Whether this worker was asked to stop."""

    @property
    def replays(self) -> int:
        """How often a batch is trained on in a row."""
        return self.attack.replays if isinstance(self.attack, Free) else 1

    @staged("data")
    def draw(self, epoch: int, step: int) -> Batch:
        """The worker's share of a global batch."""
        number, times = step // self.replays, self.growth.factor(epoch)
        turns = range(number * times, (number + 1) * times)
        drawn = self.supply.several(epoch, turns, self.exchange.world.device)
        x, y, index, weight = Drawn.joined(drawn)
        draws = Draws.of(self.seed, "objective", epoch, step, index=index)
        x = as_floats(self.augmentation(x, self._luck(epoch, number, index)))
        return Batch(
            self.engine.lay(x),
            y,
            draws,
            self.threat,
            self.team,
            weight,
            total=times * self.supply.weight,
            lengths=tuple(len(it.y) for it in drawn),
        )

    def visit(self, batch: Batch, epoch: int, step: int) -> Visit:
        """When a batch was drawn, and how its images were cut out."""
        index = batch.draws.index
        return Visit(index, self.augmentation.windows(self._luck(epoch, step, index)), epoch)

    def _luck(self, epoch: int, number: int, index: Tensor) -> Draws:
        """What decides about augmentation."""
        return Draws.of(self.seed, "augment", epoch, number, index=index)

    @staged("attack")
    def perturb(self, batch: Batch, epoch: int, step: int) -> Tensor:
        """Adversarial examples, found on the bare module: nothing is communicated but by a team."""
        if isinstance(self.attack, Free):
            streams = self._chance(batch, epoch, step)
            again = step % self.replays and self.replayed
            x_adv = self.replayed[0] if again else self.attack.start(batch.x, self.threat, streams)
            return x_adv.requires_grad_(True)
        model = self.engine.target(eval_mode=self.attack_bn == "eval")
        network = self.engine.cast(model)
        found = []
        with attack_mode(model, self.attack_bn), self.exchange.held():
            for _, piece in self.pieces(batch):
                with self.norms.over(model, len(piece.y)):
                    found.append(self._attacked(network, piece, epoch, step))
        return found[0] if len(found) == 1 else torch.cat(found)

    def _attacked(self, network: Network, batch: Batch, epoch: int, step: int) -> Tensor:
        phi, streams = self.objective.phi(network, batch), self._chance(batch, epoch, step)
        if isinstance(self.attack, PGD) and self.carried:
            fresh = self.attack.start(batch.x, self.threat, streams)
            start = self.carried.start(batch.x, fresh, self.visit(batch, epoch, step))
            return self.attack.onward(phi, start, batch.x, self.threat)
        return self.attack(phi, batch.x, self.threat, streams)

    def _chance(self, batch: Batch, epoch: int, step: int) -> Draws:
        """What decides where attacks begin."""
        return Draws.of(self.seed, "attack", epoch, step, index=batch.draws.index)

    def remember(self, batch: Batch, x_adv: Tensor, epoch: int, step: int) -> None:
        """What the next attack on these images goes on from."""
        if self.carried:
            self.carried.keep(x_adv - batch.x, self.visit(batch, epoch, step))
        if isinstance(self.attack, Free):
            # the backward pass of the update has given the attack's gradient as well
            assert x_adv.grad is not None
            gradient = self.team.sum(x_adv.grad) if self.team.size > 1 else x_adv.grad
            further = self.attack.ascend(x_adv.detach(), gradient, batch.x, self.threat)
            self.replayed[:] = [further]

    def pieces(self, batch: Batch) -> list[tuple[slice, Batch]]:
        """What is computed at a time: a grown batch takes no more memory than it did, and batch
        norms see no more of it."""
        lengths = batch.lengths or (len(batch.y),)
        most = self.engine.compute.pieces
        if most > 1:
            most = self.norms.fewest(min(most, max(min(lengths), 1)))
        cuts, first = list[slice](), 0
        for count in lengths:
            rows = self.engine.pieces(count, most)
            cuts += [slice(first + it.start, first + it.stop) for it in rows]
            first += count
        return [(rows, batch.pick(rows) if len(cuts) > 1 else batch) for rows in cuts]

    @staged("update/forward")
    def forward(self, batch: Batch, x_adv: Tensor) -> Outcome:
        """The objective at the worker's share of the batch; of several pieces, all but the last
        have had their backward pass as well, and nothing was exchanged."""
        self.optimizer.zero_grad()
        x_adv.grad = None  # that of free AT, from AWP's own pass
        *early, (rows, last) = self.pieces(batch)
        done = []
        for some, piece in early:
            with self.exchange.silent():
                outcome = self._outcome(piece, x_adv[some])
                self.backward(outcome, piece)
            done.append(Outcome(outcome.loss.detach(), outcome.logits.detach()))
        done.append(self._outcome(last, x_adv[rows] if early else x_adv))
        return done[0] if not early else Outcome(*map(torch.cat, zip(*done, strict=True)))

    def _outcome(self, piece: Batch, x_adv: Tensor) -> Outcome:
        network, model = self.engine.cast(self.exchange), self.exchange.module
        with self.norms.over(model, len(piece.y)), self.engine.updating():
            return self.objective.loss(network, piece, x_adv)

    @staged("update/backward")
    def backward(self, outcome: Outcome, batch: Batch) -> None:
        """The worker's share of the gradient of the mean, which the exchange sums up."""
        ((outcome.loss * batch.weight).sum() / batch.total).backward()


def dat_step(worker: Worker, epoch: int, step: int) -> StepReport:
    """Algorithm A1, steps 4 to 12."""
    exchange = worker.exchange

    # Step 4: draw a batch from the worker's own data.
    batch = worker.draw(epoch, step)

    # Step 5, eq. (A1): attack each sample.
    x_adv = worker.perturb(batch, epoch, step)

    def descend() -> None:
        worker.backward(worker.forward(batch, x_adv), batch)

    with worker.weights(exchange, epoch, step, descend):  # AWP, if it was asked for
        # Step 6, eq. (A2): the local share of the gradient of lambda * loss + phi.
        outcome = worker.forward(batch, x_adv)
        settle = exchange.share(_notes(outcome, batch, stop=worker.stopping()))

        # Steps 7 to 10, eq. (A3): each bucket of the gradient is quantized, summed over the workers
        # and quantized again, as the protocol has it, while the backward goes on.
        exchange.begin(epoch, step)
        worker.backward(outcome, batch)
        loss, accuracy, stop = _sum_up(settle(), epoch, step)
        _check_gradient(exchange, epoch, step)
    worker.remember(batch, x_adv, epoch, step)

    # Step 12, eq. (A4): every worker takes the same outer step.
    with stage("optimizer"):
        worker.optimizer.step()
    return StepReport(loss, accuracy, exchange.ledger.close(), stop)


def _notes(outcome: Outcome, batch: Batch, *, stop: bool) -> Tensor:
    """Summed loss, right answers, labels and images, of what a team has in common a share; and
    whether to stop, so that all do so after the same step."""
    y, share = batch.y, 1 / batch.team.size
    right = (outcome.logits.argmax(1) == y).sum() * share
    labels = (y != UNLABELLED).sum() * share
    loss = (outcome.loss * batch.weight).sum()
    images, stops = torch.tensor((len(y) * share, float(stop)), device=y.device)
    return torch.stack((loss, right, labels, images, stops))


def _sum_up(notes: Tensor, epoch: int, step: int) -> tuple[float, float, bool]:
    """Sum up the workers' notes; all of them see a broken loss in the same step, and stop."""
    for rank, (loss, *_) in enumerate(notes.tolist()):
        if not math.isfinite(loss):
            raise NotFinite(
                f"worker {rank}, epoch {epoch + 1}, step {step + 1}: the loss is {loss}; {ADVICE}"
            )
    loss, right, labels, images, stops = notes.double().sum(0).tolist()
    return loss / images, 100.0 * right / max(labels, 1), stops > 0


def _check_gradient(exchange: BaseExchange, epoch: int, step: int) -> None:
    """The summed gradient is the same at every worker, so all of them stop or none does."""
    named = exchange.module.named_parameters()
    trained = [(name, p) for name, p in named if p.requires_grad]
    gradients = [p.grad for _, p in trained if p.grad is not None]
    if len(gradients) < len(trained):
        name = next(name for name, p in trained if p.grad is None)
        raise NoGradient(
            f"parameter {name} has no part in the loss, so it cannot be trained: "
            "use it, or freeze it with requires_grad_(False)"
        )
    finite = exchange.norms(gradients).isfinite()
    if not finite.all():
        name = trained[int(finite.int().argmin())][0]
        raise NotFinite(
            f"epoch {epoch + 1}, step {step + 1}: the gradient of {name} is not finite; {ADVICE}"
        )
