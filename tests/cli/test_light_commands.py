"""Commands that do not compute, and refusals of those that do, answer without torch.

All of them run one after the other in one fresh interpreter, which says after each what it has
imported by then.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import resolve_name
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dat
from dat.cli.parser import parser
from dat.core.lazy import LazyModule
from dat.data import SOURCES, load
from dat.data.catalog import CATALOG
from dat.data.names import BUILT_IN
from dat.data.published import Published
from tests.report.runs import make_run

HEAVY = ("torch", "numpy", "scipy", "sklearn", "matplotlib", "PIL")

ANSWERED = {
    "recipes": "digits-fgsm",
    "recipes imagenet fgsm --json": '"ta": 58.02',
    "config digits attack.name=fgsm optimizer.name=lars": "attack.step_ratio",
    "config imagenet model.name=my.nets:Net --json": "my.nets:Net",
    "data list": "cache/mnist",
    "compare RUN RUN": "DAT-PGD",
    "report RUN": "report.html: RUN",
    "completion bash": "digits-fgsm",
    "launch torchrun digits --hosts a,b": "torchrun --nnodes 2",
    "launch slurm digits --nodes 2 quantizer.bits=8": "#SBATCH --nodes=2",
    "launch kubernetes digits --nodes 2 --image dat:1": "kind: TrainJob",
    "launch ray digits --nodes 2": "TorchTrainer",
    "new mine": "mine/recipe.yaml",
    "selftest --list": "protocols",
    "reproduce": "table1",
    "reproduce table4 --dry-run --runs runs": "Cost, according to the study",
}
"""What is asked, and a part of the answer."""

REFUSED = {
    "recipes --nosuch": "unknown option --nosuch",
    "recipes cifra10": "no recipe has the word 'cifra10': did you mean cifar10?",
    "train digits --workers 200 train.batch=256": "train.batch = 256: too small for 200 workers",
    "train digits threat.eps=8": "eps = 8: exceeds the pixel range [0, 1]; did you mean 8/255?",
    "verify nothere --model RUN": "nothere: no such bundle",
    "compare nothere": "nothere: not the folder of a run",
    "report nothere": "nothere: not the folder of a run",
    "config digits attack.stepz=3": "did you mean attack.steps?",
    "data fetch nosuch": "'nosuch': not a dataset that can be downloaded",
    "data info nosuch": "data.name = 'nosuch': unknown",
    "data info digits --plot a.txt": "a.txt: a plot is written to",
    "data shard nosuch --parts 2 --out parts": "data.name = 'nosuch': unknown",
    "launch slurm digits --nodes 2 protocol.name=dense quantizer.bits=8": "sends float32",
    "launch slurm nosuch --nodes 2": "unknown recipe 'nosuch'",
    "new RUN": "already exists",
    "train": "specify a recipe",
    "train nosuch": "unknown recipe 'nosuch'",
    "train digits attack.stepz=3": "did you mean attack.steps?",
    "train digits attack.steps=-1": "attack.steps = -1: must be at least 1",
    "train digits attack.steps=-1 --workers 2": "attack.steps = -1: must be at least 1",
    "train digits evaluate.attacks=pgd-20,nosuch": "evaluate.attacks: attack 'nosuch': unknown",
    "train digits data.name=nosuch": "data.name = 'nosuch': unknown",
    "train digits model.name=resnet51": "did you mean resnet50?",
    "train digits --out RUN": "RUN: already exists; choose another --out",
    "train --resume nothere": "nothere: not the folder of a run",
    "train --resume RUN attack.steps=3": "a resumed run keeps its settings",
    "finetune nothere digits": "nothere: not the folder of a run",
    "finetune RUN digits": "best.safetensors: no such weights",
    "label nothere": "nothere: not the folder of a run",
    "selftrain digits": "specify the images to label",
    "evaluate nothere": "nothere: not the folder of a run",
    "evaluate RUN --attacks nosuch": "attack 'nosuch': unknown",
    "evaluate RUN threat.epsilon=1": "did you mean threat.eps?",
    "certify nothere --sigma 0.1": "nothere: not the folder of a run",
    "certify RUN": "not trained with noise",
    "sweep nothere": "nothere: not the folder of a run",
    "sweep RUN --attack nosuch-3": "attack 'nosuch-3': unknown",
    "export nothere": "nothere: not the folder of a run",
    "export RUN --format nosuch": "--format nosuch: unknown",
    "profile digits train.batch=0": "train.batch = 0: must be at least 1",
    "plan digits train.batch=0": "train.batch = 0: must be at least 1",
    "plan digits --link fast": "link 'fast': must be a number with mbit or gbit",
    "plan digits --sweep nosuch": "--sweep nosuch: must be one or more of",
    "reproduce table9": "unknown study 'table9'",
    "doctor now": "unexpected argument now",
    "selftest --only nosuch": "--only nosuch: unknown",
    "selftest --json nothere/report.json": "folder nothere does not exist",
    "bench attack --plot a.txt": "a.txt: a plot is written to",
    "bench attack --against nosuch": "--against nosuch: unknown",
    "bench step --plot a.txt": "a.txt: a plot is written to",
    "bench step --against nosuch": "--against nosuch: unknown",
    "bench optimizer --plot a.txt": "a.txt: a plot is written to",
    "bench optimizer --against nosuch": "--against nosuch: unknown",
    "bench evaluate --plot a.txt": "a.txt: a plot is written to",
    "bench evaluate --against nosuch": "--against nosuch: unknown",
    "bench loader --plot a.txt": "a.txt: a plot is written to",
    "bench loader --against nosuch": "--against nosuch: unknown",
    "bench startup --plot a.txt": "a.txt: a plot is written to",
    "bench startup --against nosuch": "--against nosuch: unknown",
    "bench comm --protocols nosuch": "protocol 'nosuch': must be one of",
    "bench comm --bits 9": "quantizer.bits = 9: must be one of",
    "bench comm --plot a.txt": "a.txt: a plot is written to",
    "bench quantizer --quantizers nosuch": "quantizer 'nosuch': must be one of",
    "bench quantizer --plot a.txt": "a.txt: a plot is written to",
}
"""What is wrong, and a part of the one line that says so."""

COMPUTES = {
    *("train", "finetune", "label", "selftrain", "evaluate", "verify", "sweep"),
    *("certify", "export"),
    *("profile", "plan", "doctor", "data fetch", "data info", "data shard"),
    *("bench attack", "bench step", "bench optimizer", "bench evaluate", "bench loader"),
    *("bench startup", "bench comm", "bench quantizer"),
}
"""Commands that have tensors, or what else takes long to import, to work with."""

PROGRAM = """
import contextlib, io, json, sys
from dat.cli import main

