"""Evaluation by real workers: how many there are, and whether they were interrupted, must not show
in any verdict."""

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
from dat.comm import World
from dat.data import load
from dat.evaluation import Verdicts, assess
from dat.evaluation.journal import Journal, Part
from dat.evaluation.suites import suite_of
from dat.threat import ThreatModel
from dat.train import load_weights, save_weights
from tests.distributed.conftest import DAT, run
from tests.distributed.forked import run_workers

SHORT = "pgd-5x2,apgd-ce-5,apgd-t-3,fab-t-3,square-50"
LONG = "pgd-100x5"
"""In small batches it takes a few seconds."""
NETS = """
from torch import nn

def net(classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, classes))
"""
SUBJECT = ("evaluate", "--model", "mine:net", "--weights", "net.safetensors", "--data", "data.npz")
SETTINGS = ("threat.eps=0.06", "comm.threads=1", "--images", "200", "--no-checks", "--json")


def make() -> nn.Module:
    made: dict[str, Any] = {}
    exec(NETS, made)
    return made["net"](10)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained perceptron, its code, and the images to measure it on."""
    folder = tmp_path_factory.mktemp("subject")
    (folder / "mine.py").write_text(NETS)
    digits = load("digits")
    arrays = {
        f"{kind}_{name}": getattr(data, what).numpy()
        for name, data in (("train", digits.train), ("test", digits.test))
        for kind, what in (("x", "images"), ("y", "labels"))
    }
    np.savez(folder / "data.npz", **arrays)
    x, y = digits.train.images, digits.train.labels
    net = make()
    random = torch.Generator().manual_seed(0)
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.1, generator=random)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
    for _ in range(60):
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
    save_weights(net, folder / "net.safetensors")
    return folder


def measure(folder: Path, out: str, attacks: str, *words: str) -> Any:
    command = [*DAT, *SUBJECT, "--attacks", attacks, "--out", out, *SETTINGS, *words]
    done = run(command, folder)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return json.loads(done.stdout)


def verdicts(out: Path) -> dict[str, Any]:
    """Who fell to what, by the folder of each suite: its name tells what was evaluated."""
    return {path.parent.name: json.loads(path.read_text()) for path in out.glob("*/verdicts.json")}


@pytest.fixture(scope="module")
def alone(folder: Path) -> Any:
    """What one worker finds, in one go."""
    return measure(folder, "alone", f"{SHORT},{LONG}", "--workers", "1", "evaluate.batch=200")


@pytest.mark.parametrize(("workers", "batch"), [(2, 16), (3, 200)])
def test_any_workers_and_batches_give_the_same_verdicts(
    folder: Path, alone: Any, workers: int, batch: int
) -> None:
    out = f"{workers}-{batch}"
    words = ("--workers", str(workers), f"evaluate.batch={batch}")
    found = measure(folder, out, SHORT, *words)
    expected = verdicts(folder / "alone")
    assert found["workers"] == workers
    assert len(verdicts(folder / out)) == 5
    for name, fell in verdicts(folder / out).items():
        assert fell == expected[name]
        assert 0 < sum(map(len, fell.values())) < found["images"]
    for name, suite in found["suites"].items():
        assert suite["ra"] == alone["suites"][name]["ra"]
        assert passes(suite) == passes(alone["suites"][name])


def passes(suite: Any) -> dict[str, tuple[int, int]]:
    return {name: (it["forwards"], it["backwards"]) for name, it in suite["costs"].items()}


def test_an_interrupted_evaluation_goes_on_with_other_workers(folder: Path, alone: Any) -> None:
    words = [*SUBJECT, "--attacks", LONG, "--out", "broken", *SETTINGS]
    launcher = subprocess.Popen(
        [*DAT, *words, "--workers", "2", "evaluate.batch=4"],
        cwd=folder,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        # a round of 200 images in batches of 4 has 50 parts: this is in the second one
        wait_for_parts(folder / "broken", 60, launcher)
        os.killpg(launcher.pid, signal.SIGINT)  # what a terminal does
        _, said = launcher.communicate(timeout=30)
    finally:
        if launcher.poll() is None:
            launcher.kill()
            launcher.communicate()
    assert launcher.returncode == 130
    assert said == "error: interrupted by SIGINT\n"
    assert verdicts(folder / "broken") == {}
    before = sorted((folder / "broken").glob("*/*.safetensors"))

    found = measure(folder, "broken", LONG, "--workers", "3", "evaluate.batch=200")
    (name, fell), *others = verdicts(folder / "broken").items()
    assert not others
    assert fell == verdicts(folder / "alone")[name]
    assert found["suites"][LONG]["ra"] == alone["suites"][LONG]["ra"]
    assert passes(found["suites"][LONG]) == passes(alone["suites"][LONG])
    after = sorted((folder / "broken").glob("*/*.safetensors"))
    assert set(before) < set(after)
    attacked = Counter(
        (path.name.partition("-")[0], row)
        for path in after
        for row in load_file(path)["rows"].tolist()
    )
    assert set(attacked.values()) == {1}  # nobody twice in the same round


def wait_for_parts(out: Path, count: int, process: subprocess.Popen[str]) -> None:
    patience = time.monotonic() + 60
    while len(list(out.glob("*/*.safetensors"))) < count:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < patience
        time.sleep(0.01)


CASES = {"many": (100, False), "few": (2, False), "late": (100, True)}
"""How many images, and whether there is a journal to which workers come one after the other."""


def judge(world: World, subject: Path, out: Path) -> dict[str, Any]:
    """What this worker is told; in the end, of a journal that is spoilt."""
    journals = out / f"journals-{world.size}"
    test = load(str(subject / "data.npz")).test
    model = make()
    load_weights(model, subject / "net.safetensors")
    attacks = suite_of("two", {"square": Square(queries=50), "pgd": PGD(steps=3)})

    def assessed(count: int, folder: Path | None) -> Verdicts:
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

    seen: dict[str, Any] = {}
    for case, (count, journal) in CASES.items():
        found = assessed(count, journals if journal else None)
        assert found.examples is not None
        seen[case] = {
            "fell": found.fell.tolist(),
            "costs": {name: list(cost[1:]) for name, cost in found.costs.items()},
            "examples": found.examples.flatten().tolist(),
        }
    if world.first:
        (place,) = journals.iterdir()
        (place / "000-spoilt.safetensors").write_bytes(b"half")
    world.meet()
    with pytest.raises(ValueError, match="spoilt") as raised:
        assessed(100, journals)
    everywhere = getattr(raised.value, "everywhere", False)
    return seen | {"spoilt": {"said": str(raised.value), "everywhere": everywhere}}


@pytest.fixture(scope="module")
def told(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What one worker is told, and what each of three."""
    out = tmp_path_factory.mktemp("told")
    with World.join(device="cpu") as world:
        one = judge(world, folder, out)
    run_workers(3, judge_late, folder, out)
    return one, [json.loads((out / f"{rank}.json").read_text()) for rank in range(3)]


