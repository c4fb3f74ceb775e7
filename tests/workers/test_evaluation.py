"""Evaluation with real workers: verdicts depend neither on their number nor on interruptions."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

from dat.attacks import PGD, Square
from dat.attacks.suites import suite_of
from dat.core.threat import ThreatModel
from dat.data import load
from dat.distributed import World
from dat.evaluation import SuiteResult, assess
from dat.evaluation.progress_file import EvaluationPart, SuiteProgress
from dat.train import load_weights, save_weights
from tests.workers.conftest import DAT, run
from tests.workers.forked import run_workers

SHORT = "pgd-5x2,apgd-ce-5,apgd-t-3,fab-t-3,square-50"
LONG = "pgd-100x5"
"""With small batches this takes a few seconds."""
NETS = """
from torch import nn

def net(classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, classes))
"""
SUBJECT = ("evaluate", "--model", "mine:net", "--weights", "net.safetensors", "--data", "data.npz")
SETTINGS = ("threat.eps=0.06", "comm.threads=1", "--images", "200", "--no-checks", "--json")


def make() -> nn.Module:
    namespace: dict[str, Any] = {}
    exec(NETS, namespace)
    return namespace["net"](10)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained perceptron, its code, and the images to evaluate it on."""
    folder = tmp_path_factory.mktemp("subject")
    (folder / "mine.py").write_text(NETS)
    digits = load("digits")
    arrays = {
        f"{prefix}_{name}": getattr(data, attribute).numpy()
        for name, data in (("train", digits.train), ("test", digits.test))
        for prefix, attribute in (("x", "images"), ("y", "labels"))
    }
    np.savez(folder / "data.npz", **arrays)
    x, y = digits.train.images, digits.train.labels
    net = make()
    generator = torch.Generator().manual_seed(0)
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.1, generator=generator)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
    for _ in range(60):
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
    save_weights(net, folder / "net.safetensors")
    return folder


def evaluate(folder: Path, out: str, attacks: str, *words: str) -> Any:
    command = [*DAT, *SUBJECT, "--attacks", attacks, "--out", out, *SETTINGS, *words]
    result = run(command, folder)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return json.loads(result.stdout)


def verdicts(out: Path) -> dict[str, Any]:
    """Which images each attack broke, by the folder of the suite, which identifies it."""
    return {path.parent.name: json.loads(path.read_text()) for path in out.glob("*/verdicts.json")}


@pytest.fixture(scope="module")
def single(folder: Path) -> Any:
    """The evaluation by one worker, without interruption."""
    return evaluate(folder, "single", f"{SHORT},{LONG}", "--workers", "1", "evaluate.batch=200")


@pytest.mark.parametrize(("workers", "batch"), [(2, 16), (3, 200)])
def test_any_workers_and_batches_give_the_same_verdicts(
    folder: Path, single: Any, workers: int, batch: int
) -> None:
    out = f"{workers}-{batch}"
    words = ("--workers", str(workers), f"evaluate.batch={batch}")
    result = evaluate(folder, out, SHORT, *words)
    expected = verdicts(folder / "single")
    assert result["workers"] == workers
    assert len(verdicts(folder / out)) == 5
    for name, broken in verdicts(folder / out).items():
        assert broken == expected[name]
        assert 0 < sum(map(len, broken.values())) < result["images"]
    for name, suite in result["suites"].items():
        assert suite["ra"] == single["suites"][name]["ra"]
        assert passes(suite) == passes(single["suites"][name])


def passes(suite: Any) -> dict[str, tuple[int, int]]:
    return {name: (cost["forwards"], cost["backwards"]) for name, cost in suite["costs"].items()}


