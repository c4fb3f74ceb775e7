"""Keys of runs: those of earlier versions are kept, and changed settings never mix up runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from dat.attacks import ATTACKS, PGD
from dat.config.schema import (
    CommConfig,
    EvaluateConfig,
    ModelConfig,
    RunConfig,
    TrainConfig,
    merge,
)
from dat.core.settings import Settings, inline, section, setting
from dat.tools.reproduce import StudyPlan, read_study, runs
from dat.tools.reproduce.keys import FIRST_DEFAULTS, IGNORED, KEYED, later_settings
from dat.tools.reproduce.runs import StudyRun
from dat.train.sharding import Sharding


class Case(NamedTuple):
    study: str
    scale: str
    row: str
    seed: int = 0
    tuned: int = 0
    """The index of the tuned value."""


KEYS = {
    Case("table1", "desk", "AT"): "0f7fc645a68a",
    Case("table1", "desk", "AT", 4, 3): "d5e4b504c0c1",
    Case("table1", "desk", "DAT-FGSM w/o LALR", 0, 4): "22dd9180c653",
    Case("table1", "desk", "DAT-PGD", 0, 1): "074ca26ac6d4",
    Case("modern", "desk", "the paper's settings", 0, 1): "074ca26ac6d4",
    Case("modern", "desk", "modern, 4 bits both ways", 4, 2): "7bd16abcaf05",
    Case("table3", "desk", "AT, 1 x 96"): "502149d4be33",
    Case("table3", "desk", "DAT-PGD, 12 x 96", 4): "17e875ec2b2f",
    Case("table4", "desk", "DAT-FGSM, ours 4 bits two-sided"): "1d4c9fda8e54",
    Case("table4", "paper", "DAT-PGD (HPC), 32 bits"): "7322c06e9d2a",
    Case("table4", "paper", "DAT-PGD, 8 bits", 4): "4c2a31302bb9",
    Case("figure4", "desk", "pre-training"): "074ca26ac6d4",
    Case("figure4", "desk", "MNIST, fine-tuned"): "fc82197fa6aa",
    Case("figure4", "desk", "digits, fine-tuned", 4): "858955e87dec",
}
"""Computed before `keys.py` existed."""
AT = Case("table1", "desk", "AT")
EIGHT_BITS = Case("table4", "desk", "DAT-PGD, 8 bits")
FINETUNED = Case("figure4", "desk", "MNIST, fine-tuned")


def find(case: Case, root: Path = Path("nowhere"), **edits: dict[str, Any]) -> StudyRun:
    study = read_study(case.study, case.scale)
    row = study.row(case.row)
    origin = StudyRun(root, study.row(row.origin), {}, case.seed) if row.origin else None
    return StudyRun(root, row, row.tunings()[case.tuned] | edits, case.seed, origin)


@pytest.mark.parametrize("case", KEYS, ids=lambda case: "/".join(map(str, case)))
def test_keys_of_earlier_versions_are_kept(case: Case) -> None:
    assert find(case).key == KEYS[case]


@pytest.mark.parametrize(
    ("edits", "key"),
    [
        ({"train": {"bn": "local", "log": []}, "evaluate": {"report": 0}}, "cf776d26fee3"),
        ({"train": {"bn": "sync"}}, "30b94db22136"),
        ({"train": {"bn": "ghost", "ghost": 16}}, "10c1a302fa0d"),
        ({"train": {"grow": [1], "grow_by": 3}}, "a88296e65fe4"),
        ({"comm": {"shard": 2, "gather": "block"}}, "aad48123fe66"),
    ],
)
def test_keys_that_leave_settings_out_are_kept(edits: dict[str, Any], key: str) -> None:
    assert find(EIGHT_BITS, **edits).key == key


def test_the_key_of_a_timed_run_is_kept() -> None:
    plan = StudyPlan(read_study("table4"), Path("nowhere"), 1)
    assert plan.timing(plan.study.row(EIGHT_BITS.row)).key == "dbcae9cfda9f"


def test_the_tables_do_not_overlap() -> None:
    keyed = {f"{group}.{name}" for group, names in KEYED.items() for name in names.split()}
    assert not keyed & {*FIRST_DEFAULTS, *IGNORED}


@dataclass(frozen=True, kw_only=True)
class NewTrain(TrainConfig):
    fresh: int = setting(3, "a setting of a later version")


@dataclass(frozen=True, kw_only=True)
class WithNewSetting(RunConfig):
    train: NewTrain = section(NewTrain, "how long, in which batches")


@dataclass(frozen=True, kw_only=True)
class ChangedTrain(TrainConfig):
    fresh: int = setting(4, "the same with another default")


@dataclass(frozen=True, kw_only=True)
class WithChangedDefault(RunConfig):
    train: ChangedTrain = section(ChangedTrain, "how long, in which batches")


@dataclass(frozen=True, kw_only=True)
class Extra(Settings):
    names: tuple[str, ...] = setting(("a", "b"), "a setting of a new group")


@dataclass(frozen=True, kw_only=True)
class WithNewGroup(WithChangedDefault):
    extra: Extra = section(Extra, "a new group")


@dataclass(frozen=True, kw_only=True)
class NewPGD(PGD):
    fresh: float = setting(0.5, "a setting of a component")


@dataclass(frozen=True, kw_only=True)
class NewModel(ModelConfig):
    fresh: int = setting(3, "a setting of the network")


@dataclass(frozen=True, kw_only=True)
class WithNewModel(RunConfig):
    model: NewModel = section(NewModel, "what to train")


@pytest.mark.parametrize(
    ("schema", "edits"),
    [
        (WithNewSetting, {"train": {"fresh": 5}}),
        (WithNewGroup, {"extra": {"names": ["a"]}}),
        (WithNewModel, {"model": {"fresh": 5}}),
    ],
)
def test_a_new_setting_changes_a_key_only_if_it_is_used(
    schema: type[RunConfig], edits: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "RunConfig", schema)
    for case in (AT, FINETUNED):
        assert find(case).key == KEYS[case]
        assert find(case, **edits).key != KEYS[case]


def test_a_new_setting_of_a_component_does_so_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ATTACKS, "pgd", NewPGD)
    assert find(AT).key == find(AT, attack={"fresh": 0.5}).key == KEYS[AT]
    assert find(AT, attack={"fresh": 0.25}).key != KEYS[AT]


@dataclass(frozen=True, kw_only=True)
class ChangedEvaluate(EvaluateConfig):
    precision: str = setting("bfloat16", "in every key", choices=("float32", "bfloat16"))


@dataclass(frozen=True, kw_only=True)
class ChangedSharding(Sharding):
    gather: str = setting("block", "left out of keys", choices=("attack", "block"))


@dataclass(frozen=True, kw_only=True)
class ChangedComm(CommConfig):
    sharding: ChangedSharding = inline(ChangedSharding)


@dataclass(frozen=True, kw_only=True)
class WithChangedEvaluate(RunConfig):
    evaluate: ChangedEvaluate = section(ChangedEvaluate, "how the result is measured")


@dataclass(frozen=True, kw_only=True)
class WithChangedComm(RunConfig):
    comm: ChangedComm = section(ChangedComm, "where the workers run")


@pytest.mark.parametrize(
    ("schema", "before"),
    [
        (WithChangedEvaluate, {"evaluate": {"precision": "float32"}}),
        (WithChangedComm, {"comm": {"gather": "attack"}}),
    ],
)
def test_a_changed_default_makes_another_run(
    schema: type[RunConfig], before: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "RunConfig", schema)
    assert find(AT).key != KEYS[AT]
    assert find(AT, **before).key == KEYS[AT]


def finish(run: StudyRun) -> None:
    run.prepare()
    run.trained.mkdir(parents=True)
    (run.trained / "result.json").write_text("{}")


def test_a_run_is_reused_only_under_its_own_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def use(schema: type[RunConfig]) -> StudyRun:
        monkeypatch.setattr(runs, "RunConfig", schema)
        return find(AT, tmp_path)

    finish(old := use(WithNewSetting))
    assert old.key == KEYS[AT]
    new = use(WithChangedDefault)
    assert not new.done() and new.folder != old.folder
    assert find(AT, tmp_path, train={"fresh": 3}).folder != new.folder
    finish(new)
    assert yaml.safe_load(new.recipe.read_text())["train"]["fresh"] == 4
    assert use(WithNewSetting).folder == old.folder
    assert use(WithChangedDefault).folder == new.folder
    assert use(WithNewGroup).folder == new.folder  # one more setting loses neither
    assert new.done() and old.done()


def test_a_run_that_predates_a_setting_is_reused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish(find(AT, tmp_path))
    monkeypatch.setattr(runs, "RunConfig", WithNewSetting)
    assert find(AT, tmp_path).done()
    assert not find(AT, tmp_path, train={"fresh": 5}).done()


def test_a_fine_tuned_run_leaves_the_network_to_its_origin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "RunConfig", WithNewModel)
    run = find(FINETUNED, tmp_path)
    assert run.origin is not None
    run.prepare()
    run.origin.prepare()
    assert "fresh" not in yaml.safe_load(run.recipe.read_text())["model"]
    assert yaml.safe_load(run.origin.recipe.read_text())["model"]["fresh"] == 3


def test_recipes_are_as_written_with_later_settings_spelled_out(tmp_path: Path) -> None:
    run = find(AT, tmp_path)
    run.prepare()
    later = later_settings(RunConfig.read(run.settings))
    assert later["optimizer"] == {"clip": None}
    assert yaml.safe_load(run.recipe.read_text()) == merge(run.settings, later)
