"""Rounds of attacks: each image is judged by itself, by the model as it was given, and counted."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dat.attacks import APGD, FAB, FGSM, PGD, Attack, NoAttack, Square, TargetedAPGD
from dat.attacks.suites import suite_of
from dat.core.rng import seeded
from dat.core.threat import ThreatModel
from dat.data import ImageData
from dat.distributed import World
from dat.evaluation import Assessment, Suite, SuiteResult, assess
from dat.evaluation.progress_file import Cost
from dat.evaluation.runner import Runner
from tests.evaluation.cases import (
    CPU,
    THREAT,
    THREATS,
    Brightness,
    Noisy,
    ProgressRecorder,
    Spy,
    Steadfast,
    everything,
    right,
    short,
    white,
)

both_threats = pytest.mark.parametrize("threat", THREATS, ids=lambda threat: threat.norm)


def judged(
    model: nn.Module, data: ImageData, world: World, *attacks: str | Suite, **options: Any
) -> Assessment:
    """Without the checks, which have tests of their own, unless they are asked for."""
    chosen: dict[str, Any] = {"threat": THREAT, "check": False} | options
    return assess(model, data, attacks, world=world, **chosen)


def run_rounds(
    model: nn.Module, data: ImageData, world: World, attack: Attack, **options: Any
) -> SuiteResult:
    """One attack on all images, without any look at them before."""
    chosen: dict[str, Any] = {"network": model, "threat": THREAT} | options
    runner = Runner(model=model, data=data, world=world, **chosen)
    rounds = suite_of("attack", {"attack": attack}).rounds
    return runner.run(rounds, torch.ones(len(data), dtype=torch.bool))


@both_threats
def test_batch_size_has_no_say(
    model: nn.Module, small_data: ImageData, world: World, threat: ThreatModel
) -> None:
    """Neither in who falls to what, nor in what it costs."""
    fewer = small_data.take(torch.arange(45))
    evaluations = [
        judged(model, fewer, world, short(), threat=threat, batch=batch).suites["short"]
        for batch in (1, 16, 200)
    ]
    counts = evaluations[0].counts()
    assert sum(count > 0 for count in counts.values()) >= 5, counts
    assert evaluations[0].robust.any()
    for other in evaluations[1:]:
        assert torch.equal(other.broken_by, evaluations[0].broken_by)
        assert _passes(other) == _passes(evaluations[0])


def _passes(verdicts: SuiteResult) -> dict[str, tuple[int, int]]:
    return {name: (cost.forwards, cost.backwards) for name, cost in verdicts.costs.items()}


def test_who_has_fallen_is_attacked_no_more(world: World) -> None:
    one, two, three = Spy(blackened=(0, 3)), Spy(blackened=(3, 4)), Spy()
    attacks = suite_of("spies", {"one": one, "two": two, "three": three})
    evaluation = judged(Brightness(), white(*[1] * 6), world, attacks, batch=2)
    assert one.given == [[0, 1], [2, 3], [4, 5]]
    assert two.given == [[1, 2], [4, 5]]  # packed anew
    assert three.given == [[1, 2], [5]]
    assert evaluation.suites["spies"].broken_by.tolist() == [1, 0, 0, 1, 2, 0]
    assert evaluation.suites["spies"].broken() == {"one": [0, 3], "two": [4], "three": []}


def test_batches_are_full_and_of_nearly_one_size(world: World) -> None:
    spy = Spy()
    judged(Brightness(), white(*[1] * 10), world, suite_of("spy", {"spy": spy}), batch=4)
    assert spy.sizes == [4, 3, 3]


def test_who_is_wrong_before_is_not_attacked(
    model: nn.Module, data: ImageData, world: World
) -> None:
    spy = Spy()
    evaluation = judged(model, data, world, suite_of("spy", {"spy": spy}))
    expected = right(model, data)
    assert 0 < int(expected.sum()) < len(data)
    assert torch.equal(evaluation.right, expected)
    assert spy.everybody == expected.nonzero().squeeze(1).tolist()
    assert evaluation.suites["spy"].broken_by.tolist() == [
        -1 + int(correct) for correct in expected
    ]


def test_when_all_are_wrong_nobody_is_attacked(world: World) -> None:
    spy = Spy()
    evaluation = judged(Brightness(), white(0, 2, 0), world, suite_of("spy", {"spy": spy}))
    assert spy.given == []
    assert (evaluation.ta, evaluation.ra("spy")) == (0.0, 0.0)
    assert evaluation.suites["spy"].costs == {"spy": Cost()}


def test_when_all_have_fallen_the_rest_is_spared(world: World) -> None:
    last = Spy()
    attacks = suite_of("spies", {"all": Spy(blackened=(0, 1, 2)), "last": last})
    evaluation = judged(Brightness(), white(1, 1, 1), world, attacks)
    assert last.given == []
    assert evaluation.suites["spies"].counts() == {"all": 3, "last": 0}
    assert evaluation.suites["spies"].costs["last"] == Cost()


def test_every_suite_meets_all_that_are_right(
    model: nn.Module, small_data: ImageData, world: World
) -> None:
    """What falls to one suite is no loss to the next; and clean is TA."""
    alone = judged(model, small_data, world, "pgd-3")
    spy = Spy()
    evaluation = judged(
        model, small_data, world, "fgsm", "clean", "pgd-3", suite_of("spy", {"spy": spy})
    )
    assert torch.equal(evaluation.suites["pgd-3"].broken_by, alone.suites["pgd-3"].broken_by)
    assert evaluation.ra("clean") == evaluation.ra("spy") == evaluation.ta
    assert len(spy.everybody) == int(evaluation.right.sum())
    assert list(evaluation.suites) == ["fgsm", "clean", "pgd-3", "spy"]


def test_an_image_as_it_was_breaks_nobody(
    model: nn.Module, small_data: ImageData, world: World
) -> None:
    evaluation = judged(
        model, small_data, world, suite_of("nothing", {"spy": Spy(), "none": NoAttack()})
    )
    assert evaluation.suites["nothing"].counts() == {"spy": 0, "none": 0}


class Lies(nn.Module):
    """A copy of a network that is no copy: the classes are another's."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).roll(1, 1)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "attack", [APGD(steps=2), FAB(steps=2, targets=2), Square(queries=2)], ids=repr
)
def test_the_model_as_given_has_the_last_word(
    model: nn.Module, small_data: ImageData, world: World, attack: Attack
) -> None:
    """To the copy every image is broken at once; the model is asked, and knows better."""
    nowhere = ThreatModel(eps=1e-6)
    result = run_rounds(
        model, small_data, world, attack, network=Lies(model), threat=nowhere, keep=True
    )
    assert torch.equal(result.robust, right(model, small_data))
    blind = run_rounds(Lies(model), small_data, world, attack, network=model, threat=nowhere)
    assert not blind.robust[right(model, small_data)].any()


