"""What is measured, and how it is come by."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

from dat.config import RunConfig
from dat.data import Splits, load, some_images
from dat.measure import Subject, default_eps, split_attack, sweep_all
from dat.models import Normalize
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


def test_a_run_brings_its_config_and_its_weights(run: Path) -> None:
    subject = Subject.of_run(run)
    assert subject.name == str(run)
    assert subject.config.threat.eps == 0.2
    assert subject.weights == run / "best.safetensors"
    assert subject.folder("evaluations") == run / "evaluations"
    edited = Subject.of_run(run, "ema-last", {"threat": {"eps": "1/10"}})
    assert edited.weights == run / "ema-last.safetensors"
    assert edited.config.threat.eps == 0.1
    assert edited.config.model.width == 2
    assert Subject.of_run(run, "some/net.safetensors").weights == Path("some/net.safetensors")


def test_a_runs_network_comes_with_its_normalisation(run: Path, digits: Splits) -> None:
    subject = Subject.of_run(run)
    with pytest.raises(ValueError, match=r"best\.safetensors: no such weights"):
        subject.make(digits)
    made = Subject.of_run(run, edits={"seed": 5}).config
    other = Subject("other", made, None, True).make(digits)
    assert isinstance(other.get_submodule("normalize"), Normalize)
    save_weights(other, run / "best.safetensors")
    again = subject.make(digits)
    ours, theirs = other.state_dict(), again.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_anybodys_model_is_taken_as_it_is(digits: Splits) -> None:
    subject = Subject.of_model("cnn", None, "digits", {"model": {"width": "3"}, "seed": "1"})
    assert (subject.name, subject.config.seed, subject.folder("evaluations")) == (
        "cnn",
        1,
        Path("evaluations/cnn"),
    )
    model = subject.make(digits)
    assert not any(isinstance(module, Normalize) for module in model.modules())
    first = next(module for module in model.modules() if isinstance(module, nn.Conv2d))
    assert (first.in_channels, first.out_channels) == (1, 3)
    named = Subject.of_model("nets.small:Net", Path("w"), "my.npz")
    assert (named.name, named.folder("evaluations")) == ("Net", Path("evaluations/Net"))
    assert (named.config.data.name, named.weights) == ("my.npz", Path("w"))


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
    far = Subject.of_run(run, edits={"threat": {"eps": 1}})
    radii = default_eps([Subject.of_run(run), far])
    assert len(radii) == 9
    assert radii == pytest.approx([0.05 * number for number in range(9)])


def test_a_sweep_attacks_what_is_deployed(
    run: Path, digits: Splits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a run of Smooth-AT that is the smoothed classifier, not the network alone."""
    from dat.evaluation import sweep
    from dat.smoothing import Smoothed

    edits = {"objective": {"name": "smooth", "sigma": 0.3}, "evaluate": {"images": 4}}
    subject = Subject.of_run(run, edits=edits)
    save_weights(Subject("x", subject.config, None, True).make(digits), run / "best.safetensors")
    seen: list[nn.Module] = []

    def watched(model: nn.Module, *arguments: object, **options: object) -> object:
        seen.append(model)
        return sweep(model, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr("dat.measure.sweep", watched)
    swept = sweep_all([subject], eps=(0.0,), steps=(), attack="pgd", at_steps=1, quiet=True)
    assert swept is not None and len(seen) == 1
    assert isinstance(seen[0], Smoothed) and seen[0].sigma == 0.3


@pytest.mark.parametrize("order", ["sorted", "in turn", "as it is"])
def test_some_images_are_of_all_classes_alike(digits: Splits, order: str) -> None:
    data = digits.test
    if order != "as it is":
        data = data.take(data.labels.argsort(stable=True))
    if order == "in turn":
        own = [(data.labels == label).nonzero().squeeze(1)[:20] for label in range(10)]
        data = data.take(torch.stack(own).T.flatten())
    some = some_images(data, 50)
    assert some.counts().tolist() == [5] * 10
    assert some_images(data, None) is data is some_images(data, len(data) + 1)
