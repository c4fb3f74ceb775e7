"""Per-example losses: each maps logits of shape (n, classes) to a tensor of shape (n,).

Labels are classes of shape (n,). The cross-entropy also takes soft labels: the weight of each
class, of shape (n, classes).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dat.core.lazy import functional as F
from dat.core.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

TINY = 1e-12
NO_LABEL = -1


def cross_entropy(logits: Tensor, labels: Tensor, *, smoothing: float = 0.0) -> Tensor:
    """-log p(label), with label smoothing as in Szegedy et al. 2016; 0 for unlabelled examples. It
    is linear in soft labels, whose weights need not sum to 1."""
    if is_soft(labels):
        labels = labels.to(logits.dtype)
        spread = labels.sum(1, keepdim=True) / logits.shape[1]
        soft = labels + smoothing * (spread - labels) if smoothing else labels
        return -(soft * F.log_softmax(logits, dim=1)).sum(1)
    return F.cross_entropy(
        logits, labels, reduction="none", label_smoothing=smoothing, ignore_index=NO_LABEL
    )


def is_soft(labels: Tensor) -> bool:
    """Whether labels are weights of the classes instead of classes."""
    return labels.dim() == 2


def soft_labels(labels: Tensor, classes: int) -> Tensor:
    """Weight 1 for the label, and none for any class of an unlabelled example."""
    return (labels.unsqueeze(1) == torch.arange(classes, device=labels.device)).float()


def hard_labels(labels: Tensor) -> Tensor:
    """The class with the largest weight; `NO_LABEL` if none has any. Hard labels stay."""
    if not is_soft(labels):
        return labels
    weight, label = labels.max(1)
    return label.masked_fill(weight == 0, NO_LABEL)


def require_hard(labels: Tensor, loss: str) -> None:
    """Raise for soft labels."""
    if is_soft(labels):
        raise ValueError(
            f"the {loss} is not defined for soft labels (mixup, cutmix): use the cross-entropy"
        )


def kl_divergence(clean: Tensor, other: Tensor) -> Tensor:
    """KL(p, q) of two predictions given as logits.

    Computed from log-probabilities, so that it stays finite for probabilities of 0 and for logits
    far apart.
    """
    log_p, log_q = F.log_softmax(clean, dim=1), F.log_softmax(other, dim=1)
    return (log_p.exp() * (log_p - log_q)).sum(1)


def boosted_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """-log p(label) - log(1 - max of the other p) (Wang et al. 2020)."""
    require_hard(labels, "boosted cross-entropy")
    log_p = F.log_softmax(logits, dim=1)
    wrong = log_p.scatter(1, labels.unsqueeze(1), float("-inf")).argmax(1, keepdim=True)
    # 1 - p is the sum of all other probabilities, whose log stays exact where p is almost 1
    log_rest = log_p.scatter(1, wrong, float("-inf")).logsumexp(1)
    return -_gather(log_p, labels) - log_rest


def margin(logits: Tensor, labels: Tensor) -> Tensor:
    """The largest wrong logit minus the label's: above 0 means misclassified (the loss of
    Carlini & Wagner 2017)."""
    require_hard(labels, "margin loss")
    wrong = logits.scatter(1, labels.unsqueeze(1), float("-inf"))
    return wrong.max(1).values - _gather(logits, labels)


def dlr(logits: Tensor, labels: Tensor) -> Tensor:
    """The difference-of-logits ratio (Croce & Hein 2020): the margin divided by the gap between the
    first and third logit. Invariant to shifts and scales of the logits, it does not saturate where
    a softmax does."""
    top = _top_logits(logits, 3)
    return margin(logits, labels) / (top[:, 0] - top[:, 2] + TINY)


def targeted_dlr(logits: Tensor, labels: Tensor, targets: Tensor) -> Tensor:
    """The DLR loss towards a target class; its scale is the top logit minus the mean of the third
    and fourth."""
    top = _top_logits(logits, 4)
    scale = top[:, 0] - (top[:, 2] + top[:, 3]) / 2 + TINY
    return targeted_margin(logits, labels, targets) / scale


def targeted_margin(logits: Tensor, labels: Tensor, targets: Tensor) -> Tensor:
    """The target class's logit minus the label's."""
    return _gather(logits, targets) - _gather(logits, labels)


def _top_logits(logits: Tensor, count: int) -> Tensor:
    if logits.shape[1] < count:
        raise ValueError(
            f"the DLR loss needs {count} classes, there are {logits.shape[1]}: use the margin"
        )
    return logits.topk(count, dim=1).values


def _gather(values: Tensor, classes: Tensor) -> Tensor:
    """One class's value for each example."""
    return values.gather(1, classes.unsqueeze(1)).squeeze(1)
