"""Stored perturbations (ATTA) against loops written out by hand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from dat.attacks import PGD, Attack, Free
from dat.core.rng import Streams
from dat.core.settings import SettingError
from dat.core.threat import ThreatModel
from dat.data import Augmentation, CropWindows, ImageData, Mix
from dat.data.augment import PADDING
from dat.distributed import World
from dat.objectives import TRADES, Objective, Smooth, Stability
from dat.optim import SGD, Constant
from dat.train import Callback, Trainer
from dat.train.atta import ATTA, DrawnImages, PerturbationStore
from dat.train.guard import SkippedSteps
from dat.train.step import StepReport
from tests.trainers import make_trainer

EPS, RATE, BATCH = 0.1, 0.3, 12
THREAT = ThreatModel(eps=EPS)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World.join() as joined:
        yield joined


def data(count: int = 36, size: int = 4) -> ImageData:
    images = torch.rand(count, 1, size, size, generator=torch.Generator().manual_seed(1))
    return ImageData.of(images, torch.arange(count) % 3)


def net(size: int = 4) -> nn.Module:
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        layers = nn.Linear(size**2, 20), nn.Tanh(), nn.Linear(20, 3)
    return nn.Sequential(nn.Flatten(), *layers).double()


class Doubled(nn.Module):
    """In double precision no sign of a gradient flips by rounding."""

    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.net = net(size)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.net(x.double())
        return logits


def trainer(world: World, model: nn.Module, **settings: Any) -> Trainer:
    plain: dict[str, Any] = {
        "data": data(),
        "threat": THREAT,
        "attack": PGD(steps=1, carry=True),
        "optimizer": SGD(lr=RATE, momentum=0.0, weight_decay=0.0),
        "schedule": Constant(),
        "epochs": 5,
        "batch": BATCH,
        "world": world,
    }
    return make_trainer(model=model, **(plain | settings))


def rounded(delta: Tensor, norm: str) -> Tensor:
    """Round to 127 levels of eps, or of the image's largest value."""
    if norm == "linf":
        return torch.round(delta / EPS * 127) * (EPS / 127)
    largest = delta.abs().max().clamp_min(1e-12)  # a window may miss an image of 4 x 4
    return torch.round(delta / largest * 127) * (largest / 127)


def moved(image: Tensor, uniform: Tensor, *, back: bool) -> Tensor:
    """Crop and flip one image pixel by pixel, or undo it (`back`); NaN outside of the image."""
    down, right = (int(value * 9) - PADDING for value in uniform[:2].tolist())
    _, height, width = image.shape
    result = torch.full_like(image, float("nan"))
    for row in range(height):
        for column in range(width):
            i, j = row + down, column + right
            shown = width - 1 - column if uniform[2] >= 0.5 else column
            if 0 <= i < height and 0 <= j < width:
                if back:
                    result[:, i, j] = image[:, row, shown]
                else:
                    result[:, row, shown] = image[:, i, j]
    return result


def by_hand(
    model: nn.Module, made: Trainer, *, augmented: bool, reset: int, norm: str = "linf"
) -> None:
    """PGD-1 that starts from a dictionary of perturbations, and plain SGD."""
    images, threat = data(), ThreatModel(norm=norm, eps=EPS)
    kept: dict[int, Tensor] = {}
    for epoch in range(made.epochs):
        if reset and epoch % reset == 0:
            kept.clear()
        for step in range(made.batches.steps):
            index = made.batches.sources[0].sampler.draw(epoch, step, 0)
            x, y = images.images[index], images.labels[index]
            assert isinstance(x, Tensor)
            draws = Streams.of(0, "augment", epoch, step, index=index)
            uniform = draws.uniform(torch.Size((BATCH, 3)))
            start = threat.random_start(x, Streams.of(0, "attack", epoch, step, index=index))
            if augmented:
                pairs = zip(x, uniform, strict=True)
                x = torch.stack([moved(image, values, back=False) for image, values in pairs])
                x = x.nan_to_num(0.0)
                start = threat.random_start(x, Streams.of(0, "attack", epoch, step, index=index))
            for i, number in enumerate(index.tolist()):
                if number in kept:
                    delta = kept[number]
                    if augmented:
                        delta = moved(delta, uniform[i], back=False).nan_to_num(0.0)
                    start[i] = threat.project((x[i] + delta)[None], x[i : i + 1])[0]
            at = start.requires_grad_()
            (gradient,) = torch.autograd.grad(F.cross_entropy(model(at), y), at)
            x_adv = threat.ascend(at.detach(), gradient, EPS / 2, x)
            for i, number in enumerate(index.tolist()):
                delta = x_adv[i] - x[i]
                if augmented:
                    visible = moved(delta, uniform[i], back=True)
                    before = kept.get(number, torch.zeros(()))
                    delta = torch.where(visible.isnan(), before, visible)
                kept[number] = rounded(delta, norm)
            model.zero_grad()
            F.cross_entropy(model(x_adv), y).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.sub_(RATE * parameter.grad)


