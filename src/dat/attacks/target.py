"""What an attack maximizes: a per-example loss, or a network with labels and a loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from dat.attacks.inputs import check_losses
from dat.core.deprecation import RenamedAttribute
from dat.core.lazy import torch
from dat.core.losses import cross_entropy, dlr, is_soft, margin, require_hard
from dat.core.short_repr import short_repr
from dat.core.tracing import stage

if TYPE_CHECKING:
    from torch import Tensor

Loss = Callable[["Tensor"], "Tensor"]
"""Maps a batch of images to one loss per image; attacks maximize it."""
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross-entropy": cross_entropy,
    "margin": margin,
    "dlr": dlr,
}
GIVEN = "given"


@dataclass(frozen=True)
class AttackTarget:
    """A network and labels: a per-example loss that also knows which images are misclassified."""

    model: Callable[[Tensor], Tensor]
    labels: Tensor
    """A class per image, or soft labels: weights of the classes."""
    loss: Callable[..., Tensor] = cross_entropy
    """A function of logits, labels and, if there are any, targets."""
    targets: Tensor | None = None
    """A further argument of the loss, one row per image: target classes, or the clean logits."""
    until_broken: bool = False
    """Stop attacking an image as soon as it is misclassified; by default, the loss is maximized."""

    __repr__ = short_repr

    def __call__(self, x: Tensor) -> Tensor:
        return self.forward(x)[0]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of each image, and whether it is misclassified."""
        logits = self.model(x)
        targets = () if self.targets is None else (self.targets,)
        return self.loss(logits, self.labels, *targets), self.misclassified(logits)

    def misclassified(self, logits: Tensor) -> Tensor:
        """Whether each image is misclassified; logits that are not finite count as wrong. With soft
        labels no class is wrong, and attacks maximize the loss alone."""
        logits = logits.detach()
        broken = ~logits.isfinite().all(1)
        return broken if is_soft(self.labels) else (logits.argmax(1) != self.labels) | broken

    def select(self, rows: Tensor) -> AttackTarget:
        """The target for a subset of the images."""
        targets = None if self.targets is None else self.targets[rows]
        return replace(self, labels=self.labels[rows], targets=targets)

    pick = RenamedAttribute("select")

    def wrong_classes(self, x: Tensor) -> Tensor:
        """The wrong classes of each image, from the most to the least likely."""
        require_hard(self.labels, "targeted loss")
        with torch.no_grad():
            logits = self.model(x).scatter(1, self.labels.unsqueeze(1), float("-inf"))
            return logits.argsort(dim=1, descending=True, stable=True)[:, :-1]

    see = RenamedAttribute("forward")
    wrong = RenamedAttribute("misclassified")


class NoImageGradient(ValueError):
    """The loss has no gradient with respect to the images."""

    def __init__(self) -> None:
        super().__init__(
            "the model has no gradient with respect to its input (torch.no_grad, detach or numpy "
            "in forward?); use the gradient-free attack square, or remove what blocks the gradient"
        )


class ValueAndGrad(NamedTuple):
    """The loss at a batch of images, with its gradient; one row per image."""

    loss: Tensor
    gradient: Tensor
    misclassified: Tensor

    def __repr__(self) -> str:
        return short_repr(self)


def value_and_grad(loss: Loss, x: Tensor, *, samples: int = 1) -> ValueAndGrad:
    """One forward and one backward pass, or the mean of `samples` for randomized networks.

    The gradients of the parameters are not touched.
    """
    results = [_one_pass(loss, x) for _ in range(samples)]
    if samples == 1:
        return results[0]
    losses, gradients, misclassified = zip(*results, strict=True)
    return ValueAndGrad(sum(losses) / samples, sum(gradients) / samples, misclassified[-1])


def _one_pass(loss: Loss, x: Tensor) -> ValueAndGrad:
    x = x.detach().requires_grad_(True)
    with torch.enable_grad():
        with stage("forward"):
            losses, misclassified = forward(loss, x)
        if not losses.requires_grad:
            raise NoImageGradient
        with stage("backward"):
            (gradient,) = torch.autograd.grad(losses.sum(), x, allow_unused=True)
    if gradient is None:
        raise NoImageGradient
    return ValueAndGrad(losses.detach().to(x.dtype), gradient, misclassified)


def value(loss: Loss, x: Tensor) -> tuple[Tensor, Tensor]:
    """The loss and the misclassified images, without a gradient."""
    with torch.no_grad():
        return forward(loss, x)


def forward(loss: Loss, x: Tensor) -> tuple[Tensor, Tensor]:
    """The loss and the misclassified images; a plain loss has no labels, and never reports any."""
    if isinstance(loss, AttackTarget):
        losses, misclassified = loss.forward(x)
        check_losses(losses, len(x))
        return losses, misclassified
    losses = loss(x)
    check_losses(losses, len(x))
    return losses, torch.zeros(len(x), dtype=torch.bool, device=x.device)


def require_target(loss: Loss, attack: str) -> AttackTarget:
    """Raise if the loss is a plain closure, for attacks that need the network and the labels."""
    if not isinstance(loss, AttackTarget):
        raise ValueError(
            f"{attack}: needs the network and the labels; give it dat.AttackTarget(model, y)"
        )
    return loss


def with_loss(loss: Loss, name: str, attack: str) -> Loss:
    """The given loss, or the one called `name` on the same logits."""
    if name == GIVEN:
        return loss
    return replace(require_target(loss, attack), loss=LOSSES[name], targets=None)


def stops_when_broken(loss: Loss) -> bool:
    """Whether an attack may stop at an image once it is misclassified."""
    return isinstance(loss, AttackTarget) and loss.until_broken


def select(loss: Loss, rows: Tensor) -> Loss:
    """The loss of a subset of the images; a plain loss is only ever used with all of them."""
    return loss.select(rows) if isinstance(loss, AttackTarget) else loss


def made_in_inference_mode(loss: Loss, x: Tensor) -> bool:
    """Whether autograd would refuse the images or the labels."""
    tensors = (x, loss.labels, loss.targets) if isinstance(loss, AttackTarget) else (x,)
    return any(tensor is not None and tensor.is_inference() for tensor in tensors)
