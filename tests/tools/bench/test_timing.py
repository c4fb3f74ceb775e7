"""`dat bench attack`, `step`, ...: they run, their results are consistent, the timing is fair."""

from __future__ import annotations

import importlib
import json
import mmap
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import binom
from torch import nn

from dat.attacks import PGD
from dat.cli import main
from dat.evaluation import evaluate
from dat.tools.bench import Comparison, StepWorkload, plain, show_comparison
from dat.tools.bench.baselines import BASELINES, import_package, load_baselines
from dat.tools.bench.limits import best, measure_limits, time_convolutions
from dat.tools.bench.memory import peak, reset_peak, resident
from dat.tools.bench.step import make_implementation, measure_peak
from dat.tools.bench.timing import Timing, take_turns
from dat.tools.bench.workload import Workload

TINY = ("--model", "cnn", "--width", "2", "--batch", "4", "--size", "8", "--attack", "pgd-2")
QUICK = ("--repeats", "2", "--threads", "1")


@pytest.fixture(autouse=True)
def _small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring the machine takes a second, and its rates do not matter here."""
    for name in ("attack", "step", "optimizer", "evaluate", "loader", "startup"):
        module = importlib.import_module(f"dat.tools.bench.{name}")
        monkeypatch.setattr(module, "measure_limits", lambda: measure_limits(32, 1024))


def call(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(words)
    out, err = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, out, err


COMMANDS: dict[str, tuple[tuple[str, ...], tuple[str, ...], set[str]]] = {
    "attack": (
        (*TINY, "--against", "plain,foolbox"),
        ("ours, folded (as in evaluation)", "ours", "plain", "foolbox"),
        {"images_per_second", "gflops"},
    ),
    "step": (
        (*TINY, "--clean", "--no-memory"),
        ("ours", "bare", "plain", "paper"),
        {"images_per_second", "gflops"},
    ),
    "optimizer": (
        ("--model", "cnn", "--width", "2", "--against", "sgd,adamw,pytorch_optimizer"),
        (
            *("ours, LAMB", "ours, LARS", "torch SGD, momentum, fused", "torch AdamW, fused"),
            *("pytorch_optimizer LAMB", "pytorch_optimizer LARS"),
        ),
        {"gb_per_second", "state_bytes"},
    ),
    "evaluate": (
        ("--width", "2", "--batch", "4", "--size", "8", "--attack", "fgsm", "--images", "6"),
        ("ours", "plain"),
        {"images_per_second", "gflops"},
    ),
    "loader": (
        ("--images", "64", "--batch", "8", "--against", "dataloader"),
        ("ours", "dataloader"),
        {"images_per_second", "gb_per_second"},
    ),
    "startup": (
        ("--against", "dat"),
        ("import dat", "an interpreter that does nothing"),
        set(),
    ),
}


@pytest.mark.parametrize("bench", COMMANDS)
def test_every_bench_measures(
    bench: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words, names, fields = COMMANDS[bench]
    picture = tmp_path / "speed.png"
    code, out, err = call(capsys, "bench", bench, *words, *QUICK, "--plot", str(picture), "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["bench"] == bench and found["limit"]
    machine = found["machine"]
    assert machine["threads"] == 1 and machine["matmul_gflops"] > 0
    assert machine["copy_gb_per_second"] > 0 and isinstance(machine["allocator"], dict)
    rows = found["rows"]
    assert tuple(row["name"] for row in rows) == names
    for row in rows:
        assert fields <= row.keys()
        assert 0 < row["seconds_low"] <= row["seconds"] <= row["seconds_high"]
        assert row["turns"] == 2
        assert row["ratio"] == pytest.approx(rows[0]["seconds"] / row["seconds"])
        assert row["limit_share"] == pytest.approx(row["limit_seconds"] / row["seconds"])
        if found["images"]:
            assert row["images_per_second"] == pytest.approx(found["images"] / row["seconds"])
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_table_names_the_machine(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "bench", "attack", *TINY, *QUICK, "--against", "plain")
    assert code == 0
    assert "img/s" in out and "GFLOP/s" in out and "1 thread" in out and "allocator: " in out


@pytest.mark.parametrize("bench", COMMANDS)
def test_help_has_an_example(bench: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "bench", bench, "--help")
    assert code == 0 and f"  dat bench {bench}" in out


class Clock:
    """A clock that moves only when a turn is taken."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def turn(self, *seconds: float) -> Callable[[], None]:
        """Takes these seconds in order, then repeats the last."""
        left = list(seconds)

        def work() -> None:
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return work


def compare(timings: dict[str, Timing], **more: Any) -> Comparison:
    machine = {"processor": "p", "cores": 2, "threads": 1, "torch": "t", "allocator": {}}
    machine |= {"matmul_gflops": 1.0, "copy_gb_per_second": 1.0}
    least = dict.fromkeys(timings, 1.0)
    return Comparison(bench="x", timings=timings, machine=machine, least=least, **more)


