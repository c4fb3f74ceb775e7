"""Carried perturbations against loops written out by hand."""

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
from dat.comm import World
from dat.data import Augmentation, ImageData, Mix, Windows
from dat.data.augment import PADDING
from dat.fields import SettingError
from dat.objectives import TRADES, Objective, Smooth, Stability
from dat.optim import SGD, Constant
from dat.rng import Draws
from dat.threat import ThreatModel
from dat.train import Listener, Trainer
from dat.train.carried import Carried, Visit
from dat.train.step import StepReport

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
    return Trainer(model=model, **(plain | settings))


def rounded(delta: Tensor, norm: str) -> Tensor:
    """To whole 127ths of eps, or of the largest value of the image."""
    if norm == "linf":
        return torch.round(delta / EPS * 127) * (EPS / 127)
    largest = delta.abs().max().clamp_min(1e-12)  # a window may miss an image of 4 x 4
    return torch.round(delta / largest * 127) * (largest / 127)


def moved(image: Tensor, luck: Tensor, *, back: bool) -> Tensor:
    """One image, pixel by pixel: as crop-flip cuts it out, or put back into its frame; NaN where
    there is nothing."""
    down, right = (int(it * 9) - PADDING for it in luck[:2].tolist())
    _, height, width = image.shape
    found = torch.full_like(image, float("nan"))
    for row in range(height):
        for column in range(width):
            i, j = row + down, column + right
            shown = width - 1 - column if luck[2] >= 0.5 else column
            if 0 <= i < height and 0 <= j < width:
                if back:
                    found[:, i, j] = image[:, row, shown]
                else:
                    found[:, row, shown] = image[:, i, j]
    return found


def by_hand(
    model: nn.Module, made: Trainer, *, augmented: bool, reset: int, norm: str = "linf"
) -> None:
    """PGD-1 that goes on from a dictionary of perturbations, and plain SGD."""
    whole, threat = data(), ThreatModel(norm=norm, eps=EPS)
    kept: dict[int, Tensor] = {}
    for epoch in range(made.epochs):
        if reset and epoch % reset == 0:
            kept.clear()
        for step in range(made.supply.steps):
            index = made.supply.sources[0].plan.draw(epoch, step, 0)
            x, y = whole.images[index], whole.labels[index]
            assert isinstance(x, Tensor)
            luck = Draws.of(0, "augment", epoch, step, index=index).uniform(torch.Size((BATCH, 3)))
            start = threat.random_start(x, Draws.of(0, "attack", epoch, step, index=index))
            if augmented:
                x = torch.stack([moved(*it, back=False) for it in zip(x, luck, strict=True)])
                x = x.nan_to_num(0.0)
                start = threat.random_start(x, Draws.of(0, "attack", epoch, step, index=index))
            for i, number in enumerate(index.tolist()):
                if number in kept:
                    delta = kept[number]
                    if augmented:
                        delta = moved(delta, luck[i], back=False).nan_to_num(0.0)
                    start[i] = threat.project((x[i] + delta)[None], x[i : i + 1])[0]
            at = start.requires_grad_()
            (gradient,) = torch.autograd.grad(F.cross_entropy(model(at), y), at)
            x_adv = threat.ascend(at.detach(), gradient, EPS / 2, x)
            for i, number in enumerate(index.tolist()):
                delta = x_adv[i] - x[i]
                if augmented:
                    seen = moved(delta, luck[i], back=True)
                    delta = torch.where(seen.isnan(), kept.get(number, torch.zeros(())), seen)
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


def test_it_is_another_attack_than_plain_pgd(world: World) -> None:
    found = []
    for attack in (PGD(steps=1, step_size=EPS / 2), PGD(steps=1, carry=True)):
        trainer(world, model := Doubled(), attack=attack).fit()
        found.append(torch.cat([it.detach().flatten() for it in model.parameters()]))
    assert not torch.allclose(found[0], found[1], rtol=1e-3)


def windows(count: int, seed: int, kind: str = "crop-flip") -> Windows:
    draws = Draws.of(seed, "augment", index=torch.arange(count))
    found = Augmentation(kind=kind).windows(draws)
    assert found is not None
    return found


