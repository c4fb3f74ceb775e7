"""What the README shows is true: its code runs, its recipe is valid, its tree is the disk's."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import dat
from dat.recipes import read
from dat.threat import ThreatModel

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_the_python_example_runs_and_gives_a_robust_model() -> None:
    names: dict[str, object] = {}
    try:
        for block in blocks("python"):
            exec(block, names)
    finally:
        dist.destroy_process_group()
    ta, ra = names["accuracy"].ta, names["accuracy"].ra  # type: ignore[attr-defined]
    assert ta > 85
    assert ra > 50


def test_the_loop_with_an_exchange_of_its_own_runs() -> None:
    page = (ROOT / "docs" / "communication.md").read_text()
    (loop,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.BatchNorm1d(3))
    names = {
        "dat": dat,
        "torch": torch,
        "model": model,
        "world": dat.World.join(),
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "batches": [(torch.randn(8, 5), torch.randint(3, (8,))) for _ in range(3)],
        "global_batch": 8,
    }
    before = [p.detach().clone() for p in model.parameters()]
    try:
        exec(loop, names)
    finally:
        dist.destroy_process_group()
    assert all(not torch.equal(a, b) for a, b in zip(before[:1], model.parameters(), strict=False))
    losses = names["losses"]
    assert isinstance(losses, torch.Tensor) and losses.shape == (1, 1) and losses.isfinite().all()


def test_the_evaluation_page_runs() -> None:
    page = (ROOT / "docs" / "evaluation.md").read_text()
    random = torch.Generator().manual_seed(0)
    names: dict[str, object] = {
        "dat": dat,
        "model": torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 5)),
        "x": torch.rand(3, 1, 4, 4, generator=random),
        "y": torch.tensor([0, 1, 4]),
    }
    try:
        for block in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL):
            exec(block, names)
    finally:
        dist.destroy_process_group()
    result, x_adv, x = names["result"], names["x_adv"], names["x"]
    assert isinstance(result, dat.AutoAttacked) and len(result.fell_to) == 3
    assert isinstance(x_adv, torch.Tensor) and isinstance(x, torch.Tensor)
    assert float((x_adv - x).abs().max()) <= 8 / 255 + 1e-6


def test_the_certification_page_runs() -> None:
    page = (ROOT / "docs" / "certification.md").read_text()
    names: dict[str, object] = {
        "dat": dat,
        "model": torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 5)),
        "x": torch.rand(3, 1, 4, 4, generator=torch.Generator().manual_seed(0)),
        "y": torch.tensor([0, 1, 4]),
    }
    try:
        for block in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL):
            exec(block, names)
    finally:
        dist.destroy_process_group()
    found, classes = names["found"], names["classes"]
    assert isinstance(found, dat.Certified) and found.samples.max() <= 1000
    assert isinstance(classes, torch.Tensor) and classes.shape == (3,)


def test_the_finetuning_page_runs() -> None:
    page = (ROOT / "docs" / "finetuning.md").read_text()
    random = torch.Generator().manual_seed(0)
    images = torch.rand(48, 1, 8, 8, generator=random)
    net = dat.build_model("preact-resnet18", 4, width=2)
    names: dict[str, object] = {
        "dat": dat,
        "net": net,
        "data": dat.ImageData.of(images, torch.arange(48) % 10),
    }
    before = {name: value.clone() for name, value in net.state_dict().items()}
    try:
        for block in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL):
            exec(block, names)
    finally:
        dist.destroy_process_group()
    for name, value in net.state_dict().items():
        learns = name.startswith(("stages.3.", "linear."))
        assert torch.equal(value, before[name]) is not learns, name
    assert net(images.repeat(1, 3, 1, 1)).shape == (48, 10)


def test_the_tables_are_the_measured_ones() -> None:
    """`python benchmarks/pages.py` puts them there."""
    pages = README + "".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
    found = dict(re.findall(r"<!-- (\w+)\.md -->\n(.*?)<!-- end -->", pages, flags=re.DOTALL))
    results = ROOT / "benchmarks" / "results"
    assert found.keys() == {path.stem for path in results.glob("*.md")}
    for name, block in found.items():
        assert block == (results / f"{name}.md").read_text()
    studies = re.findall(r"<!-- results/(\w+) -->\n(.*?)<!-- end -->", pages, flags=re.DOTALL)
    assert dict(studies).keys() == {path.parent.name for path in ROOT.glob("results/*/table.md")}
    for name, block in studies:
        assert block == (ROOT / "results" / name / "table.md").read_text()


def test_the_recipe_is_valid(tmp_path: Path) -> None:
    (recipe,) = blocks("yaml")
    (tmp_path / "my.yaml").write_text(recipe)
    config = read(str(tmp_path / "my.yaml"))
    assert config.threat.eps == pytest.approx(8 / 255)
    assert config.train.ema == 0.999


def test_the_tree_is_the_disk() -> None:
    (tree,) = re.findall(r"```\n(src/dat/\n.*?)```", README, flags=re.DOTALL)
    told = set(re.findall(r"^  ([\w.]+)/?  ", tree, flags=re.MULTILINE))
    there = {
        path.name
        for path in (ROOT / "src" / "dat").iterdir()
        if not path.name.startswith("__") and path.suffix in ("", ".py")
    }
    assert told == there


def test_the_attack_of_the_extending_page_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (block,) = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "extending.md").read_text(), flags=re.DOTALL
    )
    (tmp_path / "noise_of_the_page.py").write_text(block)
    monkeypatch.syspath_prepend(tmp_path)
    noise = importlib.import_module("noise_of_the_page").Noise
    x, threat = torch.rand(6, 1, 3, 3, generator=torch.Generator().manual_seed(0)), ThreatModel()

    def loss(images: torch.Tensor) -> torch.Tensor:
        return images.flatten(1).sum(1)

    few, many = (noise(tries=tries)(loss, x, threat) for tries in (1, 30))
    assert (threat.size(many, x) <= threat.eps + 1e-6).all()
    assert (loss(many) >= loss(few)).all()
    assert (loss(many) > loss(few)).any()
