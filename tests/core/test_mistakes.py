"""Several mistakes are reported at once, and each gets the best suggestion."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from dat.core.mistakes import SHOWN, Mistakes, Synonyms, closest, did_you_mean
from dat.core.settings import SettingError, Settings, component, inline, section, setting


def check_speed(car: Car) -> Iterator[str]:
    if car.engine.power > 5 and car.body.doors > 4:  # type: ignore[attr-defined]
        yield "engine.power and body.doors: too many"


def check_seed(car: Car) -> Iterator[str]:
    if car.seed == 3:
        yield "seed = 3: must be another"


@dataclass(frozen=True, kw_only=True)
class Petrol(Settings):
    power: int = setting(5, "horses", ge=0)
    cylinders: int = setting(4, "cylinders", ge=1)


@dataclass(frozen=True, kw_only=True)
class Electric(Settings):
    power: int = setting(5, "horses", ge=0)
    volts: int = setting(400, "volts", ge=1)


@dataclass(frozen=True, kw_only=True)
class Radio(Settings):
    band: str = setting("fm", "frequency band", choices=("am", "fm"))
    volume: int = setting(3, "loudness", ge=0, le=10)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.band == "am" and self.volume > 5:
            raise SettingError(f"volume = {self.volume}: must be at most 5 with am")


@dataclass(frozen=True, kw_only=True)
class Body(Settings):
    doors: int = setting(4, "doors", ge=1)
    color_name: str = setting("red", "paint")
    radio: Radio = inline(Radio)


@dataclass(frozen=True, kw_only=True)
class Car(Settings):
    synonyms = Synonyms({"hp": ("engine.power",), "chassis": ("body",)}, {"gas": "petrol"})
    checks: ClassVar[tuple[Callable[[Any], Iterator[str]], ...]] = (check_speed, check_seed)

    seed: int = setting(0, "the seed", ge=0)
    engine: Settings = component({"petrol": Petrol, "electric": Electric}, "petrol", "the engine")
    body: Body = section(Body, "the body")


def mistakes(values: object) -> list[str]:
    with pytest.raises(SettingError) as error:
        Car.read(values)
    return list(error.value.mistakes)


def test_all_mistakes_are_reported_in_the_order_of_the_file() -> None:
    values = {
        "body": {"doors": 0, "color": "red", "volume": 11},
        "sed": 1,
        "engine": {"cylinders": "four", "volts": 3, "power": -1},
        "seed": -1,
    }
    assert mistakes(values) == [
        "body.doors = 0: must be at least 1",
        "unknown setting body.color: did you mean body.color_name?",
        "body.volume = 11: must be at least 0 and at most 10",
        "unknown setting sed: did you mean seed?",
        "engine.cylinders = 'four': must be a whole number, at least 1",
        "engine.volts belongs to electric; engine.name is petrol",
        "engine.power = -1: must be at least 0",
        "seed = -1: must be at least 0",
    ]


def test_one_mistake_is_one_line_and_several_have_a_header() -> None:
    with pytest.raises(SettingError) as error:
        Car.read({"seed": -1})
    assert str(error.value.in_source("my.yaml")) == "seed = -1: must be at least 0"
    with pytest.raises(SettingError) as error:
        Car.read({"seed": -1, "body": 3})
    expected = "  seed = -1: must be at least 0\n  body = 3: must be a group of settings"
    assert str(error.value) == f"2 mistakes\n{expected}"
    assert str(error.value.in_source("my.yaml")) == f"my.yaml: 2 mistakes\n{expected}"


def test_a_long_list_of_mistakes_ends_with_their_number() -> None:
    with pytest.raises(SettingError) as error:
        Car.read({f"unheard_of_{number}": 1 for number in range(SHOWN + 5)})
    lines = str(error.value).splitlines()
    assert lines[0] == "25 mistakes" and lines[-1] == "  and 5 more"
    assert len(lines) == SHOWN + 2


def test_an_error_survives_pickling() -> None:
    error = SettingError("one", "two", source="digits")
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.mistakes) == (str(error), error.mistakes)


def test_a_constructor_reports_all_mistakes() -> None:
    with pytest.raises(SettingError) as error:
        Radio(band="uhf", volume=11)
    assert str(error.value).startswith("Radio: 2 mistakes\n  Radio.band = 'uhf': must be one of")
    assert error.value.mistakes[1] == "Radio.volume = 11: must be at least 0 and at most 10"


def test_checks_across_fields_run_where_the_fields_are_fine() -> None:
    wrong = {"seed": 3, "engine": {"power": 6}, "body": {"doors": 5}}
    both = ["engine.power and body.doors: too many", "seed = 3: must be another"]
    assert mistakes(wrong) == both
    with pytest.raises(SettingError) as error:
        Car(seed=3, engine=Petrol(power=6), body=Body(doors=5))
    assert list(error.value.mistakes) == both
    # the body cannot be read: the check of the speed has to wait, that of the seed does not
    assert mistakes(wrong | {"body": {"doors": 5, "volume": 11}}) == [
        "body.volume = 11: must be at least 0 and at most 10",
        "seed = 3: must be another",
    ]


def test_no_check_across_fields_misleads_after_an_unknown_setting() -> None:
    assert mistakes({"sed": 1, "seed": 3}) == ["unknown setting sed: did you mean seed?"]


def test_a_check_of_inline_settings_names_the_setting() -> None:
    assert mistakes({"body": {"band": "am", "volume": 6}}) == [
        "body.volume = 6: must be at most 5 with am"
    ]


def test_settings_of_a_misspelled_component_are_checked() -> None:
    assert mistakes({"engine": {"name": "Petrol", "cylinders": 0, "volts": 1, "wheels": 4}}) == [
        "engine.name = 'Petrol': unknown: did you mean petrol?",
        "engine.cylinders = 0: must be at least 1",
        "unknown setting engine.wheels: choose from engine.cylinders, engine.name, engine.power",
    ]
    assert mistakes({"engine": {"name": "steam", "cylinders": 0, "wheels": 4}})[0].startswith(
        "engine.name = 'steam': unknown: choose from"
    )


def test_settings_of_a_misspelled_group_are_checked() -> None:
    assert mistakes({"Chassis": {"door": 3}, "bodi": {"doors": 0}}) == [
        "unknown setting Chassis: did you mean body?",
        "unknown setting body.door: did you mean body.doors?",
        "unknown setting bodi: did you mean body?",
        "body.doors = 0: must be at least 1",
    ]


@pytest.mark.parametrize(
    ("values", "suggestion"),
    [
        ({"body": {"Color-Name": "red"}}, "did you mean body.color_name?"),
        ({"body": {"colorname": "red"}}, "did you mean body.color_name?"),
        ({"body": {"HP": 3}}, "did you mean engine.power?"),  # a synonym, of another group
        ({"doors": 3}, "did you mean body.doors?"),
        ({"engine": {"doors": 3}}, "did you mean body.doors?"),
        ({"seed_": 3}, "did you mean seed?"),
        ({"volts": 3}, "did you mean engine.volts (of electric)?"),
        ({"body": {"volts": 3}}, "did you mean engine.volts (of electric)?"),
        ({"engine": "electric", "volts": 3}, "did you mean engine.volts?"),
        ({"engine": {"Volume": 3}}, "did you mean body.volume?"),
        ({"xyz": 3}, "choose from body, engine, seed"),
        ({"engine": "gas"}, "engine.name = 'gas': unknown: did you mean petrol?"),
        ({"body": {"band": "FM"}}, "must be one of am, fm (did you mean fm?)"),
    ],
)
def test_suggestions(values: object, suggestion: str) -> None:
    (mistake,) = mistakes(values)
    assert mistake.endswith(suggestion)


@pytest.mark.parametrize(
    ("word", "match"),
    [
        ("PGD", "pgd"),
        ("Preact_ResNet18", "preact-resnet18"),
        ("preactresnet18", "preact-resnet18"),
        ("resnet", "resnet18"),
        ("prn", "preact-resnet18"),
        ("zzz", None),
        ("-", None),
    ],
)
def test_names_are_found_regardless_of_case_and_punctuation(word: str, match: str | None) -> None:
    known = ["pgd", "apgd", "resnet18", "preact-resnet18"]
    assert closest(word, known, {"prn": "preact-resnet18"}) == match
    assert did_you_mean(word, known, {"prn": "preact-resnet18"}).startswith(
        f": did you mean {match}?" if match else ": choose from apgd, pgd, preact-resnet18"
    )


def test_mistakes_are_collected_and_refused_together() -> None:
    found = Mistakes()
    found.refuse()
    for names in (("one",), ("two", "three")):
        with found.collected():
            raise SettingError(*names)
    with pytest.raises(SettingError, match="digits: 3 mistakes\n  one\n  two\n  three"):
        found.refuse("digits")
