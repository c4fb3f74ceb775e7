"""What the README shows is true: its code runs, its recipe is valid, its tree is the disk's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch.distributed as dist

from dat.recipes import read

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


def test_the_tables_are_the_measured_ones() -> None:
    for name in ("digits", "large_batch"):
        (block,) = re.findall(rf"<!-- {name}\.md -->\n(.*?)<!-- end -->", README, flags=re.DOTALL)
        assert block == (ROOT / "benchmarks" / "results" / f"{name}.md").read_text()


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
