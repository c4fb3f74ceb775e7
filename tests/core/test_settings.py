"""Settings: what they accept, what they reject, and the error messages."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import pytest

from dat.core.settings import (
    SettingError,
    SettingLimits,
    SettingRow,
    Settings,
    component,
    did_you_mean,
    section,
    setting,
    show,
)


@dataclass(frozen=True, kw_only=True)
class Sail(Settings):
    area: float = setting(10.0, "square metres", gt=0, lt=100)
    reefs: tuple[int, ...] = setting((), "rows of points", ge=1)


@dataclass(frozen=True, kw_only=True)
class Engine(Settings):
    power: int = setting(5, "horses", ge=0)


@dataclass(frozen=True, kw_only=True)
class Odd(Settings):
    low: int = setting(0, "the lower one")
    high: int = setting(1, "the higher one")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low > self.high:
            raise SettingError(f"low = {self.low}: must not be above high")


@dataclass(frozen=True, kw_only=True)
class Boat(Settings):
    crew: int = setting(2, "people on board", ge=1, le=8)
    draught: float = setting(1.5, "metres below the water", ge=0)
    keel: float | None = setting(None, "metres of keel, or none", gt=0)
    name: str = setting("Ada", "on the stern")
    rig: str = setting("sloop", "number of masts and so on", choices=("sloop", "ketch"))
    hull: str = setting("wood", "what she is made of", choices=("wood", "steel"), or_import=True)
    decked: bool = setting(True, "whether there is a deck")
    position: tuple[float, float] = setting((0.0, 0.0), "latitude and longitude", ge=-180, le=180)
    sail: Sail = section(Sail, "the main sail")
    drive: Settings = component({"sail": Sail, "engine": Engine}, "sail", "what moves her")
    odd: Odd = section(Odd, "a pair with a rule")


@pytest.mark.parametrize(
    ("field", "given", "kept"),
    [
        ("crew", 3, 3),
        ("crew", "3", 3),
        ("crew", 3.0, 3),
        ("draught", 2, 2.0),
        ("draught", "2.5", 2.5),
        ("draught", "1e-3", 1e-3),
        ("draught", "8/255", 8 / 255),
        ("draught", "1.5/2", 0.75),
        ("keel", None, None),
        ("keel", "none", None),
        ("keel", "None", None),
        ("keel", "null", None),
        ("keel", "", None),
        ("keel", "1/4", 0.25),
        ("keel", 2, 2.0),
        ("name", "", ""),
        ("name", "none", "none"),
        ("name", 12, "12"),
        ("rig", "ketch", "ketch"),
        ("hull", "my.hulls:glass", "my.hulls:glass"),
        ("decked", False, False),
        ("decked", "false", False),
        ("decked", "True", True),
        ("position", "54.5,10", (54.5, 10.0)),
        ("position", "1/2,10", (0.5, 10.0)),
        ("position", [54, 10], (54.0, 10.0)),
        ("position", (54, 10.5), (54.0, 10.5)),
    ],
)
def test_values_become_their_type(field: str, given: object, kept: object) -> None:
    for boat in (Boat(**{field: given}), Boat.read({field: given})):  # type: ignore[arg-type]
        assert repr(getattr(boat, field)) == repr(kept)  # 1 is not 1.0, and False is not 0


@pytest.mark.parametrize(
    ("given", "kept"),
    [("2", (2,)), ("2,4", (2, 4)), ([2, 4], (2, 4)), (3, (3,)), ([], ()), ((), ())],
)
def test_lists_of_any_length(given: object, kept: tuple[int, ...]) -> None:
    assert Sail.read({"reefs": given}).reefs == kept


WRONG: list[tuple[str, object, str]] = [
    ("crew", 0, "crew = 0: must be at least 1 and at most 8"),
    ("crew", 9, "crew = 9: must be at least 1 and at most 8"),
    ("crew", 2.5, "crew = 2.5: must be a whole number, at least 1 and at most 8"),
    ("crew", "2.5", "crew = '2.5': must be a whole number"),
    ("crew", "two", "crew = 'two': must be a whole number"),
    ("crew", "", "crew = '': must be a whole number"),
    ("crew", None, "crew = None: must be a whole number"),
    ("crew", True, "crew = True: must be a whole number"),
    ("crew", [2], "crew = [2]: must be a whole number"),
    ("crew", math.nan, "crew = nan: must be a whole number"),
    ("crew", math.inf, "crew = inf: must be a whole number"),
    ("draught", -0.1, "draught = -0.1: must be at least 0"),
    ("draught", "-1/10", "draught = -0.1: must be at least 0"),
    ("draught", math.nan, "draught = nan: must be at least 0"),
    ("draught", "nan", "draught = nan: must be at least 0"),
    ("draught", "deep", "draught = 'deep': must be a number, at least 0"),
    ("draught", "1/2/3", "draught = '1/2/3': must be a number"),
    ("draught", "1/", "draught = '1/': must be a number"),
    ("draught", "none", "draught = 'none': must be a number"),
    ("draught", False, "draught = False: must be a number"),
    ("draught", {}, "draught = {}: must be a number"),
    ("keel", 0, "keel = 0: must be above 0"),
    ("keel", "long", "keel = 'long': must be a number or none, above 0"),
    ("name", None, "name = None: must be text"),
    ("name", True, "name = True: must be text"),
    ("name", ["Ada"], "name = ['Ada']: must be text"),
    ("rig", "slop", "rig = 'slop': must be one of sloop, ketch (did you mean sloop?)"),
    ("rig", "brig-and-more", "rig = 'brig-and-more': must be one of sloop, ketch"),
    ("rig", "a:b", "rig = 'a:b': must be one of sloop, ketch"),
    ("hull", "woud", "hull = 'woud': must be wood, steel, or package.module:name (did you mean"),
    ("decked", 1, "decked = 1: must be true or false"),
    ("decked", "yes", "decked = 'yes': must be true or false"),
    ("decked", None, "decked = None: must be true or false"),
    ("position", [1], "position = [1]: must be 2 numbers"),
    ("position", "1,2,3", "position = '1,2,3': must be 2 numbers"),
    ("position", [1, None], "position = [1, None]: must be 2 numbers"),
    ("position", [0, 181], "position = 0,181: must be at least -180 and at most 180"),
    ("position", 5, "position = 5: must be 2 numbers"),
]


@pytest.mark.parametrize(("field", "value", "message"), WRONG)
def test_wrong_values_are_refused_with_their_name(field: str, value: object, message: str) -> None:
    with pytest.raises(SettingError) as error:
        Boat.read({field: value})
    assert str(error.value).startswith(message)
    with pytest.raises(SettingError) as error:
        Boat(**{field: value})  # type: ignore[arg-type]
    assert str(error.value).startswith(f"Boat.{message}")


@pytest.mark.parametrize(
    ("field", "value"),
    [("draught", "8/0"), ("draught", 10**400), ("crew", 10**400), ("drive", {"name": ["sail"]})],
)
def test_huge_values_are_refused(field: str, value: object) -> None:
    with pytest.raises(SettingError, match=field):
        Boat.read({field: value})


@pytest.mark.parametrize("value", [math.inf, "inf", "1e999"])
def test_infinite_numbers_are_refused(value: object) -> None:
    with pytest.raises(SettingError, match="draught"):
        Boat.read({"draught": value})


@pytest.mark.parametrize("word", ["", "none"])
def test_an_empty_list_can_be_typed(word: str) -> None:
    assert Sail.read({"reefs": word}).reefs == ()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"crw": 1}, "unknown setting crw: did you mean crew?"),
        ({"xyz": 1}, "unknown setting xyz: choose from crew, decked, draught, drive, hull, keel"),
        ({5: 1}, "unknown setting 5: choose from"),
        ({"sail": {"aria": 1}}, "unknown setting sail.aria: did you mean sail.area?"),
        ({"sail": 5}, "sail = 5: must be a group of settings"),
        ({"sail": None}, "sail = None: must be a group of settings"),
        ({"sail": {"area": 100}}, "sail.area = 100: must be above 0 and below 100"),
        ({"sail": {"reefs": [0]}}, "sail.reefs = 0: must be at least 1"),
        ({"sail": {"reefs": [2, "x"]}}, "sail.reefs = [2, 'x']: must be a list of whole numbers"),
        ({"drive": {"name": "engin"}}, "drive.name = 'engin': unknown: did you mean engine?"),
        ({"drive": "oars"}, "drive.name = 'oars': unknown: choose from engine, sail"),
        ({"drive": {"name": None}}, "drive.name = None: unknown"),
        ({"drive": None}, "drive = None: must be a group of settings with a name"),
        ({"drive": 5}, "drive = 5: must be a group of settings with a name"),
        ({"drive": {"power": 5}}, "drive.power belongs to engine; drive.name is sail"),
        ({"drive": {"name": "engine", "power": -1}}, "drive.power = -1: must be at least 0"),
        ({"odd": {"low": 3, "high": 2}}, "odd.low = 3: must not be above high"),
        ([], "the config = []: must be a group of settings"),
        ("boat", "the config = 'boat': must be a group of settings"),
    ],
)
def test_errors_in_documents_name_the_setting(values: object, message: str) -> None:
    with pytest.raises(SettingError) as error:
        Boat.read(values)
    assert str(error.value).startswith(message)


def test_setting_errors_are_value_errors() -> None:
    assert issubclass(SettingError, ValueError)


def test_unset_means_the_default() -> None:
    assert Boat.read({}) == Boat()
    assert Boat().drive == Sail()


def test_a_component_is_chosen_by_its_name() -> None:
    assert Boat.read({"drive": "engine"}).drive == Engine()
    assert Boat.read({"drive": {"name": "engine", "power": "7"}}).drive == Engine(power=7)
    assert Boat.read({"drive": {"area": 20}}).drive == Sail(area=20)


def test_settings_are_frozen_and_take_keywords_only() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Boat().crew = 3  # type: ignore[misc]
    with pytest.raises(TypeError, match="positional"):
        Boat(3)  # type: ignore[call-arg]


def test_dump_is_plain_and_reads_back() -> None:
    boat = Boat(crew=3, keel=0.5, position=(1.0, 2.0), drive=Engine(power=9), decked=False)
    dumped = boat.dump()
    assert dumped["drive"] == {"name": "engine", "power": 9}
    assert dumped["position"] == [1.0, 2.0]
    assert dumped["sail"] == {"area": 10.0, "reefs": []}
    assert Boat.read(dumped) == boat
    assert Boat.read(Boat().dump()) == Boat()


def test_rows_show_every_setting_once() -> None:
    rows = list(Boat(drive=Engine(), sail=Sail(reefs=(2, 4))).rows())
    by_path = {row.path: row for row in rows}
    assert len(by_path) == len(rows)
    assert all(row.help and row.allowed for row in rows)
    assert by_path["crew"] == SettingRow(
        "crew", "2", "people on board", "whole number, at least 1 and at most 8"
    )
    assert by_path["keel"].value == "none"
    assert by_path["keel"].allowed == "number or none, above 0"
    assert by_path["rig"].allowed == "one of sloop, ketch"
    assert by_path["hull"].allowed == "wood, steel, or package.module:name"
    assert by_path["decked"][1:] == ("true", "whether there is a deck", "true or false")
    assert by_path["position"].allowed == "2 numbers, at least -180 and at most 180"
    assert by_path["sail.reefs"][1::2] == ("2,4", "a list of whole numbers, at least 1")
    assert by_path["drive.name"] == SettingRow(
        "drive.name", "engine", "what moves her", "one of sail, engine"
    )
    assert by_path["drive.power"].value == "5"
    assert [row.path for row in rows if row.path.startswith("drive.")] == [
        "drive.name",
        "drive.power",
    ]


@pytest.mark.parametrize(
    ("limits", "text"),
    [
        (SettingLimits(), ""),
        (SettingLimits(ge=0, lt=1), "at least 0 and below 1"),
        (SettingLimits(gt=0.5, le=1e-3), "above 0.5 and at most 0.001"),
        (SettingLimits(choices=("a", "b")), "one of a, b"),
        (SettingLimits(choices=("a", "b"), or_import=True), "a, b, or package.module:name"),
    ],
)
def test_limits_say_what_they_allow(limits: SettingLimits, text: str) -> None:
    assert str(limits) == text


@pytest.mark.parametrize(
    ("limits", "inside", "outside"),
    [
        (SettingLimits(ge=1), [1, 2.5, None, True, "text", (1, 2)], [0, 0.99, math.nan, (1, 0)]),
        (SettingLimits(gt=1), [1.01], [1]),
        (SettingLimits(le=1), [1, -5], [1.01]),
        (SettingLimits(lt=1), [0.99], [1]),
        (SettingLimits(choices=("a",)), ["a", None], ["b", "a:b"]),
        (SettingLimits(choices=("a",), or_import=True), ["a", "a:b"], ["b"]),
    ],
)
def test_limits_allow_what_is_inside(
    limits: SettingLimits, inside: list[Any], outside: list[Any]
) -> None:
    assert [value for value in inside if not limits.allow(value)] == []
    assert [value for value in outside if limits.allow(value)] == []


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "none"),
        (True, "true"),
        (8 / 255, "0.0313725"),
        (300.0, "300"),
        (7, "7"),
        ((1, 0.5, None), "1,0.5,none"),
        ("text", "text"),
    ],
)
def test_values_are_shown_as_typed(value: object, text: str) -> None:
    assert show(value) == text


def test_similar_names_are_suggested() -> None:
    assert did_you_mean("stpes", ["steps", "eps"]) == ": did you mean steps?"
    assert did_you_mean("zzz", ["steps", "eps"]) == ": choose from eps, steps"
