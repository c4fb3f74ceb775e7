"""Algorithm 1 of the paper: one iteration, on one worker."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from dat.core.losses import hard_labels
from dat.core.tracing import stage
from dat.data import UNLABELLED
from dat.distributed import BaseExchange, Traffic
from dat.objectives import Batch, Outcome
from dat.train.errors import ADVICE, NoGradient, NotFinite
from dat.train.worker import Worker

IMAGES = 3
"""Index of the number of images in a worker's sums."""


class StepReport(NamedTuple):
    """Metrics of one step: over the global batch, and this worker's traffic."""

    loss: float
    accuracy: float
    """Share of the adversarial examples that are classified correctly, in percent."""
    traffic: Traffic
    stop: bool = False
    """At least one worker received a request to stop."""


def dat_step(worker: Worker, epoch: int, step: int) -> StepReport:
    """Algorithm A1, steps 4 to 12."""
    exchange = worker.exchange

    # Step 4: draw a batch from the worker's own data.
    batch = worker.draw(epoch, step)

    # Step 5, eq. (A1): attack each sample.
    x_adv = worker.perturb(batch, epoch, step)

    def descend() -> None:
        worker.backward(worker.forward(batch, x_adv), batch)

    with worker.parts.updating(worker, epoch, step, descend):  # for example AWP
        # Step 6, eq. (A2): the local share of the gradient of lambda * loss + phi.
        outcome = worker.forward(batch, x_adv)
        sums = _local_sums(outcome, batch, stop=worker.should_stop())
        receive = exchange.all_gather_stats(sums, weight=IMAGES)

        # Steps 7 to 10, eq. (A3): each gradient bucket is quantized, summed over the workers and
        # quantized again, depending on the protocol, while the backward pass continues.
        exchange.begin(epoch, step)
        worker.backward(outcome, batch)
        loss, accuracy, stop = _global_metrics(receive(), epoch, step)
        _check_gradient(exchange, epoch, step)
    worker.inner.remember(worker, batch, x_adv, epoch, step)
    worker.parts.call("on_gradient", worker)

    # Step 12, eq. (A4): every worker takes the same outer step.
    with stage("optimizer"):
        worker.optimizer.step()
    return StepReport(loss, accuracy, exchange.ledger.read_and_reset(), stop)


def _local_sums(outcome: Outcome, batch: Batch, *, stop: bool) -> Tensor:
    """This worker's summed loss, correct predictions, labels and images (a subgroup's common images
    are divided among its workers), and whether to stop, so that all stop after the same step."""
    y, share = hard_labels(batch.y), 1 / batch.subgroup.size
    correct = (outcome.logits.argmax(1) == y).sum() * share
    labels = (y != UNLABELLED).sum() * share
    loss = (outcome.loss * batch.weight).sum()
    # filled on the device: a copy from the host would wait for all work before it
    images, stops = (
        torch.full((), value, device=y.device) for value in (len(y) * share, float(stop))
    )
    return torch.stack((loss, correct, labels, images, stops))


def _global_metrics(sums: Tensor, epoch: int, step: int) -> tuple[float, float, bool]:
    """Loss, accuracy and whether to stop, over all workers. A loss that is not finite raises the
    same error on every worker."""
    for rank, (loss, *_) in enumerate(sums.tolist()):
        if not math.isfinite(loss):
            raise NotFinite(
                f"worker {rank}, epoch {epoch + 1}, step {step + 1}: the loss is {loss}; {ADVICE}"
            )
    loss, correct, labels, images, stops = sums.double().sum(0).tolist()
    return loss / images, 100.0 * correct / max(labels, 1), stops > 0


def _check_gradient(exchange: BaseExchange, epoch: int, step: int) -> None:
    """The summed gradient is identical on every worker, so either all raise or none does."""
    named = exchange.module.named_parameters()
    trained = [(name, p) for name, p in named if p.requires_grad]
    gradients = [p.grad for _, p in trained if p.grad is not None]
    if len(gradients) < len(trained):
        name = next(name for name, p in trained if p.grad is None)
        raise NoGradient(
            f"parameter {name} does not contribute to the loss, so it cannot be trained: "
            "use it, or freeze it with requires_grad_(False)"
        )
    finite = exchange.norms(gradients).isfinite()
    if not finite.all():
        name = trained[int(finite.int().argmin())][0]
        raise NotFinite(
            f"epoch {epoch + 1}, step {step + 1}: the gradient of {name} is not finite; {ADVICE}"
        )
