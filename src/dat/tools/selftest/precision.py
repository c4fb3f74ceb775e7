"""Attacks in mixed precision find what they find in float32.

A network with large logits has small gradients: those of a confident prediction are far below what
float16 can represent. An attack whose gradient underflows does not move, and the network looks
robust.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dat.core.threat import ThreatModel
from dat.data import ImageData
from dat.evaluation import assess
from dat.tools.selftest.result import Context, Result, failed, passed

CLASSES, TRAINED, TESTED, SIDE = 10, 640, 200, 8
EPS = 0.1
SCALE = 8.0
"""Factor on the last layer: the logits of most images then differ by more than the 17 below which
float16 can represent the gradient."""
STEPS = 120
BFLOAT16_TOLERANCE = 0.03
"""Share of images whose outcome may differ in bfloat16, which has 8 bits; measured on a CPU: 0."""
EFFECT = 0.2
"""Share of images for which the attack has to succeed in float32: otherwise nothing is tested."""


def float16(context: Context) -> Result:
    """RA in float16 equals RA in float32, but for one image."""
    return _compare(context, "float16", 1)


def bfloat16(context: Context) -> Result:
    """RA in bfloat16 equals RA in float32, but for 3 % of the images."""
    return _compare(context, "bfloat16", round(BFLOAT16_TOLERANCE * TESTED))


def _compare(context: Context, precision: str, most: int) -> Result:
    model, data = _network(context)
    robust = {name: _robust(context, model, data, name) for name in ("float32", precision)}
    (right, survived), (_, low) = robust["float32"], robust[precision]
    figures: dict[str, Any] = {
        "images": TESTED,
        "right": right,
        "float32": survived,
        precision: low,
    }
    if right - survived < EFFECT * TESTED:
        return failed(f"the attack in float32 broke only {right - survived} images", **figures)
    text = f"RA {low} of {TESTED} images in {precision}, {survived} in float32, TA {right}"
    if abs(low - survived) > most:
        return failed(
            f"{text}: more than {most} apart", f"set precision to float32; {ADVICE}", **figures
        )
    return passed(f"{text} (may differ by {most})", **figures)


ADVICE = "attacks in this precision cannot be trusted here; attach this report to an issue"


def _robust(context: Context, model: nn.Module, data: ImageData, precision: str) -> tuple[int, int]:
    """How many images are classified correctly, and how many still are under attack."""
    assessment = assess(
        model,
        data,
        ["pgd-20"],
        threat=ThreatModel(eps=EPS),
        world=context.world,
        batch=64,
        seed=context.seed,
        precision=precision,
        check=False,
    )
    return int(assessment.right.sum()), int(assessment.suites["pgd-20"].robust.sum())


def _network(context: Context) -> tuple[nn.Module, ImageData]:
    """A network trained on noisy versions of ten patterns, with a scaled last layer, and test
    images. It is trained on the CPU, so that workers on equal processors have equal networks."""
    x, y = _images(context)
    with context.seeded("precision"):
        hidden, last = nn.Linear(SIDE * SIDE, 64), nn.Linear(64, CLASSES)
    model = nn.Sequential(nn.Flatten(), hidden, nn.ReLU(), last)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(STEPS):
        optimizer.zero_grad()
        F.cross_entropy(model(x[:TRAINED]), y[:TRAINED]).backward()
        optimizer.step()
    with torch.no_grad():
        for parameter in last.parameters():
            parameter.mul_(SCALE)
    return model.to(context.device), ImageData.of(x[TRAINED:], y[TRAINED:], classes=CLASSES)


def _images(context: Context) -> tuple[Tensor, Tensor]:
    generator = context.generator("precision")
    count = TRAINED + TESTED
    patterns = torch.rand(CLASSES, 1, SIDE, SIDE, generator=generator)
    labels = torch.arange(count) % CLASSES
    noise = torch.randn(count, 1, SIDE, SIDE, generator=generator)
    return (0.25 + 0.5 * patterns[labels] + 0.2 * noise).clamp(0, 1), labels