for line in json.loads(sys.argv[1]):
    out, err, code = io.StringIO(), io.StringIO(), None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(line.split())
        except SystemExit as ended:
            code = ended.code
    heavy = [name for name in json.loads(sys.argv[2]) if name in sys.modules]
    print(json.dumps([line, code, out.getvalue(), err.getvalue(), heavy]))
"""


def pretend(published: Published, cache: Path) -> None:
    """A set in the cache, with the header of every array and nothing in them."""
    folder = cache / published.name
    folder.mkdir(parents=True)
    shapes: dict[str, tuple[int, ...]] = {}
    for kind, counts in (("train", published.train), ("test", published.test)):
        shapes[f"x_{kind}"], shapes[f"y_{kind}"] = (sum(counts), *published.shape), (sum(counts),)
    for name, shape in shapes.items():
        np.lib.format.open_memmap(folder / f"{name}.npy", "w+", "u1", shape)
    manifest = {"shapes": shapes, "digests": published.digests or dict.fromkeys(shapes, "")}
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By line: the exit code, what was printed, and what had been imported by then."""
    folder = tmp_path_factory.mktemp("light")
    make_run(folder / "RUN")
    pretend(CATALOG["mnist"], folder / "cache")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps([*ANSWERED, *REFUSED]), json.dumps(HEAVY)],
        capture_output=True,
        text=True,
        check=True,
        cwd=folder,
        env=os.environ | {"DAT_DATA": str(folder / "cache")},
    )
    return {line: rest for line, *rest in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("line", ANSWERED)
def test_an_answer_needs_no_torch(line: str, told: dict[str, Any]) -> None:
    code, out, err, heavy = told[line]
    assert (code, heavy) == (0, []), err
    assert ANSWERED[line] in out


@pytest.mark.parametrize("line", REFUSED)
def test_a_refusal_needs_no_torch(line: str, told: dict[str, Any]) -> None:
    code, out, err, heavy = told[line]
    assert (code, heavy, out) == (2, [], "")
    assert REFUSED[line] in err
    assert "Traceback" not in err


def commands(of: argparse.ArgumentParser, above: str = "") -> Iterator[str]:
    inner = [it for it in of._actions if isinstance(it, argparse._SubParsersAction)]
    if not inner:
        yield above.strip()
    for action in inner:
        for name, command in action.choices.items():
            yield from commands(command, f"{above} {name}")


def command_of(line: str, known: set[str]) -> str:
    return next(name for name in known if f"{line} ".startswith(f"{name} "))


def test_every_command_is_light_or_is_said_to_compute() -> None:
    known = set(commands(parser()))
    answered = {command_of(line, known) for line in ANSWERED}
    assert answered | COMPUTES == known
    assert not answered & COMPUTES
    refused = {command_of(line, known) for line in REFUSED}
    assert refused >= COMPUTES


def test_built_in_sets_are_what_is_said_of_them() -> None:
    assert BUILT_IN.keys() == SOURCES.keys()
    for name, said in BUILT_IN.items():
        found = load(name)
        assert said["images"] == f"{len(found.train):,} + {len(found.test):,}"
        assert said["classes"] == found.test.classes


def packages() -> list[str]:
    """Those that give names out when they are first used."""
    root = Path(dat.__file__).parent
    files = [file for file in root.rglob("__init__.py") if "= lazy_names(" in file.read_text()]
    return [".".join(file.relative_to(root.parent).parent.parts) for file in sorted(files)]


@pytest.mark.parametrize("package", packages())
def test_lazy_names_are_those_that_the_type_checker_sees(package: str) -> None:
    module = importlib.import_module(package)
    assert module.__file__ is not None
    tree = ast.parse(Path(module.__file__).read_text())
    (block,) = [it for it in tree.body if isinstance(it, ast.If)]
    seen = {
        alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom) and node.module != package  # or a module of it
        for alias in node.names
    }
    (call,) = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "lazy_names"
    ]
    homes: dict[str, str] = {}
    for keyword in call.keywords:
        value = ast.literal_eval(keyword.value)
        if keyword.arg == "renamed":  # old names, which the type checker should not see
            continue
        homes |= {keyword.arg: value} if keyword.arg else value
    given = {
        name: resolve_name(f".{home}", package)
        for home, names in homes.items()
        for name in names.split()
    }
    assert given == seen
    assert seen.keys() <= set(module.__all__)
    for name, home in seen.items():
        assert getattr(module, name) is getattr(importlib.import_module(str(home)), name)
        assert not (Path(module.__file__).parent / f"{name}.py").exists(), "it would hide the name"


def test_a_lazy_module_is_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    import colorsys

    lazy: Any = LazyModule("colorsys")
    assert lazy.hls_to_rgb is colorsys.hls_to_rgb
    monkeypatch.setattr(colorsys, "rgb_to_hsv", "another")
    assert lazy.rgb_to_hsv == "another"
    with pytest.raises(AttributeError, match="colorsys"):
        lazy.nosuch  # noqa: B018


THREADS = """
import threading
from dat.core.lazy import functional, nn, torch
import dat

uses = [
    lambda: torch.ones, lambda: nn.Module, lambda: functional.relu,
    lambda: dat.ImageData, lambda: dat.fold, lambda: dat.Trainer,
]
failed = []

def use(it):
    try:
        it()
    except BaseException as error:
        failed.append(repr(error))

threads = [threading.Thread(target=use, args=(it,)) for it in uses]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert not failed, failed
"""


@pytest.mark.slow
def test_threads_may_be_the_first_to_use_torch() -> None:
    """Two modules that import each other, from two threads, would wait for each other."""
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
