"""A recipe with many mistakes: all are reported at once, with the right suggestion for each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dat.config.recipes import read
from dat.config.runs import read_run
from dat.config.schema import COMPONENTS, RunConfig
from dat.config.synonyms import NAMES, SETTINGS, SYNONYMS
from dat.core.mistakes import plain
from dat.core.settings import SettingError
from dat.core.suggestions import Suggestions

NEWCOMER = """
data: CIFAR-10
model: preactresnet18
learning_rate: 0.1
threat: {norm: Linf, epsilon: 8/255}
attack: {name: PGD, alpha: 2/255, iterations: 10}
optimizer: {name: SGD, momentum: 0.9, wd: 5e-4}
train: {batch_size: 128, epochs: 0, lr: 0.1}
schedule: {name: multistep, gamma: 0.1}
evaluate: {attacks: PGD20}
"""


def mistakes(values: dict[str, Any]) -> list[str]:
    with pytest.raises(SettingError) as error:
        RunConfig.read(values)
    return list(error.value.mistakes)


def test_a_newcomers_recipe_gets_the_right_suggestions_in_one_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("cifar.yaml").write_text(NEWCOMER)
    with pytest.raises(SettingError) as error:
        read("cifar.yaml")
    assert str(error.value).splitlines() == [
        "cifar.yaml: 16 mistakes",
        "  model.name = 'preactresnet18': unknown: did you mean preact-resnet18?",
        "  unknown setting learning_rate: did you mean optimizer.lr?",
        "  threat.norm = 'Linf': must be one of linf, l2 (did you mean linf?)",
        "  unknown setting threat.epsilon: did you mean threat.eps?",
        "  attack.name = 'PGD': unknown: did you mean pgd?",
        "  unknown setting attack.alpha: did you mean attack.step_size?",
        "  unknown setting attack.iterations: did you mean attack.steps?",
        "  optimizer.name = 'SGD': unknown: did you mean sgd?",
        "  unknown setting optimizer.wd: did you mean optimizer.weight_decay?",
        "  unknown setting train.batch_size: did you mean train.batch?",
        "  train.epochs = 0: must be at least 1",
        "  unknown setting train.lr: did you mean optimizer.lr?",
        "  schedule.name = 'multistep': unknown: did you mean piecewise?",
        "  unknown setting schedule.gamma: did you mean schedule.factor?",
        "  evaluate.attacks: attack 'PGD20': unknown: did you mean pgd-20?",
        "  data.name = 'CIFAR-10': unknown: did you mean cifar10?",
    ]


def test_a_folder_may_have_the_name_of_a_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingError, match=r"data.name = 'Cifar10': unknown: did you mean cifar10"):
        read("digits", {"data": {"name": "Cifar10"}})
    Path("Cifar10").mkdir()
    assert read("digits", {"data": {"name": "Cifar10"}}).data.name == "Cifar10"


def test_a_run_names_its_file(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("recipe: digits\nseed: -1\nabot: x\n")
    with pytest.raises(SettingError) as error:
        read_run(tmp_path)
    assert str(error.value).splitlines()[0] == f"{tmp_path}/config.yaml: 2 mistakes"


@pytest.mark.parametrize(
    ("values", "mistake"),
    [
        ({"attack": {"eps": 0.1}}, "unknown setting attack.eps: did you mean threat.eps?"),
        ({"train": {"lr": 0.1}}, "unknown setting train.lr: did you mean optimizer.lr?"),
        ({"attack": {"step-size": 1}}, "unknown setting attack.step-size: did you mean attack"),
        ({"attack": {"step": 1}}, "did you mean attack.steps or attack.step_size?"),
        ({"attack": {"name": "fgsm", "alpha": 1}}, "did you mean attack.step_ratio?"),
        ({"batch": 8}, "did you mean train.batch or evaluate.batch?"),
        ({"dataset": "digits"}, "unknown setting dataset: did you mean data.name?"),
        ({"dataset": {"name": "digits"}}, "unknown setting dataset: did you mean data?"),
        ({"architecture": "cnn"}, "unknown setting architecture: did you mean model.name?"),
        (
            {"optimizer": {"name": "adamw", "epsilon": 1e-8}},
            "unknown setting optimizer.epsilon: did you mean optimizer.eps?",
        ),
        (
            {"optimizer": {"name": "adamw", "momentum": 0.9}},
            "optimizer.momentum belongs to lars, sgd, lsgd, muon; optimizer.name is adamw",
        ),
        (
            {"attack": {"name": "fgsm", "steps": 7}},
            "attack.steps belongs to pgd, yopo, apgd, apgd-t, fab; attack.name is fgsm",
        ),
        ({"compute": {"precision": "BF16"}}, "(did you mean bfloat16?)"),
        ({"optimizer": "Adam"}, "optimizer.name = 'Adam': unknown: did you mean adamw?"),
        ({"model": {"name": "WideResNet-28-10"}}, "unknown: did you mean wrn-28-10?"),
        ({"threat": {"eps": 8}}, "threat.eps = 8: exceeds the pixel range [0, 1]; did you mean 8"),
    ],
)
def test_suggestions_know_the_words_of_the_field(values: dict[str, Any], mistake: str) -> None:
    (only,) = mistakes(values)
    assert mistake in only


def test_checks_across_groups_are_collected() -> None:
    values = {
        "data": {"unlabelled": "rest", "synthetic": "more.npz"},
        "train": {"epochs": 3},
        "schedule": {"name": "cosine", "warmup": 5},
        "evaluate": {"attacks": "pgd-20,pdg-20,nosuch"},
    }
    found = mistakes(values)
    assert [mistake.partition(": ")[0] for mistake in found] == [
        "evaluate.attacks",
        "evaluate.attacks",
        "data.unlabelled = rest",
        "data.synthetic",
        "schedule.warmup = 5",
    ]


def test_every_synonym_leads_to_a_setting() -> None:
    suggestions = Suggestions(RunConfig, {})
    groups = RunConfig.fields_by_key()
    known = {*suggestions.paths, *suggestions.others, *groups}
    assert {path for paths in SETTINGS for path in paths.split()} <= known
    assert all(plain(word) == word for word in (*SYNONYMS.settings, *NAMES))


def test_every_other_name_leads_to_a_component_or_a_choice() -> None:
    registered, choices = set[str](), set[str]()
    for key in COMPONENTS:
        registered |= set(RunConfig.fields_by_key()[key].field.metadata["registry"])
    for entry in RunConfig().entries():
        limits = entry.field.metadata.get("limits")
        choices |= set(map(str, (limits and limits.choices) or ()))
    assert set(NAMES.values()) <= registered | choices