def test_a_slow_implementation_is_measured_slower() -> None:
    clock = Clock()
    turns = {
        "quick": clock.turn(50.0, 2.0),
        "slow": clock.turn(6.0),
        "odd": clock.turn(9, 1, 2, 3, 4),
    }
    timings = take_turns(turns, repeats=4, clock=clock)
    assert timings["quick"] == Timing((2.0,) * 4)  # the first turn was the warm-up
    assert timings["odd"].median == 2.5
    assert timings["odd"].quartiles == (1.75, 3.25)
    quick, slow, odd = compare(timings, images=12).rows()
    assert (quick["ratio"], slow["ratio"], odd["ratio"]) == (1, pytest.approx(1 / 3), 0.8)
    assert (quick["images_per_second"], slow["images_per_second"]) == (6, 2)
    assert (quick["limit_share"], slow["limit_share"]) == (0.5, pytest.approx(1 / 6))


def test_implementations_take_turns_and_rotate() -> None:
    order: list[str] = []
    turns = {name: partial(order.append, name) for name in "abc"}
    take_turns(turns, repeats=2)
    assert "".join(order) == "abc" + "bca" + "cab"


def test_rounds_go_on_until_the_time_is_over() -> None:
    clock = Clock()
    timings = take_turns(
        {"a": clock.turn(1.0), "b": clock.turn(3.0)}, repeats=2, seconds=10, clock=clock
    )
    assert len(timings["a"].seconds) == 3  # rounds of four seconds: the third one ends after ten


def test_one_turn_has_no_spread() -> None:
    assert Timing((2.0,)).quartiles == (2.0, 2.0)


def test_rounds_are_compared_one_by_one() -> None:
    """The ratio does not depend on the machine's speed, which may halve in every other round."""
    pace = [1.0, 2.0] * 5
    slow, quick = Timing(tuple(1.1 * it for it in pace)), Timing(tuple(pace))
    assert slow.over(quick) == pytest.approx((1.1, 1.1, 1.1))


@pytest.mark.parametrize("count", [1, 5, 6, 10, 20, 61])
def test_the_interval_of_a_median_holds_it(count: int) -> None:
    """Against the binomial distribution: the narrowest interval with a coverage of 95 %."""
    ratios = [1.0 + number for number in range(count)]
    middle, low, high = Timing(tuple(ratios)).over(Timing((1.0,) * count))
    assert middle == pytest.approx((low + high) / 2)
    missed = binom.cdf(
        [low - 1, low], count, 0.5
    )  # the probability of fewer values below the median
    assert missed[0] <= 0.025 or count < 6  # with fewer there is no such interval
    assert missed[1] > 0.025


def test_large_figures_have_commas(capsys: pytest.CaptureFixture[str]) -> None:
    show_comparison(compare({"a": Timing((0.001,))}, images=45_678), as_json=False, plot=None)
    assert "45,678,000" in capsys.readouterr().out