@pytest.mark.parametrize("case", CASES)
def test_every_worker_gets_the_whole_result(
    told: tuple[dict[str, Any], list[dict[str, Any]]], case: str
) -> None:
    """Verdicts, costs and examples of all, though each attacks its share, or has none, or comes to
    the journal when others have begun to fill it."""
    one, three = told
    for found in three:
        assert found[case]["fell"] == one[case]["fell"]
        assert found[case]["costs"] == one[case]["costs"]
        assert found[case]["examples"] == pytest.approx(one[case]["examples"], abs=1e-6)
        assert found[case] == three[0][case]
    assert case == "few" or {0, 1, 2} <= set(one[case]["fell"])


def test_a_broken_part_is_told_once(
    told: tuple[dict[str, Any], list[dict[str, Any]]],
) -> None:
    """Every worker sees it and stops, with an error of which they know that all have it, so that
    the command line prints it once."""
    _, three = told
    for found in three:
        assert "000-spoilt.safetensors: not a part of an evaluation" in found["spoilt"]["said"]
        assert found["spoilt"] == three[0]["spoilt"]
        assert found["spoilt"]["everywhere"]


@pytest.mark.parametrize("words", [("--radii", "0.05,0.1"), ("--fixed",)], ids=str)
def test_certificates_do_not_depend_on_the_workers(
    folder: Path, tmp_path: Path, words: tuple[str, ...]
) -> None:
    """One and three workers, other batches: the same file, but for the seconds."""
    tables = []
    for workers, batch in ((1, 64), (3, 512)):
        out = tmp_path / str(workers)
        options = ["--sigma", "0.1", "--images", "25", "--n", "1500", "--batch", str(batch)]
        options += ["--workers", str(workers), "--out", str(out), "--quiet"]
        done = run([*DAT, "certify", *SUBJECT[1:], *words, *options, "comm.threads=1"], folder)
        assert done.returncode == 0, done.stderr
        (table,) = out.glob("*/certified.tsv")
        lines = [line.split("\t") for line in table.read_text().splitlines()]
        tables.append([line[:5] + line[6:] for line in lines])
    assert tables[0] == tables[1]
    assert len(tables[0]) == 26


class LateJournal(Journal):
    """Reads when the workers before this one have."""

    def read(self) -> Iterator[Part]:
        time.sleep(0.5 * int(os.environ["RANK"]))
        yield from super().read()


def judge_late(folder: Path, out: Path) -> None:
    """What one of several workers is told, left in a file."""
    importlib.import_module("dat.evaluation.assess").Journal = LateJournal  # type: ignore[attr-defined]
    with World.join(device="cpu", threads=1) as joined:
        seen = judge(joined, folder, out)
        (out / f"{joined.rank}.json").write_text(json.dumps(seen))