@pytest.mark.parametrize("augmented", [False, True])
@pytest.mark.parametrize("reset", [0, 2])
@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_five_epochs_equal_the_loop_by_hand(
    world: World, augmented: bool, reset: int, norm: str
) -> None:
    model, other = Doubled(), Doubled()
    made = trainer(
        *(world, model),
        threat=ThreatModel(norm=norm, eps=EPS),
        attack=PGD(steps=1, carry=True, reset=reset),
        augmentation=Augmentation(kind="crop-flip" if augmented else "none"),
    )
    made.fit()
    by_hand(other, made, augmented=augmented, reset=reset, norm=norm)
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


def test_atta_differs_from_plain_pgd(world: World) -> None:
    weights = []
    for attack in (PGD(steps=1, step_size=EPS / 2), PGD(steps=1, carry=True)):
        trainer(world, model := Doubled(), attack=attack).fit()
        weights.append(nn.utils.parameters_to_vector(model.parameters()).detach())
    assert not torch.allclose(weights[0], weights[1], rtol=1e-3)


def windows(count: int, seed: int, kind: str = "crop-flip") -> CropWindows:
    draws = Streams.of(seed, "augment", index=torch.arange(count))
    crops = Augmentation(kind=kind).windows(draws)
    assert crops is not None
    return crops


@settings(max_examples=30)
@given(
    seed=st.integers(0, 10**6),
    height=st.integers(1, 11),
    width=st.integers(1, 11),
    kind=st.sampled_from(["crop", "crop-flip"]),
    as_bytes=st.booleans(),
)
def test_crops_are_undone_exactly(
    seed: int, height: int, width: int, kind: str, as_bytes: bool
) -> None:
    crops = windows(6, seed, kind)
    x = torch.arange(1, 1 + 6 * 2 * height * width).reshape(6, 2, height, width)
    x = x.to(torch.uint8) if as_bytes else x.float()  # a C kernel crops bytes
    visible = crops.visible_mask(height, width)
    assert torch.equal(crops.inverse().apply(crops.apply(x)), x * visible)
    inside = crops.apply(torch.ones_like(x)) > 0
    assert torch.equal(crops.apply(crops.inverse().apply(x)), x * inside)
    assert all(torch.equal(*pair) for pair in zip(crops.inverse().inverse(), crops, strict=True))


def make_store(
    count: int = 5, *, norm: str = "linf", reset: int = 0, size: int = 6
) -> PerturbationStore:
    return PerturbationStore(
        torch.arange(count) * 3,
        torch.zeros((count, 1, size, size), dtype=torch.int8),
        torch.zeros(count),
        torch.full((count,), -1, dtype=torch.int32),
        ThreatModel(norm=norm, eps=EPS),
        reset,
    )


def ball(count: int, norm: str, seed: int, size: int = 6) -> tuple[Tensor, Tensor]:
    """Gray images, and random perturbations of them."""
    x = torch.full((count, 1, size, size), 0.5)
    draws = Streams.of(seed, "test", index=torch.arange(count))
    return x, ThreatModel(norm=norm, eps=EPS).random_start(x, draws) - x


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_a_byte_is_precise_enough(norm: str) -> None:
    store, (x, delta) = make_store(norm=norm), ball(5, norm, 1)
    drawn = DrawnImages(store.numbers, None, 0)
    store.keep(delta, drawn)
    stored = store.start(x, x, drawn) - x
    scale = EPS if norm == "linf" else float(delta.abs().max())
    assert 0 < (stored - delta).abs().max() <= scale / 254 + 1e-6
    assert (norm == "linf") is (scale > EPS / 1.5)


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_invisible_pixels_keep_their_perturbation(norm: str) -> None:
    store, (x, delta) = make_store(norm=norm), ball(5, norm, 1)
    store.keep(delta, DrawnImages(store.numbers, None, 0))
    before = store.start(x, x, DrawnImages(store.numbers, None, 1)) - x
    crops = windows(5, 3)
    store.keep(torch.zeros_like(delta), DrawnImages(store.numbers, crops, 1))
    after = store.start(x, x, DrawnImages(store.numbers, None, 2)) - x
    visible = crops.visible_mask(6, 6)
    assert (after[visible] == 0).all()
    tolerance = 0.0 if norm == "linf" else EPS / 127
    torch.testing.assert_close(after[~visible], before[~visible], rtol=0, atol=tolerance + 1e-7)


def test_a_reset_drops_earlier_perturbations() -> None:
    store, (x, delta) = make_store(reset=3), ball(5, "linf", 1)
    fresh, numbers = x + 0.01, torch.tensor([0, 6])
    store.keep(delta[[0, 2]], DrawnImages(numbers, None, 4))
    for epoch, known in ((4, True), (5, True), (6, False)):
        start = store.start(x, fresh, DrawnImages(store.numbers, None, epoch))
        assert torch.equal(start[[1, 3, 4]], fresh[[1, 3, 4]])
        assert torch.equal(start[[0, 2]], fresh[[0, 2]]) is not known


