"""The examples run, with the real packages, and give robust models; their attacks find adversarial
examples in the ball and leave batch norms alone."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import dat
from dat.objectives.base import Network, Outcome

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.slow
NEEDS = {
    "ddp_loop.py": "torch",
    "hf_trainer.py": "transformers",
    "lightning_module.py": "lightning",
    "accelerate_loop.py": "accelerate",
    "robustbench_style.py": "foolbox",
    "ray_train.py": "ray",
}


def run(*words: str) -> str:
    """One thread, so that examples behave beside other tests."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def accuracies(text: str) -> list[tuple[float, float]]:
    found = re.findall(r"TA ([\d.]+) %, RA ([\d.]+) %", text)
    return [(float(ta), float(ra)) for ta, ra in found]


def example(name: str) -> str:
    if importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"needs pip install {NEEDS[name]}")
    return f"examples/{name}"


def test_every_example_is_tested() -> None:
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == NEEDS.keys()


def imported(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name.removesuffix(".py"), ROOT / example(name))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SEEN: list[tuple[Tensor, Tensor, Tensor]] = []
"""The images, adversarial examples and labels of each step of training."""


@dataclass(frozen=True, kw_only=True)
class Watched(dat.Adversarial):
    """Notes what the attack has found."""

    def loss(self, model: Network, batch: dat.Batch, x_adv: Tensor) -> Outcome:
        SEEN.append((batch.x, x_adv, batch.y))
        return super().loss(model, batch, x_adv)


@pytest.fixture
def watched() -> Watched:
    SEEN.clear()
    return Watched(clean_weight=0.5)


def digits(rows: slice) -> TensorDataset:
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.from_numpy(data.images[rows]).float().div(16).unsqueeze(1)
    return TensorDataset(images, torch.from_numpy(data.target[rows]))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = (nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten())
    return nn.Sequential(*layers, nn.Linear(512, 10))


def check_attacks(net: nn.Module, steps: int, classify: Network | None = None) -> None:
    """In the ball, successful, and invisible to batch norms: they saw each step once."""
    assert len(SEEN) == steps
    classify = classify or net.eval()
    for x, x_adv, _ in SEEN:
        assert (x_adv - x).abs().max() <= 0.1 + 1e-6
        assert x_adv.min() >= 0 and x_adv.max() <= 1
        assert not x_adv.requires_grad
    x, x_adv, y = SEEN[-1]
    with torch.no_grad():
        before, after = (
            cross_entropy(classify(images), y, reduction="none") for images in (x, x_adv)
        )
    assert (after > before).float().mean() > 0.95
    norms = [module for module in net.modules() if isinstance(module, nn.BatchNorm2d)]
    assert norms and all(int(norm.num_batches_tracked or 0) == steps for norm in norms)


@pytest.mark.parametrize("bits", [None, 8])
def test_the_attack_of_the_plain_loop(watched: Watched, bits: int | None) -> None:
    loop, net = imported("ddp_loop.py"), network()
    with dat.World.join(device="cpu", threads=1) as world:
        loop.train(net, digits(slice(280)), world, objective=watched, epochs=3, bits=bits)
    check_attacks(net, 6)


@pytest.mark.filterwarnings("ignore")  # theirs
def test_the_attack_of_the_hugging_face_trainer(watched: Watched, tmp_path: Path) -> None:
    loop = imported("hf_trainer.py")
    net = loop.network()
    trainer = loop.make_trainer(net, str(tmp_path), 0.5)
    trainer.objective = watched
    trainer.train()
    net.eval()
    check_attacks(net, 10, lambda x: net(pixel_values=x).logits)
    trainer.evaluate()
    assert len(SEEN) == 11  # the Trainer's evaluation attacks, too
    SEEN.pop()
    check_attacks(net, 10, lambda x: net(pixel_values=x).logits)


@pytest.mark.filterwarnings("ignore")  # theirs
def test_the_attack_of_the_accelerate_loop(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, net = imported("accelerate_loop.py"), network()
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setattr(dat, "build_model", lambda *_, **__: net)
    monkeypatch.setattr(dat, "Adversarial", lambda **_: watched)
    loop.main(epochs=1)
    check_attacks(net, 10)


@pytest.mark.filterwarnings("ignore")  # theirs
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_attacks_in_the_validation_of_lightning(watched: Watched, precision: Any) -> None:
    """`fit` validates under torch.no_grad; `validate` in inference mode, where it makes the batch
    as well."""
    loop, modes = imported("lightning_module.py"), list[tuple[bool, bool]]()
    import lightning

    class Robust(loop.Robust):  # type: ignore[name-defined, misc]
        def validation_step(self, batch: Any, number: int) -> None:
            modes.append((torch.is_inference_mode_enabled(), batch[0].is_inference()))
            super().validation_step(batch, number)

    module = Robust(network(), dat.ThreatModel(eps=0.1))
    module.objective = watched
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=4,
        precision=precision,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    validation = DataLoader(digits(slice(1400, 1500)), batch_size=100)
    trainer.fit(module, DataLoader(digits(slice(700)), batch_size=140), validation)
    assert modes == [(False, False)] * 5  # Lightning begins with a trial of the validation
    trainer.validate(module, validation, verbose=False)
    assert modes[5:] == [(True, True)]
    check_attacks(module.model, 20)
    ta, ra = (float(trainer.callback_metrics[name]) for name in ("ta", "ra"))
    images = next(iter(validation))
    found = dat.evaluate(
        module.model, tuple(images), threat=module.threat, attack=dat.PGD(steps=10)
    )
    tolerance = 0.01 if precision == "32-true" else 3.0
    assert ta == pytest.approx(found.ta, abs=tolerance) and 20 < ra < ta - 10
    assert ra == pytest.approx(found.ra, abs=3.0)


@pytest.mark.parametrize(
    "name", ["lightning_module.py", "accelerate_loop.py", "hf_trainer.py", "ddp_loop.py"]
)
def test_training_in_the_loop_of_others_gives_a_robust_model(name: str) -> None:
    *_, (ta, ra) = accuracies(run(example(name)))
    assert ta > 80
    assert ra > 50


@pytest.mark.parametrize(
    "words",
    [
        ("accelerate_loop.py",),
        ("ddp_loop.py", "--objective", "trades"),
        ("ddp_loop.py", "--bits", "4"),
    ],
    ids=" ".join,
)
def test_two_processes(words: tuple[str, ...]) -> None:
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    text = run(*launch, example(words[0]), *words[1:])
    ((ta, ra),) = accuracies(text)
    assert "processes: 2" in text
    assert ta > 80
    assert ra > 50


def test_ray_starts_the_workers() -> None:
    text = run(example("ray_train.py"))
    ((ta, ra),) = accuracies(text)
    assert "workers: 2, different replicas: 1" in text
    assert ta > 80
    assert ra > 50


def test_models_and_evaluations_of_different_houses() -> None:
    theirs, ours, plain = accuracies(run(example("robustbench_style.py")))
    assert theirs[0] == ours[0]
    assert theirs[1] >= ours[1] > 20  # AutoAttack finds what PGD-20 finds, and more
    assert plain[0] > 80
    assert plain[1] < ours[1]
