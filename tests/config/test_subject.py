"""A model to evaluate: a run's, or any other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

from dat.config.model_spec import ModelSpec
from dat.config.schema import RunConfig
from dat.data import Splits, load
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
    subject = ModelSpec.of_run(run)
    assert subject.name == str(run)
    assert subject.config.threat.eps == 0.2
    assert subject.weights == run / "best.safetensors"
    assert subject.folder("evaluations") == run / "evaluations"
    edited = ModelSpec.of_run(run, "ema-last", {"threat": {"eps": "1/10"}})
    assert edited.weights == run / "ema-last.safetensors"
    assert edited.config.threat.eps == 0.1
    assert edited.config.model.width == 2
    assert ModelSpec.of_run(run, "some/net.safetensors").weights == Path("some/net.safetensors")


def test_a_runs_network_comes_with_its_normalization(run: Path, digits: Splits) -> None:
    subject = ModelSpec.of_run(run)
    with pytest.raises(ValueError, match=r"best\.safetensors: no such weights"):
        subject.make(digits)
    made = ModelSpec.of_run(run, edits={"seed": 5}).config
    other = ModelSpec("other", made, None, True).make(digits)
    assert isinstance(other.get_submodule("normalize"), Normalize)
    save_weights(other, run / "best.safetensors")
    again = subject.make(digits)
    ours, theirs = other.state_dict(), again.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_anybodys_model_is_taken_as_it_is(digits: Splits) -> None:
    subject = ModelSpec.of_model("cnn", None, "digits", {"model": {"width": "3"}, "seed": "1"})
    assert (subject.name, subject.config.seed, subject.folder("evaluations")) == (
        "cnn",
        1,
        Path("evaluations/cnn"),
    )
    model = subject.make(digits)
    assert not any(isinstance(module, Normalize) for module in model.modules())
    first = next(module for module in model.modules() if isinstance(module, nn.Conv2d))
    assert (first.in_channels, first.out_channels) == (1, 3)
    named = ModelSpec.of_model("nets.small:Net", Path("w"), "my.npz")
    assert (named.name, named.folder("evaluations")) == ("Net", Path("evaluations/Net"))
    assert (named.config.data.name, named.weights) == ("my.npz", Path("w"))