@pytest.mark.slow
def test_an_interrupted_evaluation_resumes_with_other_workers(folder: Path, single: Any) -> None:
    words = [*SUBJECT, "--attacks", LONG, "--out", "broken", *SETTINGS]
    launcher = subprocess.Popen(
        [*DAT, *words, "--workers", "2", "evaluate.batch=4"],
        cwd=folder,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        # a round of 200 images in batches of 4 has 50 parts: interrupt the second round
        wait_for_parts(folder / "broken", 60, launcher)
        os.killpg(launcher.pid, signal.SIGINT)  # as a terminal does
        _, stderr = launcher.communicate(timeout=30)
    finally:
        if launcher.poll() is None:
            launcher.kill()
            launcher.communicate()
    assert launcher.returncode == 130
    assert stderr == "error: interrupted by SIGINT\n"
    assert verdicts(folder / "broken") == {}
    before = sorted((folder / "broken").glob("*/*.safetensors"))

    result = evaluate(folder, "broken", LONG, "--workers", "3", "evaluate.batch=200")
    ((name, broken),) = verdicts(folder / "broken").items()
    assert broken == verdicts(folder / "single")[name]
    assert result["suites"][LONG]["ra"] == single["suites"][LONG]["ra"]
    assert passes(result["suites"][LONG]) == passes(single["suites"][LONG])
    after = sorted((folder / "broken").glob("*/*.safetensors"))
    assert set(before) < set(after)
    attacked = Counter(
        (path.name.partition("-")[0], row)
        for path in after
        for row in load_file(path)["rows"].tolist()
    )
    assert set(attacked.values()) == {1}  # no image twice in the same round


def wait_for_parts(out: Path, count: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while len(list(out.glob("*/*.safetensors"))) < count:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_any_workers_and_batches_write_the_same_bundle(folder: Path) -> None:
    """Not only the same verdicts: every bit of every adversarial example."""
    for workers, batch in ((1, 200), (2, 64)):
        words = ["--workers", str(workers), f"evaluate.batch={batch}", "--bundle", f"b{workers}"]
        evaluate(folder, "none", "apgd-ce-3,fab-t-2", *words)
    assert (folder / "b1").read_bytes() == (folder / "b2").read_bytes()
    words = ["--model", "mine:net", "--weights", "net.safetensors", "--data", "data.npz", "--json"]
    result = run([*DAT, "verify", "b2", *words], folder)
    assert (result.returncode, result.stderr) == (0, "")
    assert json.loads(result.stdout)["passed"]


CASES = {"many": (100, False), "few": (2, False), "late": (100, True)}
"""The number of images, and whether there is a progress file, which the workers read one by one."""


def assess_cases(world: World, subject: Path, out: Path) -> dict[str, Any]:
    """The verdicts that this worker gets in each case, and its error with a corrupt progress
    file."""
    folders = out / f"progress-{world.size}"
    test = load(str(subject / "data.npz")).test
    model = make()
    load_weights(model, subject / "net.safetensors")
    attacks = suite_of("two", {"square": Square(queries=50), "pgd": PGD(steps=3)})

    def assessed(count: int, folder: Path | None) -> SuiteResult:
        return assess(
            model,
            test.take(torch.arange(count)),
            [attacks],
            threat=ThreatModel(eps=0.06),
            world=world,
            batch=16,
            folder=folder,
            keep=True,
            check=False,
        ).suites["two"]

    results: dict[str, Any] = {}
    for case, (count, progress_file) in CASES.items():
        case_verdicts = assessed(count, folders if progress_file else None)
        assert case_verdicts.examples is not None
        results[case] = {
            "fell": case_verdicts.broken_by.tolist(),
            "costs": {name: list(cost[1:]) for name, cost in case_verdicts.costs.items()},
            "examples": case_verdicts.examples.flatten().tolist(),
        }
    if world.first:
        (progress_folder,) = folders.iterdir()
        (progress_folder / "000-corrupt.safetensors").write_bytes(b"half")
    world.barrier()
    with pytest.raises(ValueError, match="corrupt") as raised:
        assessed(100, folders)
    everywhere = getattr(raised.value, "everywhere", False)
    return results | {"corrupt": {"message": str(raised.value), "everywhere": everywhere}}


@pytest.fixture(scope="module")
def results(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The results of a single worker, and those of each of three."""
    out = tmp_path_factory.mktemp("results")
    with World.join(device="cpu") as world:
        one = assess_cases(world, folder, out)
    run_workers(3, assess_cases_late, folder, out)
    return one, [json.loads((out / f"{rank}.json").read_text()) for rank in range(3)]


@pytest.mark.parametrize("case", CASES)
def test_every_worker_gets_the_complete_result(
    results: tuple[dict[str, Any], list[dict[str, Any]]], case: str
) -> None:
    """Results, costs and examples of all images, although a worker attacks only its share, which
    may be empty, or reads the progress_file after others have begun to write it."""
    one, three = results
    for worker in three:
        assert worker[case]["fell"] == one[case]["fell"]
        assert worker[case]["costs"] == one[case]["costs"]
        assert worker[case]["examples"] == pytest.approx(one[case]["examples"], abs=1e-6)
        assert worker[case] == three[0][case]
    assert case == "few" or {0, 1, 2} <= set(one[case]["fell"])


def test_a_corrupt_part_is_reported_once(
    results: tuple[dict[str, Any], list[dict[str, Any]]],
) -> None:
    """Every worker raises the same error, which is marked as raised everywhere, so that the command
    line prints it once."""
    _, three = results
    for worker in three:
        error = worker["corrupt"]
        assert "000-corrupt.safetensors: not a file of an evaluation" in error["message"]
        assert error == three[0]["corrupt"]
        assert error["everywhere"]


@pytest.mark.parametrize("words", [("--radii", "0.05,0.1"), ("--fixed",)], ids=str)
def test_certificates_do_not_depend_on_the_workers(
    folder: Path, tmp_path: Path, words: tuple[str, ...]
) -> None:
    """One and three workers with other batches write the same file, except for the seconds."""
    tables = []
    for workers, batch in ((1, 64), (3, 512)):
        out = tmp_path / str(workers)
        options = ["--sigma", "0.1", "--images", "25", "--n", "1500", "--batch", str(batch)]
        options += ["--workers", str(workers), "--out", str(out), "--quiet"]
        result = run([*DAT, "certify", *SUBJECT[1:], *words, *options, "comm.threads=1"], folder)
        assert result.returncode == 0, result.stderr
        (table,) = out.glob("*/certified.tsv")
        lines = [line.split("\t") for line in table.read_text().splitlines()]
        tables.append([line[:5] + line[6:] for line in lines])
    assert tables[0] == tables[1]
    assert len(tables[0]) == 26


class LateSuiteProgress(SuiteProgress):
    """A progress_file that each worker reads after the workers of lower rank."""

    def read(self) -> Iterator[EvaluationPart]:
        time.sleep(0.5 * int(os.environ["RANK"]))
        yield from super().read()


def assess_cases_late(folder: Path, out: Path) -> None:
    """Run in each of several workers: write its results to a file."""
    importlib.import_module("dat.evaluation.assess").SuiteProgress = LateSuiteProgress  # type: ignore[attr-defined]
    with World.join(device="cpu", threads=1) as world:
        results = assess_cases(world, folder, out)
        (out / f"{world.rank}.json").write_text(json.dumps(results))
