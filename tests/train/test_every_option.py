"""Properties of every training option: an option that is registered in `Options` is tested here."""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from dat.attacks import FGSM
from dat.config import RunConfig
from dat.config.schema import TrainConfig
from dat.core.settings import KeyedField
from dat.data import ImageData
from dat.distributed import World
from dat.optim import SGD
from dat.train import Option, Options, Part, Trainer
from dat.train.checkpoint import pack, unpack
from dat.train.checkpointer import state_of
from tests.trainers import make_trainer

FIELDS = {field.name: field for field in dataclasses.fields(Options)}
PLACES = Options.fields_by_key()
HOOKS = {name: hook for name, hook in vars(Part).items() if inspect.isfunction(hook)}

every_option = pytest.mark.parametrize("name", FIELDS)
every_setting = pytest.mark.parametrize("key", PLACES)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World.join(device="cpu", threads=1) as joined:
        yield joined


def trainer(world: World, **settings: Any) -> Trainer:
    """A tiny trainer whose attack is monitored for overfitting."""
    random = torch.Generator().manual_seed(0)
    images = ImageData.of(torch.rand(12, 1, 2, 2, generator=random), torch.arange(12) % 2)
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2), nn.BatchNorm1d(2))
    return make_trainer(
        model=model,
        data=images,
        holdout=images,
        attack=FGSM(),
        optimizer=SGD(lr=0.1, momentum=0.9),
        epochs=2,
        batch=4,
        world=world,
        **settings,
    )


def other_values(place: KeyedField) -> list[Any]:
    """Valid values of a setting besides its default: all choices, or one value."""
    default, limits = place.field.default, place.field.metadata["limits"]
    if isinstance(default, bool):
        return [not default]
    if limits.choices is not None:
        return [choice for choice in limits.choices if choice != default]
    if isinstance(default, tuple):
        return [(1,)]
    assert isinstance(default, int | float), f"{place.field.name}: extend other_values"
    return [next(value for value in (default + 1, 0.5) if limits.allow(value))]


VALUES = [(key, value) for key, place in PLACES.items() for value in other_values(place)]
every_value = pytest.mark.parametrize(("key", "value"), VALUES, ids=str)


def test_the_registry_holds_options_of_distinct_classes() -> None:
    options = list(Options().each())
    assert len(options) == len(FIELDS) >= 10
    assert all(isinstance(option, Option) for option in options)
    assert len({type(option) for option in options}) == len(options)


@every_option
def test_an_option_is_frozen(name: str) -> None:
    option = getattr(Options(), name)
    for field in dataclasses.fields(option):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(option, field.name, getattr(option, field.name))


@every_option
def test_an_option_has_settings(name: str) -> None:
    assert any(place.sections[0] == name for place in PLACES.values())


def test_no_two_settings_have_the_same_key() -> None:
    options = list(Options().each())
    settings = [field for option in options for field in dataclasses.fields(option)]
    assert len([field for field in settings if field.metadata]) == len(PLACES)
    own = [field.name for field in dataclasses.fields(TrainConfig) if field.name != "options"]
    assert len(TrainConfig.fields_by_key()) == len(own) + len(PLACES)


@every_setting
def test_a_setting_has_a_help_text_and_a_valid_default(key: str) -> None:
    field = PLACES[key].field
    assert field.metadata["help"].strip()
    assert field.metadata["limits"].allow(field.default)


def test_options_are_read_back_from_their_dump() -> None:
    assert Options.read(Options().dump()) == Options()
    assert list(Options().dump()) == list(PLACES)


@every_value
def test_a_setting_is_set_by_its_key(key: str, value: Any) -> None:
    config = RunConfig.read({"train": {key: value}})
    dumped = config.dump()["train"]
    assert dumped[key] == (list(value) if isinstance(value, tuple) else value)
    unchanged = RunConfig().dump()["train"]
    assert {name for name in dumped if dumped[name] != unchanged[name]} == {key}
    assert RunConfig.read(config.dump()) == config
    typed = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
    assert RunConfig.read({"train": {key: typed}}) == config


@every_value
def test_a_conflict_with_sharding_names_the_setting(key: str, value: Any) -> None:
    default = getattr(Options(), PLACES[key].sections[0])
    assert default.sharding_conflict() == ""
    changed = dataclasses.replace(default, **{PLACES[key].field.name: value})
    conflict = changed.sharding_conflict()
    assert conflict == "" or f"train.{key}" in conflict


def overridden(part: Part) -> set[str]:
    return {name for name, hook in HOOKS.items() if getattr(type(part), name) is not hook}


def parameters(function: Any) -> list[tuple[str, Any, Any]]:
    signature = inspect.signature(function)
    return [(p.name, p.kind, p.default) for p in signature.parameters.values()]


@every_option
def test_build_gives_a_part_with_the_hooks_signatures(world: World, name: str) -> None:
    made = trainer(world)
    part = getattr(made.options, name).build(made)
    assert isinstance(part, Part)
    for hook in overridden(part):
        assert parameters(getattr(type(part), hook)) == parameters(HOOKS[hook]), hook
    public = [name for name in dir(part) if name.startswith(("on_", "around_"))]
    assert set(public) <= HOOKS.keys(), "not a hook: it would never be called"


def test_the_parts_of_a_run_have_disjoint_state(world: World) -> None:
    made = trainer(world, ema=0.5, sentinel="stop")
    made.fit()
    states = [part.state_dict(made) for part in made.parts]
    keys = [key for state in states for key in state]
    assert len(keys) == len(set(keys)) >= 8
    own = {key: value for key, value in state_of(made).items() if key not in keys}
    assert {"model", "optimizer", "records", "tally"} <= own.keys()
    worker_keys = [key for part in made.parts for key in part.worker_state()]
    assert len(worker_keys) == len(set(worker_keys))


def restored(state: Any) -> Any:
    """A state after a round trip through a checkpoint."""
    tensors: dict[str, torch.Tensor] = {}
    values = json.loads(json.dumps(pack(state, tensors)))
    return unpack(values, {name: value.clone() for name, value in tensors.items()})


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


def trainer_or_error(world: World, **settings: Any) -> Trainer | str:
    try:
        return trainer(world, **settings)
    except ValueError as error:
        return str(error)


@every_value
def test_the_state_of_every_part_is_restored(world: World, key: str, value: Any) -> None:
    """With any single setting changed, unless the trainer refuses the value by its name."""
    made = trainer_or_error(world, **{key: value})
    if isinstance(made, str):
        assert made.startswith(f"train.{key} = ")
        return
    made.fit()
    state, worker_state = made.parts.state_dict(made), made.parts.worker_state()
    checkpoint = restored(state_of(made))
    assert equal({name: checkpoint[name] for name in state}, state)
    fresh = trainer(world, **{key: value})
    fresh._join()
    fresh.parts.call("load_state_dict", checkpoint, fresh)
    fresh.parts.call("load_worker_state", restored(worker_state))
    assert equal(fresh.parts.state_dict(fresh), state)
    assert equal(fresh.parts.worker_state(), worker_state)
