"""What is computed on the CPU and on the simulated device, and has to agree: every registered
component, and whole training runs. A case maps a device to tensors on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dat import data
from dat.attacks import ATTACKS, Attack, attack_mode, on
from dat.core import losses, precision
from dat.core.rng import Streams, seeded
from dat.core.smoothing import Smoothed
from dat.core.threat import ThreatModel
from dat.distributed import QUANTIZERS, Quantizer, World
from dat.distributed.wire_format import Slot, message_layout, spans
from dat.distributed.world import SingleWorker
from dat.evaluation.certification.sampler import NoiseSampler, SampleRange
from dat.kernels.quantize.codec import Codec
from dat.models import MODELS, Resized, alike, build_model, fold, normalized
from dat.objectives import OBJECTIVES, Batch, Objective
from dat.optim import EMA, OPTIMIZERS, OptimizerSettings
from dat.optim.classic_lars import ClassicLARS
from dat.optim.clip import clip_gradient
from dat.train.engine import Compute, Engine
from tests.attacks import cases as attacks
from tests.optim.cases import layers
from tests.optim.test_contract import CONFIGS, label

Case = Callable[[torch.device], Any]
CLASSES, IMAGES = 4, 6
NORMS = ("linf", "l2")
ENGINES: list[dict[str, Any]] = [
    *({}, {"layout": "given"}, {"layout": "channels-last"}, {"fold": False}),
    *({"recompute": True}, {"precision": "bfloat16"}),
]
BITS = (2, 3, 4, 8, 16, 32)
LENGTH = 1007


def image_batch(device: torch.device, side: int = 8, channels: int = 3) -> tuple[Tensor, Tensor]:
    x = attacks.images((IMAGES, channels, side, side))
    return x.to(device), (torch.arange(IMAGES) % CLASSES).to(device)


def network(device: torch.device, name: str = "cnn", **settings: Any) -> nn.Module:
    return build_model(name, CLASSES, width=4, seed=0, **settings).to(device)


def streams(device: torch.device) -> Streams:
    return Streams.of(0, "test", index=torch.arange(IMAGES, device=device) * 2**33)


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def random_numbers(device: torch.device) -> Any:
    shape = torch.Size((IMAGES, 5, 3))
    numbers = [streams(device).uniform(shape), streams(device).normal(shape)]
    with seeded(device, 0, "test"):
        return [*numbers, torch.rand(3, device=device)]


def threat_model(norm: str, device: torch.device) -> Any:
    x, _ = image_batch(device)
    threat, draws = ThreatModel(norm=norm, eps=0.1), streams(device)
    start, edge = threat.random_start(x, draws), threat.random_boundary_start(x, draws)
    moved = threat.ascend(start, edge - x, 0.05, x)
    gap = (edge - x).flatten(1).sum(1)
    step = threat.step_to_hyperplane(x, edge - x, gap)
    return start, edge, moved, threat.size(moved, x), step


def attack(made: Attack, kind: str, norm: str, device: torch.device) -> Any:
    x, _ = image_batch(device)
    model = network(device)
    with attack_mode(model):
        goal = attacks.goal(kind, model, attacks.answers(model, x))
        return made(goal, x, ThreatModel(norm=norm, eps=0.1), streams(device))


def attack_on_a_model(device: torch.device) -> Any:
    x, y = image_batch(device)
    atk = on(network(device), "pgd-3", eps=0.1, restarts=2)
    return atk(x, y), atk(x, y)


def objective(made: Objective, device: torch.device) -> Any:
    x, y = image_batch(device)
    model = network(device)
    batch = Batch.of(x, y, threat=ThreatModel(eps=0.1))
    with attack_mode(model):
        x_adv = attacks.cheap(ATTACKS["pgd"]())(made.phi(model, batch), x, batch.threat)
    outcome = made.loss(model, batch, x_adv)
    outcome.loss.sum().backward()
    return outcome.loss, outcome.logits, gradients(model)


def optimizer(settings: OptimizerSettings, device: torch.device) -> Any:
    model = layers(torch.float32).to(device)
    made = settings(model)
    clip_gradient(made, 1.0)
    ema = EMA(model, 0.5)
    for step in range(3):
        draws = torch.Generator().manual_seed(step)
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=draws).to(device)
        made.step()
        ema.update(model)
    return list(model.parameters()), list(ema.module.parameters())


def classic_lars(device: torch.device) -> Any:
    model = layers(torch.float32).to(device)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    ClassicLARS(model.parameters(), lr=0.1).step()
    return list(model.parameters())


def augmentation(settings: dict[str, Any], device: torch.device) -> Any:
    x, _ = image_batch(device, 32)
    made = data.Augmentation(**settings)
    windows = made.windows(streams(device))
    seen = [] if windows is None else [windows.visible_mask(32, 32), windows.inverse().apply(x)]
    return seen, made(x, streams(device)), made((255 * x).to(torch.uint8), streams(device))


def model(name: str, device: torch.device) -> Any:
    x, _ = image_batch(device, 32)
    made = normalized(network(device, name), (0.5,) * 3, (0.2,) * 3).to(device)
    made(x).square().sum().backward()
    changed = gradients(made)
    with attack_mode(made):
        folded = fold(made, x, quick=False)
        assert alike(made, folded.network, x)
        return changed, folded.network(x), list(made.buffers())


def resized(device: torch.device) -> Any:
    x, _ = image_batch(device, channels=1)
    return Resized(network(device), size=12, channels=3)(x)


def alone(device: torch.device) -> World:
    """A worker without others, and without a process group."""
    return SingleWorker(0, 1, device, "none", False)


def engine(compute: Compute, device: torch.device) -> Any:
    x, _ = image_batch(device)
    name = "cnn" if compute.layout == "channels-last" else "preact-resnet18"
    made = Engine.of(network(device, name), compute, x, work=0)
    x = made.to_memory_format(x).requires_grad_(True)
    attacked = made.cast(made.target(eval_mode=True))
    with attack_mode(made.model):
        logits = attacked(x)
    with made.updating():
        made.cast(made.model)(x).square().sum().backward()
    return logits, x.grad, gradients(made.model), list(made.checked(alone(device)).model.buffers())


def every_loss(device: torch.device) -> Any:
    x, y = image_batch(device)
    logits, other = network(device)(x), x.flatten(1)[:, :CLASSES]
    targets = (y + 1) % CLASSES
    of_labels = (losses.cross_entropy, losses.boosted_cross_entropy, losses.margin, losses.dlr)
    of_targets = (losses.targeted_dlr, losses.targeted_margin)
    return (
        [loss(logits, y) for loss in of_labels],
        [loss(logits, y, targets) for loss in of_targets],
        losses.kl_divergence(logits, other),
    )


def low_precision(dtype: torch.dtype, device: torch.device) -> Any:
    x, y = image_batch(device)
    made = network(device).eval()
    lower = precision.in_precision(made, dtype)
    precision.check_independent(lower, x)
    x.requires_grad_(True)
    logits = lower(x)
    losses.cross_entropy(logits, y).sum().backward()
    return logits, x.grad


def smoothed(device: torch.device) -> Any:
    x, _ = image_batch(device)
    made = Smoothed(network(device), sigma=0.2, copies=3)
    return made(x), made.settled(x)(x)


def noise(dtype: str, device: torch.device) -> Any:
    x, y = image_batch(torch.device("cpu"))
    sampler = NoiseSampler(
        *(network(device), data.ImageData.of(x, y)),
        sigma=0.1,
        classes=CLASSES,
        device=device,
        precision=dtype,
        batch=64,
    )
    return sampler.count("test", [SampleRange(0, 3, 70), SampleRange(2, 0, 32)]).to(device)


def quantizer(made: Quantizer, device: torch.device) -> Any:
    """The message, and its values written, added and subtracted."""
    slots = [Slot((10, 100), 0), Slot((7,), 1000)]
    layout = message_layout(spans(slots, made), made.bits)
    x = torch.randn(LENGTH, generator=torch.Generator().manual_seed(0)).to(device)
    message, measured = (torch.zeros(layout.size, dtype=torch.uint8, device=device) for _ in "12")
    codec, outs = Codec(made), [x.clone() for _ in range(3)]
    codec.encode(x, layout, message, 2**62 + 12345)
    codec.measure(x, layout, measured)
    for out, mode in zip(outs, ("set", "add", "subtract"), strict=True):
        codec.decode(message, layout, out, mode)
    return message, measured, outs


def batches(device: torch.device) -> Any:
    x, y = image_batch(torch.device("cpu"))
    images = data.ImageData.of((255 * x).to(torch.uint8), y)
    sampler = data.RandomPartitionSampler(IMAGES, 3, parts=1, workers=1, seed=0)
    source = data.BatchSource.of(images, sampler, 0)
    drawn = data.Batches([source], sampler.steps).draw(0, 0, device)
    return [*drawn, *images.batch(torch.tensor([4, 1]), device)]


def cases() -> Iterator[tuple[str, Case]]:
    """Every component but the networks."""
    yield "random numbers", random_numbers
    for norm in NORMS:
        yield f"threat model {norm}", partial(threat_model, norm)
        for name, kind in ATTACKS.items():
            made = attacks.cheap(kind())
            for goal in attacks.goals_of(made):
                yield f"attack {name} {goal} {norm}", partial(attack, made, goal, norm)
    yield "attack on a model", attack_on_a_model
    for name, to_minimize in OBJECTIVES.items():
        yield f"objective {name}", partial(objective, to_minimize())
    assert {type(settings) for settings in CONFIGS} == set(OPTIMIZERS.values())
    for settings in CONFIGS:
        yield f"optimizer {label(settings)}", partial(optimizer, settings)
    yield "optimizer ClassicLARS", classic_lars
    changes: list[dict[str, Any]] = [
        *({"kind": kind} for kind in data.AUGMENTATIONS),
        *({"cutout": 8}, {"randaugment": 8}, {"jitter": 0.4}, {"erasing": 1.0}),
    ]
    for change in changes:
        yield f"augmentation {change}", partial(augmentation, change)
    yield "losses", every_loss
    for dtype in (torch.bfloat16, torch.float16):
        yield f"precision {dtype}", partial(low_precision, dtype)
    yield "smoothing", smoothed
    for name in ("float32", "bfloat16"):
        yield f"noise {name}", partial(noise, name)
    for name, family in QUANTIZERS.items():
        for bits in BITS:
            yield f"quantizer {name} {bits}", partial(quantizer, family(bits=bits))
        yield (
            f"quantizer {name} nearest",
            partial(quantizer, family(bits=4, rounding="nearest")),
        )
    yield "batches", batches


def model_cases() -> Iterator[tuple[str, Case]]:
    """Every network, and the engine."""
    for name in MODELS:
        yield f"model {name}", partial(model, name)
    yield "model resized", resized
    for choices in ENGINES:
        compute = Compute(kernels=False, **choices)
        yield f"engine {choices}", partial(engine, compute)
