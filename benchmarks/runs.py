"""What the benchmarks share: run `dat train`, sum up over seeds, write the results down."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
DIVERGED = 3
"""The exit code of a run whose loss became NaN or infinite: a result, not an accident."""


def train(recipe: str, *settings: str, workers: int = 1) -> dict[str, Any]:
    """One run through the command line, as a user would; its result."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "dat", "train", recipe, *settings, "--json"]
        options = ["--workers", str(workers), "--out", f"{folder}/run"]
        done = subprocess.run([*command, *options], capture_output=True, text=True)
    if done.returncode == DIVERGED:
        result: dict[str, Any] = {"diverged": done.stderr.splitlines()[-1], "steps": 0}
        result |= dict.fromkeys(("ta", "ra", "holdout_ta", "holdout_ra"), 0.0)
    elif done.returncode:
        raise RuntimeError(done.stderr)
    else:
        result = json.loads(done.stdout) | {"recipe": Path(recipe).name}  # wherever it lies
    print(recipe, *settings, f"TA {result['ta']:.2f} RA {result['ra']:.2f}", flush=True)
    return result


def dat(*words: str) -> dict[str, Any]:
    """Any command, and the JSON that it prints."""
    command = [sys.executable, "-m", "dat", *words, "--json", "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return dict(json.loads(done.stdout))


def mean_and_spread(values: Sequence[float]) -> str:
    """Mean and sample standard deviation."""
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    digits = 1 if max(values) >= 10 else 3
    return f"{statistics.mean(values):.{digits}f} ± {spread:.{digits}f}"


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def save(script: Path, results: object, markdown: str) -> None:
    """Write both forms under results/, named after the script, and show the table."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{script.stem}.json").write_text(json.dumps(results, indent=1) + "\n")
    (RESULTS / f"{script.stem}.md").write_text(markdown)
    print(markdown)
