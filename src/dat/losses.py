"""Per-example losses. All take logits of shape (n, classes) and return a tensor of shape (n,)."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

TINY = 1e-12
NO_LABEL = -1


def cross_entropy(logits: Tensor, labels: Tensor, *, smoothing: float = 0.0) -> Tensor:
    """-log p(label), with label smoothing as in Szegedy et al. 2016; 0 where there is no label."""
    return F.cross_entropy(
        logits, labels, reduction="none", label_smoothing=smoothing, ignore_index=NO_LABEL
    )


def divergence(clean: Tensor, other: Tensor) -> Tensor:
    """KL(p, q) of two predictions given as logits. From log-probabilities, so neither a probability
    of 0 nor logits far apart make it anything but a number."""
    log_p, log_q = F.log_softmax(clean, dim=1), F.log_softmax(other, dim=1)
    return (log_p.exp() * (log_p - log_q)).sum(1)


def boosted_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """-log p(label) - log(1 - the largest other p) (Wang et al. 2020). 1 - p is the sum of all
    others, whose logarithm loses nothing where p is almost 1."""
    log_p = F.log_softmax(logits, dim=1)
    wrong = log_p.scatter(1, labels.unsqueeze(1), float("-inf")).argmax(1, keepdim=True)
    others = log_p.scatter(1, wrong, float("-inf")).logsumexp(1)
    return -_of(log_p, labels) - others


def margin(logits: Tensor, labels: Tensor) -> Tensor:
    """By how much the best wrong class beats the label: above 0 means misclassified (the loss of
    Carlini & Wagner 2017)."""
    wrong = logits.scatter(1, labels.unsqueeze(1), float("-inf"))
    return wrong.max(1).values - _of(logits, labels)


def dlr(logits: Tensor, labels: Tensor) -> Tensor:
    """The margin as a ratio of differences of logits (Croce & Hein 2020): neither a shift nor a
    scale of the logits changes it, so it does not saturate where a softmax does."""
    top = _top(logits, 3)
    return margin(logits, labels) / (top[:, 0] - top[:, 2] + TINY)


def targeted_dlr(logits: Tensor, labels: Tensor, targets: Tensor) -> Tensor:
    """The same with a given wrong class; its scale is the top logit above the third and fourth."""
    top = _top(logits, 4)
    scale = top[:, 0] - (top[:, 2] + top[:, 3]) / 2 + TINY
    return lead(logits, labels, targets) / scale


def lead(logits: Tensor, labels: Tensor, targets: Tensor) -> Tensor:
    """By how much a given wrong class beats the label."""
    return _of(logits, targets) - _of(logits, labels)


def _top(logits: Tensor, count: int) -> Tensor:
    if logits.shape[1] < count:
        raise ValueError(
            f"the DLR loss needs {count} classes, there are {logits.shape[1]}: use the margin"
        )
    return logits.topk(count, dim=1).values


def _of(logits: Tensor, classes: Tensor) -> Tensor:
    return logits.gather(1, classes.unsqueeze(1)).squeeze(1)