@settings(derandomize=True, deadline=None, max_examples=30)
@given(
    seed=st.integers(0, 10**6),
    height=st.integers(1, 11),
    width=st.integers(1, 11),
    kind=st.sampled_from(["crop", "crop-flip"]),
    whole=st.booleans(),
)
def test_what_is_cut_out_comes_back_to_its_place(
    seed: int, height: int, width: int, kind: str, whole: bool
) -> None:
    there = windows(6, seed, kind)
    x = torch.arange(1, 1 + 6 * 2 * height * width).reshape(6, 2, height, width)
    x = x.to(torch.uint8) if whole else x.float()  # bytes are cut out in C
    seen = there.seen(height, width)
    assert torch.equal(there.back().cut(there.cut(x)), x * seen)
    assert torch.equal(there.cut(there.back().cut(x)), x * (there.cut(torch.ones_like(x)) > 0))
    assert all(torch.equal(*pair) for pair in zip(there.back().back(), there, strict=True))


def cache(count: int = 5, *, norm: str = "linf", reset: int = 0, size: int = 6) -> Carried:
    return Carried(
        torch.arange(count) * 3,
        torch.zeros((count, 1, size, size), dtype=torch.int8),
        torch.zeros(count),
        torch.full((count,), -1, dtype=torch.int32),
        ThreatModel(norm=norm, eps=EPS),
        reset,
    )


def ball(count: int, norm: str, seed: int, size: int = 6) -> tuple[Tensor, Tensor]:
    """Grey images, and perturbations of them."""
    x = torch.full((count, 1, size, size), 0.5)
    draws = Draws.of(seed, "test", index=torch.arange(count))
    return x, ThreatModel(norm=norm, eps=EPS).random_start(x, draws) - x


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_a_byte_is_precise_enough(norm: str) -> None:
    kept, (x, delta) = cache(norm=norm), ball(5, norm, 1)
    visit = Visit(kept.numbers, None, 0)
    kept.keep(delta, visit)
    found = kept.start(x, x, visit) - x
    scale = EPS if norm == "linf" else float(delta.abs().max())
    assert 0 < (found - delta).abs().max() <= scale / 254 + 1e-6
    assert (norm == "linf") is (scale > EPS / 1.5)


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_pixels_that_are_out_of_sight_stay_as_they_were(norm: str) -> None:
    kept, (x, delta) = cache(norm=norm), ball(5, norm, 1)
    kept.keep(delta, Visit(kept.numbers, None, 0))
    before = kept.start(x, x, Visit(kept.numbers, None, 1)) - x
    there = windows(5, 3)
    kept.keep(torch.zeros_like(delta), Visit(kept.numbers, there, 1))
    after = kept.start(x, x, Visit(kept.numbers, None, 2)) - x
    seen = there.seen(6, 6)
    assert (after[seen] == 0).all()
    off = 0.0 if norm == "linf" else EPS / 127
    torch.testing.assert_close(after[~seen], before[~seen], rtol=0, atol=off + 1e-7)


def test_only_what_was_kept_since_the_reset_counts() -> None:
    kept, (x, delta) = cache(reset=3), ball(5, "linf", 1)
    fresh, some = x + 0.01, torch.tensor([0, 6])
    kept.keep(delta[[0, 2]], Visit(some, None, 4))
    for epoch, known in ((4, True), (5, True), (6, False)):
        start = kept.start(x, fresh, Visit(kept.numbers, None, epoch))
        assert torch.equal(start[[1, 3, 4]], fresh[[1, 3, 4]])
        assert torch.equal(start[[0, 2]], fresh[[0, 2]]) is not known


def test_of_an_image_that_is_there_twice_the_last_is_kept() -> None:
    kept, (x, delta) = cache(), ball(4, "linf", 1)
    kept.keep(delta, Visit(torch.tensor([3, 9, 3, 3]), None, 0))
    found = kept.start(x, x, Visit(kept.numbers[1:2].repeat(4), None, 1)) - x
    torch.testing.assert_close(found[0], delta[3], rtol=0, atol=EPS / 200)