def test_an_answer_that_is_no_number_is_wrong(world: World) -> None:
    class Overflows(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            dark = x.flatten(1).sum(1) == 0
            logits = torch.tensor([0.0, 1.0, 0.0]).repeat(len(x), 1)
            return torch.where(dark.unsqueeze(1), float("nan"), logits)

    attack = suite_of("spy", {"spy": Spy(blackened=(1,))})
    evaluation = judged(Overflows(), white(1, 1, 1), world, attack)
    assert evaluation.suites["spy"].broken_by.tolist() == [0, 1, 0]


@both_threats
def test_kept_examples_are_allowed_and_wrong(
    model: nn.Module, small_data: ImageData, world: World, threat: ThreatModel
) -> None:
    result = judged(model, small_data, world, short(), threat=threat, keep=True, batch=16).suites[
        "short"
    ]
    assert result.examples is not None
    x, y = everything(small_data)
    fell = result.broken_by > 0
    assert fell.any() and result.robust.any() and (result.broken_by < 0).any()
    assert float(result.examples.min()) >= 0
    assert float(result.examples.max()) <= 1
    assert float(threat.size(result.examples, x).max()) <= threat.eps + 1e-6
    with torch.no_grad():
        answers = model(result.examples).argmax(1)
    assert (answers != y)[fell].all()
    assert torch.equal(result.examples[~fell], x[~fell])
    assert (threat.size(result.examples, x)[fell] > 0).all()


def test_examples_are_kept_on_demand(model: nn.Module, small_data: ImageData, world: World) -> None:
    assert judged(model, small_data, world, "pgd-1").suites["pgd-1"].examples is None


def test_examples_of_bytes_are_floats(world: World) -> None:
    data = white(1, 1, 0)
    data = ImageData.of((255 * data.tensor()).to(torch.uint8), data.labels, classes=3)
    attack = suite_of("spy", {"spy": Spy(blackened=(1,))})
    examples = judged(Brightness(), data, world, attack, keep=True).suites["spy"].examples
    assert examples is not None
    assert examples.amax((1, 2, 3)).tolist() == [1.0, 0.0, 1.0]


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("restarts", [1, 3])
def test_the_cost_of_pgd_is_known_beforehand(
    model: nn.Module, data: ImageData, world: World, steps: int, restarts: int
) -> None:
    """A forward and a backward pass a step, and a last look by the model: for who still stands."""
    attacks: dict[str, Attack] = {f"turn {turn}": PGD(steps=steps) for turn in range(restarts)}
    evaluation = judged(model, data, world, suite_of("pgd", attacks), batch=37)
    standing = int(evaluation.right.sum())
    verdicts = evaluation.suites["pgd"]
    assert list(verdicts.costs) == list(attacks)
    for name, count in verdicts.counts().items():
        cost = verdicts.costs[name]
        assert (cost.forwards, cost.backwards) == (standing * (steps + 1), standing * steps)
        assert cost.seconds > 0
        standing -= count


@pytest.mark.parametrize("queries", [1, 30, 120])
def test_the_cost_of_square_is_known_beforehand(world: World, queries: int) -> None:
    """The start, the queries, and a last look, where nobody falls before the end."""
    evaluation = judged(
        Steadfast(), _ones(7), world, suite_of("square", {"s": Square(queries=queries)})
    )
    (cost,) = evaluation.suites["square"].costs.values()
    assert (cost.forwards, cost.backwards) == (7 * (queries + 1) + 7, 0)
    assert evaluation.suites["square"].robust.all()


def _ones(count: int) -> ImageData:
    images = torch.rand(count, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    return ImageData.of(images, torch.ones(count, dtype=torch.int64), classes=5)


class Counted(nn.Module):
    """Another network that counts for itself what it is asked."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net, self.forwards, self.backwards = net, 0, 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += len(x)
        if x.requires_grad:
            x.register_hook(self._back)
        return self.net(x)  # type: ignore[no-any-return]

    def _back(self, gradient: Tensor) -> None:
        self.backwards += len(gradient)


@pytest.mark.parametrize(
    "attack",
    [
        NoAttack(),
        FGSM(),
        PGD(steps=2, restarts=2),
        APGD(steps=4),
        APGD(steps=3, eot=2),
        TargetedAPGD(steps=4, targets=2),
        FAB(steps=4, targets=2),
        Square(queries=20),
    ],
    ids=repr,
)
def test_costs_are_what_the_network_was_asked(
    model: nn.Module, small_data: ImageData, world: World, attack: Attack
) -> None:
    counted = Counted(model)
    (cost,) = run_rounds(counted, small_data, world, attack, batch=16).costs.values()
    assert (cost.forwards, cost.backwards) == (counted.forwards, counted.backwards)


class Zoo(nn.Module):
    """Layers that have a mode, statistics or a random number."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)
        with seeded(CPU, 0, "zoo"):
            before, after = nn.Conv2d(1, 3, 3), nn.Linear(108, 10)
        layers = (before, self.norm, nn.ReLU(), nn.Dropout(), nn.Flatten(), after)
        self.net = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)  # type: ignore[no-any-return]


NETWORKS: dict[str, Callable[[], nn.Module]] = {"zoo": Zoo, "random": lambda: Noisy(Zoo())}


@pytest.mark.parametrize("check", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize("folded", [True, False], ids=["folded", "as it is"])
@pytest.mark.parametrize("kind", NETWORKS)
def test_nothing_is_left_behind(
    small_data: ImageData,
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    folded: bool,
    check: bool,
) -> None:
    """Neither in the model (modes, weights, statistics, gradients) nor in torch's generator."""
    _fold_from(0 if folded else 10**9, monkeypatch)
    model = NETWORKS[kind]().train()
    model.get_submodule("norm" if kind == "zoo" else "net.norm").eval()
    first, *_ = model.parameters()
    first.requires_grad_(False)
    last = list(model.parameters())[-1]
    last.grad = torch.ones_like(last)
    before = _state(model)
    generator = torch.get_rng_state()
    judged(model, small_data, world, "pgd-2", short(), check=check, keep=True)
    assert _state(model) == before
    assert torch.equal(last.grad, torch.ones_like(last))
    assert torch.equal(torch.get_rng_state(), generator)


def _state(model: nn.Module) -> list[Any]:
    modes = [module.training for module in model.modules()]
    flags = [(parameter.requires_grad, parameter.grad is None) for parameter in model.parameters()]
    return [modes, flags, {name: value.tolist() for name, value in model.state_dict().items()}]


def _fold_from(passes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("dat.evaluation.assess"), "FOLD_FROM", passes)


def test_a_faster_copy_changes_no_verdict(
    small_data: ImageData, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its batch normalization has gone into the layer before."""
    model = Zoo()
    x, y = everything(small_data)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    with seeded(CPU, 0, "dropout"):
        for _ in range(60):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    evaluations = []
    for passes in (0, 10**9):
        _fold_from(passes, monkeypatch)
        evaluations.append(judged(model, small_data, world, short()))
    assert [evaluation.network for evaluation in evaluations] == [
        "1 batch norm folded",
        "not folded: little to do",
    ]
    assert torch.equal(
        evaluations[0].suites["short"].broken_by, evaluations[1].suites["short"].broken_by
    )
    assert 0 < evaluations[0].ra("short") < evaluations[0].ta


def test_much_work_is_done_by_a_faster_copy(
    model: nn.Module, small_data: ImageData, world: World
) -> None:
    assert judged(model, small_data, world, "pgd-1").network == "not folded: little to do"
    assert judged(model, small_data, world, "pgd-20").network == "frozen copy"


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_lower_precision_attacks_and_full_precision_judges(
    model: nn.Module, small_data: ImageData, world: World, precision: str
) -> None:
    """What a coarse network takes for broken need not be so; what has fallen has."""
    fine = judged(model, small_data, world, "pgd-3", "apgd-ce-3", keep=True)
    evaluation = judged(
        model, small_data, world, "pgd-3", "apgd-ce-3", keep=True, precision=precision
    )
    assert torch.equal(evaluation.right, fine.right)
    x, y = everything(small_data)
    for name, verdicts in evaluation.suites.items():
        assert abs(evaluation.ra(name) - fine.ra(name)) < 10
        assert verdicts.examples is not None and verdicts.examples.dtype == torch.float32
        with torch.no_grad():
            broken = model(verdicts.examples).argmax(1) != y
        assert torch.equal(broken, ~verdicts.robust)
        assert float(THREAT.size(verdicts.examples, x).max()) <= THREAT.eps + 1e-6


def test_unknown_precision_is_refused(
    model: nn.Module, small_data: ImageData, world: World
) -> None:
    with pytest.raises(ValueError, match="precision = 'int8': must be one of float32, "):
        judged(model, small_data, world, "pgd-1", precision="int8")


@pytest.mark.parametrize("batch", [16, 200])
@pytest.mark.parametrize("name", ["short", "pgd-3x2", "square-20", "apgd-ce-5"])
def test_progress_comes_to_its_end(
    model: nn.Module, small_data: ImageData, world: World, name: str, batch: int
) -> None:
    """However many fall early: what is done never shrinks, is never more than there is, and is all
    of it in the end."""
    progress = ProgressRecorder()
    attacks = short() if name == "short" else name
    judged(model, small_data, world, attacks, batch=batch, progress=progress)
    assert progress.done == sorted(progress.done)
    assert all(done <= total for done, total in progress.shown)
    assert progress.done[-1] == progress.total[-1]


def test_progress_goes_on_from_suite_to_suite(
    model: nn.Module, small_data: ImageData, world: World
) -> None:
    """One progress_bar shows all of them."""
    progress = ProgressRecorder()
    judged(model, small_data, world, "pgd-3", "pgd-2", progress=progress)
    assert progress.done == sorted(progress.done)
    assert progress.done[-1] == progress.total[-1]


def test_verdicts_count_who_fell_to_what() -> None:
    verdicts = SuiteResult(("a", "b", "c"), torch.tensor([-1, 0, 2, 1, 2, 0]))
    assert verdicts.robust.tolist() == [False, True, False, False, False, True]
    assert verdicts.broken() == {"a": [3], "b": [2, 4], "c": []}
    assert verdicts.counts() == {"a": 1, "b": 2, "c": 0}


def test_percentages_are_of_all_images() -> None:
    evaluation = Assessment(
        torch.tensor([True, True, False, True]),
        {"a": SuiteResult(("x",), torch.tensor([0, 1, -1, 0]))},
    )
    assert (evaluation.images, evaluation.ta, evaluation.ra("a")) == (4, 75.0, 50.0)


def test_unknown_attacks_are_refused(model: nn.Module, small_data: ImageData, world: World) -> None:
    with pytest.raises(ValueError, match=r"attack 'pdg-20': unknown: did you mean pgd-20\?"):
        judged(model, small_data, world, "pdg-20")
