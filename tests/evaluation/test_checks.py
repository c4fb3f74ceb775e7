"""Signs of gradient masking: reported where they occur, and nowhere else."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dat.attacks import PGD, Square
from dat.attacks.suites import suite_of
from dat.core.threat import ThreatModel
from dat.data import ImageData
from dat.distributed import World
from dat.evaluation import SuiteResult, assess
from dat.evaluation.checks import (
    check_attacks,
    check_curve,
    check_gradients,
    check_logits,
    check_square,
)
from dat.models import build_model
from tests.evaluation.cases import THREAT, THREATS, Noisy, everything

Answer = Callable[[Tensor], Any]


class Net(nn.Module):
    """Whatever a function makes of the images."""

    def __init__(self, answer: Answer, net: nn.Module | None = None) -> None:
        super().__init__()
        self.net, self.answer = net, answer

    def forward(self, x: Tensor) -> Any:
        return self.answer(x)


def after(net: nn.Module, change: Callable[[Tensor], Any]) -> nn.Module:
    return Net(lambda x: change(net(x)), net)


def before(net: nn.Module, change: Callable[[Tensor], Tensor]) -> nn.Module:
    return Net(lambda x: net(change(x)), net)


def warnings(model: nn.Module, data: ImageData, world: World) -> tuple[str, ...]:
    attacks = [suite_of("square", {"square": Square(queries=1)})]
    return assess(model, data, attacks, threat=THREAT, world=world).warnings


def test_an_ordinary_network_gets_no_warning(
    model: nn.Module, data: ImageData, world: World
) -> None:
    for threat in THREATS:
        evaluation = assess(model, data, ["pgd-3", "apgd-ce-3"], threat=threat, world=world)
        assert evaluation.warnings == ()


def test_an_untrained_network_gets_no_warning(data: ImageData, world: World) -> None:
    model = build_model("cnn", 10, channels=1, width=4)
    assert warnings(model, data, world) == ()


def _with_nan(logits: Tensor) -> Tensor:
    return torch.where(torch.arange(len(logits))[:, None] == 3, float("nan"), logits)


def _raising(logits: Tensor) -> Tensor:
    raise RuntimeError("mat1 and mat2\n  do not fit")


UNFIT: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "nan": (_with_nan, "the model's logits are not finite for 1 of 64 clean images"),
    "infinite": (lambda z: z / 0, "the model's logits are not finite for 64 of 64 clean images"),
    "raises": (_raising, "cannot take images of shape (1, 8, 8) (mat1 and mat2 do not fit)"),
    "one a batch": (
        lambda z: z[:1],
        "the model gives (1, 10) for 64 images: must be (64, classes)",
    ),
    "flat": (lambda z: z[:, 0], "the model gives (64,) for 64 images: must be (64, classes)"),
    "deep": (lambda z: z[..., None], "the model gives (64, 10, 1) for 64 images"),
    "tuple": (lambda z: (None, z), "the model gives tuple for 64 images"),
    "none": (lambda z: None, "the model gives NoneType for 64 images"),
    "few": (lambda z: z[:, :9], "the model gives 9 logits per image, but labels go up to 9"),
}


@pytest.mark.parametrize("case", UNFIT)
@pytest.mark.parametrize("check", [True, False])
def test_answers_that_cannot_be_judged_are_refused(
    model: nn.Module, data: ImageData, world: World, case: str, check: bool
) -> None:
    """Whether or not anybody asked for checks: there is nothing to count."""
    change, message = UNFIT[case]
    subject = after(model, change).train()
    with pytest.raises(ValueError, match=re.escape(message)):
        assess(subject, data, ["pgd-1"], threat=THREAT, world=world, check=check)
    assert subject.training


def test_one_logit_is_not_enough() -> None:
    x = torch.rand(3, 1, 2, 2)
    with pytest.raises(ValueError, match="the model gives 1 logits per image"):
        check_logits(Net(lambda z: z.flatten(1)[:, :1]), x, 1)


def test_more_logits_than_labels_are_fine(model: nn.Module, data: ImageData, world: World) -> None:
    wide = after(model, lambda z: torch.cat((z, z[:, :5] - 9), 1))
    assert check_logits(wide, everything(data)[0], 10) == []
    targeted = assess(wide, data, ["apgd-t-1"], threat=THREAT, world=world).suites["apgd-t-1"]
    assert targeted.broken_by.shape == (150,)


def test_probabilities_are_noticed(model: nn.Module, data: ImageData, world: World) -> None:
    messages = warnings(after(model, lambda z: z.softmax(1)), data, world)
    assert sum("outputs are probabilities, not logits" in text for text in messages) == 1
    logs = warnings(after(model, lambda z: z.log_softmax(1)), data, world)
    assert logs == ()


def test_a_random_network_is_noticed(model: nn.Module, data: ImageData) -> None:
    x, _ = everything(data)
    (text,) = check_logits(Noisy(model), x, 10)
    assert "the model is randomized" in text
    assert "use autoattack-rand" in text
    assert check_logits(model, x, 10) == []


def test_dropout_in_eval_mode_is_not_random(
    model: nn.Module, data: ImageData, world: World
) -> None:
    """And in training mode it is found there only by whoever forgets to look in eval mode."""
    subject = nn.Sequential(nn.Dropout(0.2), model).train()
    assert warnings(subject, data, world) == ()
    assert len(check_logits(subject, everything(data)[0], 10)) == 1


def test_a_hidden_round_shows(model: nn.Module, data: ImageData, world: World) -> None:
    """Rounded pixels have no gradient at all."""
    messages = warnings(before(model, lambda x: (x * 8).round() / 8), data, world)
    assert any(re.match(r"gradients vanish at (\d+) of \1 images", text) for text in messages)
    assert any("images still survive PGD-20" in text for text in messages)


def test_saturated_logits_show(model: nn.Module, data: ImageData, world: World) -> None:
    messages = warnings(after(model, lambda z: z * 1e6), data, world)
    assert any(text.startswith("gradients vanish at ") for text in messages)
    assert any(
        text.startswith("the logits saturate: the cross-entropy is 0 at ") for text in messages
    )
    assert any("trust attacks on margins" in text for text in messages)


def test_gradients_of_wrong_images_do_not_count() -> None:
    """Nobody attacks them."""
    x, y = torch.rand(4, 1, 2, 2), torch.zeros(4, dtype=torch.int64)
    certain = Net(lambda x: x.flatten(1).sum(1, keepdim=True) * 0 + torch.tensor([0.0, 1e4]))
    assert check_gradients(certain, x, y) == []
    assert len(check_gradients(certain, x, y + 1)) == 2


class _Mask(torch.autograd.Function):
    """Changes nothing, and turns the gradient around wherever the mask says so."""

    @staticmethod
    def forward(context: Any, x: Tensor, mask: Tensor) -> Tensor:
        context.save_for_backward(mask)
        return x.clone()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (mask,) = context.saved_tensors
        return torch.where(mask, -gradients[0], gradients[0]), None


def turned(x: Tensor, mask: Tensor) -> Tensor:
    return _Mask.apply(x, mask)  # type: ignore[no-any-return, no-untyped-call]


def _misled(x: Tensor) -> Tensor:
    """The gradient leads back everywhere."""
    return turned(x, torch.ones_like(x, dtype=torch.bool))


def _misled_off_the_grid(x: Tensor) -> Tensor:
    """The gradient is right at the digits themselves, whose pixels are sixteenths, and nowhere
    else: one step is well advised, and every further one leads back."""
    sixteenths = (x * 16).frac().flatten(1) == 0
    off = ~sixteenths.all(1).reshape(-1, 1, 1, 1).expand_as(x)
    return turned(x, off)


def test_one_step_that_beats_many_shows(model: nn.Module, data: ImageData, world: World) -> None:
    messages = warnings(before(model, _misled_off_the_grid), data, world)
    (text,) = (text for text in messages if text.startswith("FGSM breaks "))
    assert "images that PGD-20 does not" in text


@pytest.mark.parametrize("threat", THREATS, ids=lambda threat: threat.norm)
def test_a_larger_ball_that_breaks_no_more_shows(
    model: nn.Module, data: ImageData, threat: ThreatModel
) -> None:
    x, y = everything(data)
    larger, everywhere = f"{4 * threat.eps:.3g}", "1" if threat.norm == "linf" else "8"
    messages = check_attacks(before(model, _misled), x, y, threat)
    assert len(messages) == 2
    assert messages[0].startswith(
        f"RA does not fall when eps grows from {threat.eps:.3g} to {larger}"
    )
    assert messages[1].startswith(f"with an unbounded perturbation (eps = {everywhere}), ")
    assert check_attacks(model, x, y, threat) == []


def test_attacks_are_not_checked_where_there_is_nothing_to_break(
    model: nn.Module, data: ImageData
) -> None:
    x, y = everything(data)
    misled = before(model, _misled)
    assert check_attacks(misled, x, y, ThreatModel(eps=0)) == []
    answers = model(x).argmax(1)
    assert check_attacks(misled, x, (answers + 1) % 10, THREAT) == []


def test_checks_are_left_out_on_demand(model: nn.Module, data: ImageData, world: World) -> None:
    misled = before(Noisy(model), _misled)
    assert assess(misled, data, ["pgd-1"], threat=THREAT, world=world).warnings
    assert assess(misled, data, ["pgd-1"], threat=THREAT, world=world, check=False).warnings == ()


@pytest.mark.parametrize(
    ("attacks", "fell", "warned"),
    [
        (("apgd-ce", "square"), [2, 1, 2, 0], True),
        (("apgd-ce", "square"), [2, 1, 0, 0], False),  # one image may be chance
        (("apgd-ce", "square"), [1, 1, 0, -1], False),
        (("apgd-ce", "square"), [2] * 2 + [0] * 998, False),  # 0.2 % are no more than chance
        (("apgd-ce", "square"), [2] * 3 + [0] * 997, True),
        (("square",), [1, 1, 1, 1], False),  # nothing to compare it with
        (("apgd-ce", "fab-t"), [1, 2, 2, 0], False),
    ],
)
def test_what_only_square_breaks_is_suspicious(
    attacks: tuple[str, ...], fell: list[int], warned: bool
) -> None:
    messages = check_square(SuiteResult(attacks, torch.tensor(fell)))
    assert bool(messages) == warned
    if warned:
        count = fell.count(2)
        images = f"{count} image{'s' * (count > 1)} that"
        assert messages[0].startswith(f"Square, which uses no gradients, broke {images}")


def test_a_suite_in_which_square_wins_is_warned_of(
    model: nn.Module, data: ImageData, world: World
) -> None:
    """The gradient attacks of the suite see nothing through rounded pixels."""
    blind = before(model, lambda x: (x * 4).round() / 4)
    attacks = suite_of(
        "suite", {"pgd": PGD(steps=2, random_start=False), "square": Square(queries=200)}
    )
    evaluation = assess(blind, data, [attacks], threat=ThreatModel(eps=0.2), world=world)
    assert evaluation.suites["suite"].counts()["square"] > 0
    assert any(text.startswith("Square, which uses no gradients") for text in evaluation.warnings)


CURVES: dict[str, tuple[str, Sequence[float], Sequence[float], Sequence[str]]] = {
    "falls": ("eps", (0, 0.1, 0.2), (90, 50, 10), ()),
    "falls, in any order": ("eps", (0.2, 0, 0.1), (10, 90, 50), ()),
    "one value": ("eps", (0.1,), (90,), ()),
    "rises a little": ("steps", (10, 20, 50), (50.0, 50.9, 50.0), ()),
    "rises with eps": (
        "eps",
        (0, 0.1, 0.2, 0.4),
        (90, 40, 60, 5),
        ("RA rises from 40.0 to 60.0 % as eps grows from 0.1 to 0.2",),
    ),
    "rises with the steps": (
        "steps",
        (20, 1, 5),
        (60, 50, 40),
        ("RA rises from 40.0 to 60.0 % as steps grows from 5 to 20",),
    ),
    "flat in steps": ("steps", (1, 10, 100), (50, 50, 50), ()),
    "flat in eps": (
        "eps",
        (0.1, 0.2, 0.4),
        (50, 50, 50),
        ("RA does not fall as eps grows from 0.1 to 0.4 (50.0 to 50.0 %)",),
    ),
    "flat from nothing on": (
        "eps",
        (0, 0.1, 0.2, 0.4),
        (90, 90, 90, 90),
        ("RA does not fall as eps grows from ",),
    ),
    "flat where nearly all have fallen": ("eps", (0.1, 0.2, 0.4), (3, 3, 3), ()),
    "flat over a short way": ("eps", (0.1, 0.11), (50, 50), ()),
}


@pytest.mark.parametrize("case", CURVES)
def test_curves_that_do_not_fall_are_suspicious(case: str) -> None:
    over, values, ra, expected = CURVES[case]
    messages = check_curve(over, values, ra)
    assert len(messages) == len(expected)
    for text, start in zip(messages, expected, strict=True):
        assert text.startswith(start)
