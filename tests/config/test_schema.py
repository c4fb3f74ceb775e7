"""RunConfig, edits of it, and edits from a command line."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dat.attacks import ATTACKS, FGSM, PGD, NoAttack
from dat.config.schema import DataConfig, RunConfig, merge, parse_edits
from dat.core.settings import SettingError
from dat.data import AUGMENTATIONS, SOURCES
from dat.models import MODELS
from dat.objectives import OBJECTIVES
from dat.optim import OPTIMIZERS, SCHEDULES

REGISTRIES: dict[str, Any] = {
    "attack": ATTACKS,
    "objective": OBJECTIVES,
    "optimizer": OPTIMIZERS,
    "schedule": SCHEDULES,
}
COMPONENTS = [(group, name) for group, registry in REGISTRIES.items() for name in registry]
PATHS = [row.path for row in RunConfig().rows()]


def nested(path: str, value: object) -> dict[str, Any]:
    first, _, rest = path.partition(".")
    return {first: nested(rest, value) if rest else value}


def test_an_empty_config_is_the_default() -> None:
    assert RunConfig.read({}) == RunConfig()


@pytest.mark.parametrize(("group", "name"), COMPONENTS)
def test_every_component_can_be_named_and_reads_back(group: str, name: str) -> None:
    config = RunConfig.read({group: name})
    assert type(getattr(config, group)) is REGISTRIES[group][name]
    assert config == RunConfig.read({group: {"name": name}})
    assert RunConfig.read(config.dump()) == config


@pytest.mark.parametrize(("group", "name"), COMPONENTS)
def test_every_row_has_a_help_text_and_a_range(group: str, name: str) -> None:
    rows = list(RunConfig.read({group: name}).rows())
    assert [row.path for row in rows if not row.help.strip() or not row.allowed.strip()] == []
    assert len({row.path for row in rows}) == len(rows)


@pytest.mark.parametrize(("group", "name"), COMPONENTS)
def test_every_shown_value_can_be_typed_back(group: str, name: str) -> None:
    rows = list(RunConfig.read({group: name}).rows())
    typed = [f"{row.path}={row.value}" for row in rows if row.path != "schedule.milestones"]
    again = RunConfig.read(parse_edits(typed))
    assert [row.value for row in again.rows()] == [row.value for row in rows]


@pytest.mark.parametrize(
    ("path", "choices"),
    [
        ("model.name", [*MODELS, "my.nets:Net"]),
        ("data.name", [*SOURCES, "my.npz", "my.data:function"]),
        ("data.augmentation", AUGMENTATIONS),
    ],
)
def test_every_registered_name_is_allowed(path: str, choices: list[str]) -> None:
    for choice in choices:
        config = RunConfig.read(nested(path, choice))
        shown = {row.path: row.value for row in config.rows()}
        assert shown[path] == choice


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("threat.eps", -1, "threat.eps = -1: must be at least 0"),
        ("threat.eps", "-8/255", "threat.eps = -0.0313725: must be at least 0"),
        ("threat.eps", "big", "threat.eps = 'big': must be a number, at least 0"),
        ("threat.norm", "l1", "threat.norm = 'l1': must be one of linf, l2"),
        ("threat.nrm", "l2", "unknown setting threat.nrm: did you mean threat.norm?"),
        ("attack.step", 5, "unknown setting attack.step: did you mean attack.steps or"),
        ("attack.steps", 0, "attack.steps = 0: must be at least 1"),
        ("attack.steps", "ten", "attack.steps = 'ten': must be a whole number, at least 1"),
        ("attack.random_start", "si", "attack.random_start = 'si': must be true or false"),
        ("attack.name", "pdg", "attack.name = 'pdg': unknown: did you mean pgd?"),
        ("attack", None, "attack = None: must be a group of settings with a name"),
        ("data.holdout", 1, "data.holdout = 1: must be at least 0 and below 1"),
        ("data.parts", 0, "data.parts = 0: must be at least 1"),
        ("model.name", "resnet", "model.name = 'resnet': unknown: did you mean resnet"),
        ("train.batch", 0.5, "train.batch = 0.5: must be a whole number, at least 1"),
        ("train.grow", "5,3", "train.grow = 5, 3: must increase"),
        ("train.grow", "0", "train.grow = 0: must be at least 1"),
        ("train.grow", "30", "train.grow = 30: must be below epochs = 30"),
        ("train.grow_by", 1.5, "train.grow_by = 1.5: must be a whole number, at least 2"),
        ("train.bn", "all", "train.bn = 'all': must be one of local, sync, ghost"),
        ("train.ghost", 1, "train.ghost = 1: must be at least 2"),
        ("train.ema", 1, "train.ema = 1: must be at least 0 and below 1"),
        ("schedule.milestones", "5,3", "schedule.milestones = (5, 3): must increase"),
        ("comm.backend", "mpi", "comm.backend = 'mpi': must be one of auto, gloo, nccl"),
        ("seed", -1, "seed = -1: must be at least 0"),
        ("atack.steps", 5, "unknown setting atack: did you mean attack?"),
    ],
)
def test_wrong_settings_are_refused(path: str, value: object, message: str) -> None:
    with pytest.raises(SettingError) as error:
        RunConfig.read(nested(path, value))
    assert str(error.value).startswith(message)


def test_fractions_lists_and_none_can_be_typed() -> None:
    arguments = ["threat.eps=8/255", "data.parts=none", "attack.step_size=2/255", "train.ema=.9"]
    config = RunConfig.read(parse_edits([*arguments, "schedule.milestones=5,9", "about=a = b"]))
    assert config.threat.eps == 8 / 255
    assert config.data.parts is None
    assert config.attack == PGD(step_size=2 / 255)
    assert config.train.options.averaging.decay == 0.9
    assert config.schedule == SCHEDULES["piecewise"].read({"milestones": [5, 9]})
    assert config.about == "a = b"


# Arbitrary documents


def texts() -> st.SearchStrategy[str]:
    known = [word for path in PATHS for word in path.split(".")]
    odd = ["none", "8/255", "1,2", "true", "inf", "nan", "-1", "a:b", ":", "/"]
    return st.sampled_from([*known, *odd]) | st.text(max_size=5)


documents = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts(),
    lambda below: (
        st.lists(below, max_size=3) | st.dictionaries(texts() | st.integers(), below, max_size=4)
    ),
    max_leaves=12,
)


def read_or_refuse(document: object) -> None:
    """A config that reads back, or a SettingError; any other exception fails the test."""
    try:
        config = RunConfig.read(document)
    except SettingError:
        return
    assert RunConfig.read(config.dump()) == config


@settings(max_examples=200)
@given(documents)
def test_any_document_is_read_or_refused(document: object) -> None:
    read_or_refuse(document)


@settings(max_examples=300)
@example("attack.name", [])
@given(st.sampled_from(PATHS), documents)
def test_any_value_of_any_setting_is_read_or_refused(path: str, value: object) -> None:
    read_or_refuse(merge(RunConfig().dump(), nested(path, value)))


@settings(max_examples=200)
@given(st.sampled_from(PATHS), st.floats() | st.integers() | texts())
def test_any_argument_of_a_command_line_is_read_or_refused(path: str, value: object) -> None:
    read_or_refuse(merge(RunConfig().dump(), parse_edits([f"{path}={value}"])))


# Merging edits into a config


@pytest.mark.parametrize(
    ("base", "edits", "merged"),
    [
        ({}, {}, {}),
        ({"seed": 1}, {"seed": 2}, {"seed": 2}),
        ({"seed": 1}, {"about": "x"}, {"seed": 1, "about": "x"}),
        (
            {"train": {"epochs": 5, "batch": 8}},
            {"train": {"batch": 9}},
            {"train": {"epochs": 5, "batch": 9}},
        ),
        (
            {"attack": {"name": "pgd", "steps": 5}},
            {"attack": {"steps": 7}},
            {"attack": {"name": "pgd", "steps": 7}},
        ),
        (
            {"attack": {"name": "pgd", "steps": 5}},
            {"attack": {"name": "pgd", "restarts": 2}},
            {"attack": {"name": "pgd", "steps": 5, "restarts": 2}},
        ),
        # another component: the settings of the old one are dropped
        (
            {"attack": {"name": "pgd", "steps": 5}},
            {"attack": {"name": "fgsm", "step_ratio": 1}},
            {"attack": {"name": "fgsm", "step_ratio": 1}},
        ),
        (
            {"attack": {"name": "pgd", "steps": 5}},
            {"attack": "fgsm"},
            {"attack": {"name": "fgsm"}},
        ),
        (
            {"attack": {"name": "pgd", "steps": 5}},
            {"attack": "pgd"},
            {"attack": {"name": "pgd", "steps": 5}},
        ),
        # the short form in the base
        (
            {"attack": "fgsm"},
            {"attack": {"step_ratio": 1}},
            {"attack": {"name": "fgsm", "step_ratio": 1}},
        ),
        ({"attack": "fgsm"}, {"attack": {"name": "pgd"}}, {"attack": {"name": "pgd"}}),
        ({"attack": "fgsm"}, {"attack": "pgd"}, {"attack": {"name": "pgd"}}),
        # data and model have the same settings for every name
        (
            {"model": {"name": "cnn", "width": 8}},
            {"model": {"name": "resnet50"}},
            {"model": {"name": "resnet50", "width": 8}},
        ),
        (
            {"data": {"name": "digits", "holdout": 0.2}},
            {"data": "my.npz"},
            {"data": {"name": "my.npz", "holdout": 0.2}},
        ),
    ],
)
def test_edits_are_merged_group_by_group(
    base: dict[str, Any], edits: dict[str, Any], merged: dict[str, Any]
) -> None:
    before = repr((base, edits))
    assert merge(base, edits) == merged
    assert repr((base, edits)) == before  # neither is modified


def test_a_merged_config_is_read() -> None:
    base = {"attack": {"name": "pgd", "steps": 3}, "data": {"holdout": 0.2}}
    edited = RunConfig.read(merge(base, parse_edits(["attack=fgsm", "data.parts=2"])))
    assert edited.attack == FGSM()
    assert edited.data == DataConfig(holdout=0.2, parts=2)
    assert RunConfig.read(merge(base, {"attack": "none"})).attack == NoAttack()


def test_naming_the_default_component_keeps_its_settings() -> None:
    merged = merge({"attack": {"steps": 20}}, {"attack": {"name": "pgd"}})
    assert RunConfig.read(merged).attack == PGD(steps=20)


# A command line


@pytest.mark.parametrize(
    ("words", "edits"),
    [
        ([], {}),
        (["seed=1"], {"seed": "1"}),
        (["attack.steps=5", "attack.restarts=2"], {"attack": {"steps": "5", "restarts": "2"}}),
        (["seed=1", "seed=2"], {"seed": "2"}),
        (["about=x=y"], {"about": "x=y"}),
        (["about="], {"about": ""}),
        (["attack=fgsm"], {"attack": {"name": "fgsm"}}),
        (["attack.step_ratio=1", "attack=fgsm"], {"attack": {"step_ratio": "1", "name": "fgsm"}}),
        (["attack=fgsm", "attack.step_ratio=1"], {"attack": {"name": "fgsm", "step_ratio": "1"}}),
        (["a.b.c=1"], {"a": {"b.c": "1"}}),
    ],
)
def test_arguments_become_nested_groups(words: list[str], edits: dict[str, Any]) -> None:
    assert parse_edits(words) == edits


def test_the_order_of_arguments_does_not_matter() -> None:
    words = ["attack=fgsm", "attack.step_ratio=1"]
    one, other = (RunConfig.read(parse_edits(order)) for order in (words, words[::-1]))
    assert one.attack == other.attack == FGSM(step_ratio=1)


@pytest.mark.parametrize("word", ["seed", "=5", ".steps=5", "attack.=5", "attack..steps=5", ""])
def test_arguments_that_are_not_settings_are_refused(word: str) -> None:
    with pytest.raises(SettingError, match=r"settings are given as key=value") as error:
        parse_edits(["seed=1", word])
    assert repr(word) in str(error.value)


def test_a_group_under_a_plain_setting_is_refused() -> None:
    with pytest.raises(SettingError, match="seed = "):
        RunConfig.read(parse_edits(["seed=1", "seed.x=2"]))


def test_dump_has_only_plain_values() -> None:
    def check(value: object) -> None:
        if isinstance(value, dict):
            assert all(isinstance(key, str) for key in value)
            for item in value.values():
                check(item)
        elif isinstance(value, list):
            for item in value:
                check(item)
        else:
            assert value is None or type(value) in (bool, int, float, str)
            assert not (isinstance(value, float) and math.isnan(value))

    check(RunConfig().dump())


@pytest.mark.parametrize(
    "attack", [{"name": "free"}, {"name": "pgd", "random_start": False}], ids=str
)
def test_trades_refuses_an_attack_without_a_random_start(attack: dict[str, Any]) -> None:
    with pytest.raises(
        SettingError, match=r"attack.random_start = false: the KL divergence of objective trades"
    ):
        RunConfig.read({"objective": "trades", "attack": attack})
    RunConfig.read({"objective": "trades", "attack": attack | {"random_start": True}})