BAD = {
    "unknown baseline": ("attack --against plane", "--against plane: unknown: did you mean plain?"),
    "official": (
        "step --against official",
        "official: the authors' code cannot be imported without CUDA",
    ),
    "unknown entry": ("startup --against trian", "--against trian: unknown: did you mean train?"),
    "unknown attack": ("attack --attack square", "--attack square: must be fgsm, or pgd with a"),
    "no steps": ("step --attack pgd-0", "--attack pgd-0: must be fgsm, or pgd with a number"),
    "picture": ("loader --plot speed.doc", "speed.doc: a plot is written to a file that ends in"),
    "unknown model": ("attack --model cnm", "model.name = 'cnm': unknown: did you mean cnn?"),
    "no data": ("loader --data nowhere", "data.name = 'nowhere': unknown"),
    "only settings": ("evaluate threat.eps=0.1", "specify one run folder, or --model, --we"),
    "half a subject": ("evaluate --model nets:net", "--model: requires --data"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_gets_one_clear_line(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    words, message = BAD[case]
    code, out, err = call(capsys, "bench", *words.split(), "--threads", "1")
    assert code == 2 and out == ""
    (line,) = err.splitlines()
    assert line.startswith("error: ") and message in line


@pytest.mark.parametrize(
    ("name", "program", "message"),
    [
        ("not_here", None, "not_here is not installed; pip install not_here"),
        ("art", None, "pip install adversarial-robustness-toolbox"),
        ("needs_more", "import torch_vision", "needs_more needs torch_vision, which is not inst"),
        ("broken", "raise RuntimeError('too old')", "broken cannot be imported (too old)"),
    ],
)
def test_a_baseline_that_cannot_be_imported_says_what_to_do(
    name: str, program: str | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    if program is not None:
        (tmp_path / f"{name}.py").write_text(program)
    with pytest.raises(ValueError, match="--against: ") as raised:
        import_package(name)
    assert message in str(raised.value)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> str:
    out = str(tmp_path_factory.mktemp("bench") / "run")
    words = ("model.width=2", "train.epochs=1", "train.batch=640", "evaluate.attacks=pgd-1")
    with pytest.raises(SystemExit) as ended:
        main(["train", "digits-standard", *words, "--quiet", "--json", "--out", out])
    assert ended.value.code == 0
    return out


def test_a_run_is_evaluated(finished: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--images", "8", "--batch", "4", "--attack", "pgd-2", *QUICK, "--json")
    code, text, err = call(capsys, "bench", "evaluate", finished, *options)
    assert code == 0, err
    found = json.loads(text)
    assert found["images"] == 8
    assert (found["settings"]["model"], found["settings"]["eps"]) == ("cnn", 0.2)


def after_a_step(
    name: str, workload: StepWorkload, monkeypatch: pytest.MonkeyPatch
) -> list[torch.Tensor]:
    """The weights of an implementation after one step."""
    made: list[nn.Module] = []

    def network(self: StepWorkload) -> nn.Module:
        made.append(Workload.network(self))
        return made[-1]

    monkeypatch.setattr(StepWorkload, "network", network)
    with ExitStack() as stack:
        make_implementation(name)(workload, stack)()
    (model,) = made
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("clean", [False, True])
@pytest.mark.parametrize("name", BASELINES["step"])
def test_all_take_the_same_step(name: str, clean: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With eps = 0 all of them compute the same, so the comparison is fair."""
    workload = StepWorkload(
        model="cnn", width=2, batch=6, size=8, attack="pgd-2", eps=0.0, clean=clean
    )
    before = [p.detach().clone() for p in workload.network().parameters()]
    ours = after_a_step("ours", workload, monkeypatch)
    theirs = after_a_step(name, workload, monkeypatch)
    for start, mine, other in zip(before, ours, theirs, strict=True):
        torch.testing.assert_close(other - start, mine - start, rtol=1e-3, atol=1e-7)
    assert any(not torch.equal(start, mine) for start, mine in zip(before, ours, strict=True))


@pytest.mark.parametrize("attack", [plain.attack, plain.attack_with_all_gradients])
def test_the_loops_by_hand_attack(attack: Callable[..., torch.Tensor]) -> None:
    workload = Workload(model="cnn", width=2, batch=5, size=8, attack="pgd-5", eps=0.1)
    model, (x, y) = workload.network().eval(), workload.images()
    x_adv = attack(model, x, y, workload).detach()
    assert float((x_adv - x).abs().max()) <= 0.1 + 1e-6
    assert float(x_adv.min()) >= 0 and float(x_adv.max()) <= 1
    loss = nn.functional.cross_entropy
    with torch.no_grad():
        assert float(loss(model(x_adv), y)) > float(loss(model(x), y))


def test_an_untrained_network_is_right_about_its_own_answers() -> None:
    from dat.tools.bench.evaluate import _untrained

    workload = Workload(model="cnn", width=2, batch=3, size=8)
    model, data = _untrained(workload, 7)
    assert evaluate(model, data, threat=workload.threat, attack=PGD(steps=1)).ta == 100


def test_convolutions_are_counted() -> None:
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.Conv2d(8, 8, 3, padding=1, bias=False),
        nn.Conv2d(8, 8, 3, padding=1, bias=False),
        nn.Conv2d(8, 4, 1, stride=2, bias=False),
    )
    passes = time_convolutions(net, torch.rand(2, 3, 8, 8), tries=1)
    first = 2 * 2 * 64 * 8 * 27
    assert passes.first_flops == first
    assert passes.flops == first + 2 * (2 * 2 * 64 * 8 * 72) + 2 * 2 * 16 * 4 * 8
    assert passes.attack(10) == (10 * (passes.forward + passes.to_input), 20 * passes.flops)
    assert passes.update()[1] == 3 * passes.flops - first
    assert min(passes) > 0


def test_memory_is_seen_growing() -> None:
    if not reset_peak():
        pytest.skip("this system does not count a peak anew")
    size = 64 * 2**20
    before = resident()
    with mmap.mmap(-1, size) as block:  # not from the heap, which may reuse freed pages
        block.write(b"x" * size)
    assert peak() - before > 0.9 * size


def test_the_memory_of_a_step_is_measured_in_a_separate_process() -> None:
    workload = StepWorkload(model="cnn", width=8, batch=256, attack="pgd-1")
    largest = 4 * 256 * 8 * 32 * 32  # the output of the first layer
    assert measure_peak(workload, "plain", 1) > largest


def test_the_best_of_some_tries_is_taken() -> None:
    calls: list[int] = []
    assert best(lambda: calls.append(1), tries=3) >= 0
    assert len(calls) == 4


@pytest.mark.parametrize("bench", BASELINES)
def test_every_baseline_is_in_its_module(bench: str) -> None:
    names = list(BASELINES[bench])
    assert list(load_baselines(bench, names)) == names
    for name, loaded in load_baselines(bench, names).items():
        assert loaded is getattr(
            importlib.import_module(f"dat.tools.bench.{bench}"), BASELINES[bench][name]
        )


def test_names_of_baselines_are_checked_without_torch() -> None:
    program = (
        "import sys; from dat.tools.bench.baselines import check_baselines; "
        "check_baselines('attack', ['plain']); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