def test_what_all_workers_kept_is_put_together_by_the_images_numbers() -> None:
    """Two workers had images 0 to 9 and 6 to 15; of those that both had, the later counts."""
    x, delta = ball(20, "linf", 1)
    caches = []
    for rows, epoch in ((torch.arange(10), 1), (torch.arange(6, 16), 2)):
        one = replace(cache(10), numbers=rows)
        one.keep(delta[rows] * epoch / 2, Visit(rows, None, epoch))
        caches.append(one.state())
    there = replace(cache(18), numbers=torch.arange(2, 20))
    there.restore(reversed(caches))
    assert there.epochs.tolist() == [1] * 4 + [2] * 10 + [-1] * 4
    found = there.start(x[:18], x[:18], Visit(there.numbers, None, 3)) - x[:18]
    torch.testing.assert_close(found[:4], delta[2:6] / 2, rtol=0, atol=EPS / 200)
    torch.testing.assert_close(found[4:14], delta[6:16], rtol=0, atol=EPS / 200)


class Watches(Listener):
    """Looks at the cache after every step."""

    def __init__(self) -> None:
        self.kept: list[int] = []

    def step_ended(self, trainer: Trainer, epoch: int, report: StepReport) -> None:
        carried = trainer.worker.carried
        assert carried is not None
        self.kept.append(int((carried.epochs == epoch).sum()))


def test_labelled_and_unlabelled_images_have_each_their_own(world: World) -> None:
    seen = Watches()
    made = trainer(
        *(world, Doubled()),
        unlabelled=data(24).without_labels(),
        mix=Mix(share=1 / 3),
        objective=TRADES(),
        epochs=1,
        listeners=[seen],
    )
    made.fit()
    assert seen.kept == [12, 24, 36, 48]
    carried = made.worker.carried
    assert carried is not None
    assert torch.equal(carried.numbers, torch.arange(60)) and len(carried.deltas) == 60


@pytest.mark.parametrize("attack", [PGD(), Free()])
def test_without_carry_nothing_is_kept(world: World, attack: Attack) -> None:
    made = trainer(world, Doubled(), attack=attack, epochs=1)
    made.fit()
    assert made.worker.carried is None


@pytest.mark.parametrize(
    ("augmentation", "named"),
    [
        (Augmentation(kind="resized-crop"), "data.augmentation = resized-crop"),
        (Augmentation(kind="crop", cutout=2), "data.cutout = 2"),
        (Augmentation(randaugment=1), "data.randaugment = 1"),
    ],
)
def test_what_cannot_be_undone_is_refused(
    world: World, augmentation: Augmentation, named: str
) -> None:
    with pytest.raises(SettingError, match=f"attack.carry = true: .* not {named}; use data.augm"):
        trainer(world, Doubled(), augmentation=augmentation)
    trainer(world, Doubled(), attack=PGD(), augmentation=Augmentation(kind="crop", cutout=2))


def test_restarts_are_refused() -> None:
    with pytest.raises(SettingError, match="restarts = 2: only one perturbation"):
        PGD(carry=True, restarts=2)


@pytest.mark.parametrize("objective", [Smooth(), Stability()])
def test_noisy_copies_do_not_leave_one_by_one(world: World, objective: Objective) -> None:
    with pytest.raises(SettingError, match=r"attack\.patience: the noisy copies"):
        trainer(world, Doubled(), attack=PGD(patience=0), objective=objective)


def test_who_leaves_early_needs_labels_and_statistics_that_stand_still(world: World) -> None:
    with pytest.raises(SettingError, match=r"attack\.patience = 1: .* train\.attack_bn eval"):
        trainer(world, Doubled(), attack=PGD(patience=1), attack_bn="train")
    with pytest.raises(ValueError, match="must know the right answers"):
        trainer(
            *(world, Doubled()),
            attack=PGD(patience=1),
            unlabelled=data().without_labels(),
            objective=TRADES(),
        )


def test_a_step_that_is_left_out_is_not_remembered(world: World) -> None:
    class Breaks(Doubled):
        passes = 0

        def forward(self, x: Tensor) -> Tensor:
            self.passes += self.training
            return super().forward(x) * (float("inf") if self.training and self.passes == 2 else 1)

    seen = Watches()
    made = trainer(world, Breaks(), guard="skip", epochs=1, listeners=[seen])
    made.fit()
    assert made.left_out == [[0, 1]] and seen.kept == [12, 24]
