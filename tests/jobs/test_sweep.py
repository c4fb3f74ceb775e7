"""What a sweep goes over, and what it attacks."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from torch import nn

from dat.attacks.suites import split_attack
from dat.config.model_spec import ModelSpec
from dat.config.schema import RunConfig
from dat.data import Splits, load
from dat.jobs.sweep import default_eps, sweep_all
from dat.train import save_weights


@pytest.fixture(scope="module")
def digits() -> Splits:
    return load("digits")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """What a run leaves, as far as it matters here."""
    values = RunConfig.read({"model": {"width": 2}, "threat": {"eps": 0.2}}).dump()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump({"recipe": "x"} | values))
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("pgd-20", ("pgd", 20)),
        ("pgd-dlr-7", ("pgd-dlr", 7)),
        ("cw-1", ("cw", 1)),
        ("apgd-ce-50", ("apgd-ce", 50)),
        ("apgd-t-5", ("apgd-t", 5)),
        ("square-100", ("square", 100)),
    ],
)
def test_an_attack_and_its_steps(name: str, expected: tuple[str, int]) -> None:
    assert split_attack(name) == expected


@pytest.mark.parametrize(
    "name", ["pgd", "pgd-", "pgd-0", "pgd-20x5", "20", "", "pgd-1.5", "pgd--3"]
)
def test_an_attack_without_its_steps_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"--attack|unknown"):
        split_attack(name)


@pytest.mark.parametrize("name", ["pdg-20", "autoattack-20", "clean-1", "fgsm-20"])
def test_attacks_that_take_no_steps_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="unknown: did you mean"):
        split_attack(name)


def test_a_sweep_goes_up_to_twice_the_first_models_eps(run: Path) -> None:
    far = ModelSpec.of_run(run, edits={"threat": {"eps": 1}})
    radii = default_eps([ModelSpec.of_run(run), far])
    assert len(radii) == 9
    assert radii == pytest.approx([0.05 * number for number in range(9)])


def test_a_sweep_attacks_what_is_deployed(
    run: Path, digits: Splits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a run of Smooth-AT that is the smoothed classifier, not the network alone."""
    from dat.core.smoothing import Smoothed
    from dat.evaluation import sweep

    edits = {"objective": {"name": "smooth", "sigma": 0.3}, "evaluate": {"images": 4}}
    subject = ModelSpec.of_run(run, edits=edits)
    save_weights(ModelSpec("x", subject.config, None, True).make(digits), run / "best.safetensors")
    seen: list[nn.Module] = []

    def watched(model: nn.Module, *arguments: object, **options: object) -> object:
        seen.append(model)
        return sweep(model, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr("dat.jobs.sweep.sweep", watched)
    swept = sweep_all([subject], eps=(0.0,), steps=(), attack="pgd", at_steps=1, quiet=True)
    assert swept is not None and len(seen) == 1
    assert isinstance(seen[0], Smoothed) and seen[0].sigma == 0.3