def test_the_last_duplicate_in_a_batch_is_stored() -> None:
    store, (x, delta) = make_store(), ball(4, "linf", 1)
    store.keep(delta, DrawnImages(torch.tensor([3, 9, 3, 3]), None, 0))
    stored = store.start(x, x, DrawnImages(store.numbers[1:2].repeat(4), None, 1)) - x
    torch.testing.assert_close(stored[0], delta[3], rtol=0, atol=EPS / 200)


def test_the_states_of_several_workers_are_merged() -> None:
    """Two workers had images 0 to 9 and 6 to 15; if both had an image, the later epoch counts."""
    x, delta = ball(20, "linf", 1)
    states = []
    for rows, epoch in ((torch.arange(10), 1), (torch.arange(6, 16), 2)):
        store = replace(make_store(10), numbers=rows)
        store.keep(delta[rows] * epoch / 2, DrawnImages(rows, None, epoch))
        states.append(store.state())
    merged = replace(make_store(18), numbers=torch.arange(2, 20))
    merged.restore(reversed(states))
    assert merged.epochs.tolist() == [1] * 4 + [2] * 10 + [-1] * 4
    stored = merged.start(x[:18], x[:18], DrawnImages(merged.numbers, None, 3)) - x[:18]
    torch.testing.assert_close(stored[:4], delta[2:6] / 2, rtol=0, atol=EPS / 200)
    torch.testing.assert_close(stored[4:14], delta[6:16], rtol=0, atol=EPS / 200)


class StoreCounts(Callback):
    """Counts the images stored in the current epoch, after every step."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def on_step_end(self, trainer: Trainer, epoch: int, report: StepReport) -> None:
        store = trainer.parts.one(ATTA).store
        self.counts.append(int((store.epochs == epoch).sum()))


def test_labelled_and_unlabelled_images_have_their_own_perturbations(world: World) -> None:
    stored = StoreCounts()
    made = trainer(
        *(world, Doubled()),
        unlabelled=data(24).without_labels(),
        mix=Mix(share=1 / 3),
        objective=TRADES(),
        epochs=1,
        callbacks=[stored],
    )
    made.fit()
    assert stored.counts == [12, 24, 36, 48]
    store = made.parts.one(ATTA).store
    assert torch.equal(store.numbers, torch.arange(60)) and len(store.deltas) == 60


@pytest.mark.parametrize("attack", [PGD(), Free()])
def test_without_carry_nothing_is_stored(world: World, attack: Attack) -> None:
    made = trainer(world, Doubled(), attack=attack, epochs=1)
    made.fit()
    assert not isinstance(made.worker.inner, ATTA)


@pytest.mark.parametrize(
    ("augmentation", "named"),
    [
        (Augmentation(kind="resized-crop"), "data.augmentation = resized-crop"),
        (Augmentation(kind="crop", cutout=2), "data.cutout = 2"),
        (Augmentation(randaugment=1), "data.randaugment = 1"),
    ],
)
def test_augmentations_that_cannot_be_undone_are_refused(
    world: World, augmentation: Augmentation, named: str
) -> None:
    with pytest.raises(SettingError, match=f"attack.carry = true: .* not {named}; use data.augm"):
        trainer(world, Doubled(), augmentation=augmentation)
    trainer(world, Doubled(), attack=PGD(), augmentation=Augmentation(kind="crop", cutout=2))


def test_restarts_are_refused() -> None:
    with pytest.raises(SettingError, match="restarts = 2: carry keeps one perturbation"):
        PGD(carry=True, restarts=2)


@pytest.mark.parametrize("objective", [Smooth(), Stability()])
def test_noisy_copies_cannot_stop_early(world: World, objective: Objective) -> None:
    with pytest.raises(SettingError, match=r"attack\.patience: the noisy copies"):
        trainer(world, Doubled(), attack=PGD(patience=0), objective=objective)


def test_early_stopping_needs_labels_and_fixed_statistics(world: World) -> None:
    with pytest.raises(SettingError, match=r"attack\.patience = 1: .* train\.attack_bn eval"):
        trainer(world, Doubled(), attack=PGD(patience=1), attack_bn="train")
    with pytest.raises(ValueError, match="needs labels, and some images have none"):
        trainer(
            *(world, Doubled()),
            attack=PGD(patience=1),
            unlabelled=data().without_labels(),
            objective=TRADES(),
        )


def test_a_skipped_step_stores_nothing(world: World) -> None:
    class Breaks(Doubled):
        passes = 0

        def forward(self, x: Tensor) -> Tensor:
            self.passes += self.training
            return super().forward(x) * (float("inf") if self.training and self.passes == 2 else 1)

    stored = StoreCounts()
    made = trainer(world, Breaks(), guard="skip", epochs=1, callbacks=[stored])
    made.fit()
    assert made.parts.one(SkippedSteps).steps == [[0, 1]] and stored.counts == [12, 24]
