"""Algorithm 1 of the paper: one iteration, as one worker lives it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dat.attacks import Attack, attack_mode
from dat.comm import Exchange, Team, Traffic
from dat.data import ImageData, Plan, augment
from dat.objectives import Batch, Objective, Outcome
from dat.rng import Draws
from dat.threat import ThreatModel


class NotFinite(ArithmeticError):
    """A loss, a gradient or a weight became NaN or infinite; every worker raises it alike."""

    everywhere = True


class NoGradient(ValueError):
    """A trainable parameter takes no part in the loss; every worker raises it alike."""

    everywhere = True


ADVICE = "the weights of the last whole epoch are kept. Lower optimizer.lr, or add schedule.warmup"


class StepReport(NamedTuple):
    """A step in a few numbers: the global batch's, and what this worker sent."""

    loss: float
    accuracy: float
    """Share of the adversarial examples that were classified right, in percent."""
    traffic: Traffic


@dataclass(frozen=True)
class Worker:
    """Everything that worker i needs to take part."""

    data: ImageData
    """D(i): the images this worker owns."""
    owned: Tensor
    """The numbers of those images in the whole training set, ascending."""
    plan: Plan
    threat: ThreatModel
    attack: Attack
    objective: Objective
    exchange: Exchange
    team: Team
    """Who has the same images."""
    optimizer: torch.optim.Optimizer
    seed: int = 0
    augmentation: str = "none"
    attack_bn: str = "eval"

    def draw(self, epoch: int, step: int) -> Batch:
        """The worker's share of a global batch."""
        index = self.plan.draw(epoch, step, self.team.number)
        rows = torch.searchsorted(self.owned, index)
        x, y = self.data.batch(rows, self.exchange.world.device)
        index = index.to(x.device)
        streams = Draws.of(self.seed, "augment", epoch, step, index=index)
        draws = Draws.of(self.seed, "objective", epoch, step, index=index)
        return Batch(augment(x, self.augmentation, streams), y, draws, self.team)


def dat_step(worker: Worker, epoch: int, step: int) -> StepReport:
    """Algorithm A1, steps 4 to 12."""
    exchange, objective, team = worker.exchange, worker.objective, worker.team
    model = exchange.module

    # Step 4: draw a batch from the worker's own data.
    batch = worker.draw(epoch, step)

    # Step 5, eq. (A1): attack each sample. On the bare module, so nothing is communicated.
    with attack_mode(model, worker.attack_bn), team.one_batch(model):
        streams = Draws.of(worker.seed, "attack", epoch, step, index=batch.draws.index)
        x_adv = worker.attack(objective.phi(model, batch), batch.x, worker.threat, streams)

    # Step 6, eq. (A2): the local share of the gradient of lambda * loss + phi.
    worker.optimizer.zero_grad()
    with team.one_batch(model):
        outcome = objective.loss(exchange, batch, x_adv)
    settle = exchange.share(_notes(outcome, batch))

    # Steps 7 to 10, eq. (A3): each bucket of the gradient is quantized, summed over the workers and
    # quantized again, as the protocol has it, while the backward goes on.
    exchange.begin(epoch, step)
    (outcome.loss.sum() / worker.plan.batch).backward()
    loss, accuracy = _sum_up(settle(), epoch, step)
    _check_gradient(model, epoch, step)

    # Step 12, eq. (A4): every worker takes the same outer step.
    worker.optimizer.step()
    return StepReport(loss, accuracy, exchange.ledger.close())


def _notes(outcome: Outcome, batch: Batch) -> Tensor:
    """Summed loss, right answers, and images; of the two that a team has in common, a share."""
    y, share = batch.y, 1 / batch.team.size
    right = (outcome.logits.argmax(1) == y).sum() * share
    return torch.stack((outcome.loss.sum(), right, torch.tensor(len(y) * share, device=y.device)))


def _sum_up(notes: Tensor, epoch: int, step: int) -> tuple[float, float]:
    """Sum up the workers' notes; all of them see a broken loss in the same step, and stop."""
    for rank, (loss, _, _) in enumerate(notes.tolist()):
        if not math.isfinite(loss):
            raise NotFinite(
                f"worker {rank}, epoch {epoch + 1}, step {step + 1}: the loss is {loss}; {ADVICE}"
            )
    loss, right, count = notes.double().sum(0).tolist()
    return loss / count, 100.0 * right / count


def _check_gradient(model: nn.Module, epoch: int, step: int) -> None:
    """The summed gradient is the same at every worker, so all of them stop or none does."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    gradients = [p.grad for _, p in trained if p.grad is not None]
    if len(gradients) < len(trained):
        name = next(name for name, p in trained if p.grad is None)
        raise NoGradient(
            f"parameter {name} has no part in the loss, so it cannot be trained: "
            "use it, or freeze it with requires_grad_(False)"
        )
    finite = torch.stack(torch._foreach_norm(gradients)).isfinite()
    if not finite.all():
        name = trained[int(finite.int().argmin())][0]
        raise NotFinite(
            f"epoch {epoch + 1}, step {step + 1}: the gradient of {name} is not finite; {ADVICE}"
        )
