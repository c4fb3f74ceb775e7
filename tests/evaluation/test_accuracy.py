"""TA and RA: exact counts, whatever the batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torch.utils.data import TensorDataset as Tensors

from dat.attacks import FGSM, PGD, Attack, NoAttack
from dat.attacks.suites import suite_of
from dat.core.rng import Streams
from dat.core.threat import ThreatModel
from dat.data import ImageData
from dat.distributed import World
from dat.evaluation import Accuracy, Assessment, assess, autoattack, evaluate
from tests.evaluation.cases import THREAT, Brightness, ProgressRecorder, Spy, everything, white

WEAK = PGD(steps=3)


def test_a_world_without_a_launcher_is_a_single_worker(world: World) -> None:
    assert (world.rank, world.size, world.first) == (0, 1, True)
    assert dist.is_initialized()
    world.close()
    assert not dist.is_initialized()


def test_a_plain_script_keeps_no_process_group(
    model: nn.Module, data: ImageData, no_launcher: None
) -> None:
    some = data.take(torch.arange(20))
    accuracy = evaluate(model, some, threat=THREAT, attack=WEAK)
    assert not dist.is_initialized()
    with World.join(device="cpu") as world:
        assert evaluate(model, some, threat=THREAT, attack=WEAK, world=world) == accuracy


@pytest.mark.parametrize("form", ["pair", "dataset", "loader"])
def test_datasets_are_evaluated_as_they_are(model: nn.Module, data: ImageData, form: str) -> None:
    some = data.take(torch.arange(20))
    pair = some.batch(torch.arange(20), torch.device("cpu"))
    dataset = Tensors(*pair)
    forms: dict[str, Any] = {"pair": pair, "dataset": dataset}
    given = forms.get(form, DataLoader(dataset, batch_size=8))
    expected = assess(model, some, ["pgd-3"], threat=THREAT)
    actual = assess(model, given, ["pgd-3"], threat=THREAT)
    assert (actual.ta, actual.ra("pgd-3")) == (expected.ta, expected.ra("pgd-3"))


def test_evaluation_works_in_inference_mode(model: nn.Module, data: ImageData) -> None:
    """As frameworks validate, and with the images and labels that they make there."""
    x, y = data.batch(torch.arange(20), torch.device("cpu"))
    expected = evaluate(model, (x, y), threat=THREAT, attack=WEAK)
    strong = autoattack(model, x[:4], y[:4], eps=0.5)
    assert expected.clean > expected.robust
    with torch.inference_mode():
        x, y = x.clone(), y.clone()
        assert evaluate(model, (x, y), threat=THREAT, attack=WEAK) == expected
        again = autoattack(model, x[:4], y[:4], eps=0.5)
    assert again.broken_by == strong.broken_by and torch.equal(again.examples, strong.examples)


def test_autoattack_takes_a_dataset(model: nn.Module, data: ImageData) -> None:
    x, y = data.batch(torch.arange(4), torch.device("cpu"))
    attacked = autoattack(model, Tensors(x, y), eps=0.5)
    assert torch.equal(attacked.robust, autoattack(model, x, y, eps=0.5).robust)
    with pytest.raises(ValueError, match="give the labels as well"):
        autoattack(model, x)


def test_batch_size_has_no_say(model: nn.Module, data: ImageData, world: World) -> None:
    accuracies = {
        evaluate(model, data, threat=THREAT, attack=WEAK, batch=batch, world=world)
        for batch in (1, 7, 64, 1000)
    }
    assert len(accuracies) == 1
    (accuracy,) = accuracies
    assert 0.2 * 150 < accuracy.robust < 0.8 * 150 < accuracy.clean < 150


def test_clean_accuracy_is_that_of_a_plain_loop(
    model: nn.Module, data: ImageData, world: World
) -> None:
    right = 0
    for image, label in zip(*everything(data), strict=True):
        logits = model(image.unsqueeze(0))[0].tolist()
        right += logits.index(max(logits)) == int(label)
    accuracy = evaluate(model, data, threat=THREAT, attack=NoAttack(), world=world)
    assert accuracy == Accuracy(images=150, clean=right, robust=right)
    assert accuracy.ta == accuracy.ra == pytest.approx(100 * right / 150)


@pytest.mark.parametrize("attack", [WEAK, FGSM(), PGD(steps=2, restarts=2)], ids=repr)
@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_robust_accuracy_is_that_of_a_plain_attack(
    model: nn.Module, data: ImageData, world: World, attack: Attack, norm: str
) -> None:
    """All images attacked at once, the wrong ones too, and each restart by itself, with streams of
    its own; whoever is right to begin with must survive every one."""
    threat = ThreatModel(norm=norm, eps=0.08 if norm == "linf" else 0.5)
    x, y = everything(data)
    streams = Streams.of(5, "evaluate", index=torch.arange(len(data)))
    clean = survives = model(x).argmax(1) == y
    for number, attempt in enumerate(attack.rounds()):
        x_adv = attempt(
            lambda z: F.cross_entropy(model(z), y, reduction="none"),
            x,
            threat,
            streams.fork("restart", number),
        )
        survives = survives & (model(x_adv).argmax(1) == y)
    accuracy = evaluate(model, data, threat=threat, attack=attack, seed=5, world=world)
    assert accuracy == (150, int(clean.sum()), int(survives.sum()))


def test_restarts_never_raise_the_robust_accuracy(
    model: nn.Module, data: ImageData, world: World
) -> None:
    attack = FGSM(step_ratio=0.5)  # whose luck depends on where it starts
    robust = [
        evaluate(model, data, threat=THREAT, attack=attack, restarts=k, world=world).robust
        for k in (1, 2, 5)
    ]
    assert robust == sorted(robust, reverse=True)
    assert robust[-1] < robust[0]


def test_seed_changes_the_random_starts(model: nn.Module, data: ImageData, world: World) -> None:
    attack = FGSM(step_ratio=0.5)
    accuracies = {
        evaluate(model, data, threat=THREAT, attack=attack, seed=seed, world=world).robust
        for seed in range(4)
    }
    assert len(accuracies) > 1


def test_default_attack_is_pgd_20(model: nn.Module, data: ImageData, world: World) -> None:
    by_default = evaluate(model, data, threat=THREAT, world=world)
    assert by_default == evaluate(model, data, threat=THREAT, attack=PGD(steps=20), world=world)


def test_at_eps_zero_all_that_is_right_is_robust(
    model: nn.Module, data: ImageData, world: World
) -> None:
    accuracy = evaluate(model, data, threat=ThreatModel(eps=0), attack=WEAK, world=world)
    assert accuracy.robust == accuracy.clean


def test_only_who_is_still_right_is_attacked_again(world: World) -> None:
    data = white(*[1] * 8, 0, 2)
    spy = Spy(blackened=(0, 3, 9))
    model = Brightness().train()
    accuracy = evaluate(model, data, threat=THREAT, attack=spy, restarts=3, batch=4, world=world)
    assert accuracy == Accuracy(images=10, clean=8, robust=6)
    # two of the eight that are right fall at the first attack, and the others are packed anew
    first, later = [[0, 1, 2, 3], [4, 5, 6, 7]], [[1, 2, 4], [5, 6, 7]]
    assert spy.given == [*first, *later, *later]
    assert model.training


def test_progress_counts_every_image(model: nn.Module, data: ImageData, world: World) -> None:
    """Three forward passes and three backward ones, which are worth two each."""
    progress = ProgressRecorder()
    accuracy = evaluate(
        model, data, threat=THREAT, attack=WEAK, batch=64, world=world, progress=progress
    )
    assert progress.done == sorted(progress.done)
    assert progress.done[-1] == progress.total[-1]
    assert progress.done[-1] >= 9 * accuracy.clean


def test_model_is_found_as_it_was(data: ImageData, world: World) -> None:
    norm = nn.BatchNorm2d(1).eval()
    net = nn.Sequential(norm, nn.Flatten(), nn.Linear(64, 10)).train()
    norm.eval()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    generator = torch.get_rng_state()
    evaluate(net, data, threat=THREAT, attack=WEAK, world=world)
    assert [module.training for module in net.modules()] == [True, False, True, True]
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert all(parameter.grad is None for parameter in net.parameters())
    assert torch.equal(generator, torch.get_rng_state())


def test_bytes_are_measured_like_the_floats_they_stand_for(
    model: nn.Module, data: ImageData, world: World
) -> None:
    as_bytes = ImageData.of((data.tensor() * 255).round().to(torch.uint8), data.labels, classes=10)
    as_floats = ImageData.of(as_bytes.tensor().float() / 255, data.labels, classes=10)
    by_bytes, by_floats = (
        evaluate(model, either, threat=THREAT, attack=WEAK, world=world)
        for either in (as_bytes, as_floats)
    )
    assert by_bytes == by_floats


def test_without_a_world_it_joins_one(model: nn.Module, data: ImageData, no_launcher: None) -> None:
    accuracy = evaluate(model, data, threat=THREAT, attack=WEAK)
    assert accuracy == evaluate(model, data, threat=THREAT, attack=WEAK, world=World.join())


@pytest.mark.parametrize(("restarts", "batch"), [(0, 8), (1, 0)])
def test_no_restart_and_no_batch_are_refused(
    model: nn.Module, data: ImageData, restarts: int, batch: int
) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        evaluate(model, data, threat=THREAT, attack=WEAK, restarts=restarts, batch=batch)


def test_one_attack_gives_counts_and_a_list_gives_an_evaluation(
    model: nn.Module, data: ImageData, world: World
) -> None:
    accuracy = evaluate(model, data, threat=THREAT, attack=WEAK, restarts=2, seed=3, world=world)
    suite = suite_of("weak", {"weak": WEAK}, 2)
    evaluation = evaluate(
        model, data, threat=THREAT, attacks=["clean", "fgsm", suite], seed=3, world=world
    )
    assert isinstance(accuracy, Accuracy) and isinstance(evaluation, Assessment)
    assert list(evaluation.suites) == ["clean", "fgsm", "weak"]
    assert (evaluation.images, evaluation.ta) == (accuracy.images, accuracy.ta)
    assert evaluation.ra("weak") == accuracy.ra < evaluation.ra("clean") == accuracy.ta


def test_the_options_of_a_list_of_attacks_are_passed_on(
    model: nn.Module, data: ImageData, world: World, tmp_path: Path
) -> None:
    noisy = nn.Sequential(model, nn.Softmax(1))
    options: dict[str, Any] = {"threat": THREAT, "attacks": ["pgd-2"], "world": world}
    evaluation = evaluate(noisy, data, folder=tmp_path, keep=True, batch=40, **options)
    assert evaluation.suites["pgd-2"].examples is not None
    assert len(list(tmp_path.glob("pgd-2-*/000-*.safetensors"))) > 1
    assert any("probabilities" in text for text in evaluation.warnings)
    assert evaluate(noisy, data, check=False, **options).warnings == ()
    with pytest.raises(ValueError, match="precision = 'int8': must be one of"):
        evaluate(noisy, data, precision="int8", **options)


@pytest.mark.parametrize("options", [{"attack": WEAK}, {"restarts": 2}])
def test_one_attack_and_a_list_exclude_each_other(
    model: nn.Module, data: ImageData, world: World, options: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match="attacks: replaces attack and restarts"):
        evaluate(model, data, threat=THREAT, attacks=["pgd-2"], world=world, **options)


@pytest.mark.parametrize(
    "options", [{"precision": "bfloat16"}, {"folder": Path("x")}, {"keep": True}, {"check": False}]
)
def test_some_options_need_a_list_of_attacks(
    model: nn.Module, data: ImageData, world: World, options: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=r"need attacks=\[\.\.\.\]"):
        evaluate(model, data, threat=THREAT, attack=WEAK, world=world, **options)
