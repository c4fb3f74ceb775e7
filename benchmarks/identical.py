"""Do the same commands still give the same bits? The proof of a change that must change nothing.

    python benchmarks/identical.py --write     record what the code as it is gives
    python benchmarks/identical.py             run it all again and compare

Each run is a small `dat train` through the command line: 2 to 9 seconds. What is recorded is the
SHA-256 of every weight file (names, types, shapes and bytes of its tensors), the accuracies in
`result.json`, and the JSON that `dat evaluate`, `dat certify` and `dat plan` print, without times.
The bits depend on the processor and on PyTorch, so both sides are run on one machine: the file
under results/ says which.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from runs import RESULTS
from safetensors import safe_open

TINY = (
    *("model.width=4", "train.epochs=2", "train.batch=240", "comm.threads=1"),
    *("train.select_steps=2", "evaluate.report=0", "evaluate.attacks=pgd-3", "evaluate.images=40"),
)
RESNET, VIT = "model.name=preact-resnet18", ("model.name=vit-4", "model.width=16")
SMOOTH = ("objective.copies=2", "threat.norm=l2", "threat.eps=0.5")
PGD3, BITS4, BITS8 = "attack.steps=3", "quantizer.bits=4", "quantizer.bits=8"

ONE: dict[str, tuple[str, ...]] = {
    "pgd": (PGD3,),
    "pgd-l2": (PGD3, "threat.norm=l2", "threat.eps=0.8"),
    "restarts": (PGD3, "attack.restarts=2"),
    "patience": (PGD3, "attack.patience=1"),
    "none": ("attack.name=none", "train.select_by=ta"),
    "fgsm": ("attack.name=fgsm",),
    "n-fgsm": ("attack.name=n-fgsm", "schedule.name=cyclic"),
    "free": ("attack.name=free", "train.ema=0.9"),
    "yopo": ("attack.name=yopo",),
    "apgd": ("attack.name=apgd", PGD3),
    "apgd-t": ("attack.name=apgd-t", PGD3),
    "fab": ("attack.name=fab", PGD3),
    "square": ("attack.name=square", "attack.queries=5"),
    "carried": ("attack.steps=1", "attack.carry=true", "data.augmentation=crop-flip"),
    "trades": (PGD3, "objective.name=trades", "optimizer.name=lars"),
    "mart": (PGD3, "objective.name=mart", "optimizer.name=sgd", "schedule.name=piecewise"),
    "alp": (PGD3, "objective.name=alp", "schedule.name=constant"),
    "gradalign": ("attack.name=fgsm", "objective.name=gradalign"),
    "smooth": (PGD3, "objective.name=smooth", *SMOOTH),
    "stability": ("attack.name=none", "objective.name=stability", *SMOOTH),
    "lsgd": (PGD3, "optimizer.name=lsgd"),
    "awp-ema": (PGD3, RESNET, "train.awp=0.01", "train.awp_warmup=1", "train.ema=0.9"),
    "growth": (PGD3, "train.grow=1", "schedule.warmup=1"),
    "ghost": (PGD3, RESNET, "train.bn=ghost", "train.attack_bn=train"),
    "pieces": (PGD3, "compute.pieces=2", "data.cutout=2", "data.randaugment=1"),
    "bfloat16": (PGD3, "compute.precision=bfloat16"),
    "semi": (PGD3, "objective.name=trades", "data.labels=600", "data.unlabelled=rest"),
    "rescue": ("attack.name=fgsm", "train.sentinel=rescue", "train.epochs=3"),
}
"""Runs of one worker, by name: settings over those of TINY."""

TWO: dict[str, tuple[str, ...]] = {
    "two": (PGD3,),
    "two-resnet": (PGD3, RESNET, "train.ema=0.9"),
    "sync": (PGD3, RESNET, "train.bn=sync", "train.attack_bn=train"),
    "team": (PGD3, "objective.name=smooth", *SMOOTH, "train.team=2"),
    "two-growth": (PGD3, "train.grow=1"),
    "two-awp": (PGD3, "train.awp=0.01", BITS8),
    "two-carried": ("attack.steps=1", "attack.carry=true", BITS8),
    "fsdp": (PGD3, *VIT, "comm.shard=2", "train.ema=0.9"),
    "fsdp-4": (PGD3, *VIT, "comm.shard=2", "comm.gather=block", BITS4),
    "tensor": (PGD3, "quantizer.name=tensor", BITS8, "protocol.name=gather"),
    "vector": (PGD3, "quantizer.name=vector", BITS4, "protocol.name=server"),
    "feedback": (PGD3, BITS4, "quantizer.error_feedback=true"),
} | {
    f"{protocol}-{bits.partition('=')[2]}": (PGD3, bits, f"protocol.name={protocol}")
    for protocol in ("gather", "server", "chunked", "ring", "hybrid")
    for bits in (BITS8, BITS4)
    if (protocol, bits) != ("ring", BITS4)
}
"""Runs of two workers."""

RESUMED = ("attack.name=free", "train.batch=60", "train.save_every=5", "train.ema=0.9")
"""Killed after its first checkpoint, in the middle of an epoch; two workers, error feedback."""

TIMES = ("second", "efficiency", "explanation", "why", "spent", "out", "folder", "run")
"""What two runs of the same code do not agree on; a plan watches a real backward pass."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="record instead of comparing")
    parser.add_argument("--only", default="", help="only runs whose name contains this")
    options = parser.parse_args()
    file = RESULTS / "identical.json"
    with tempfile.TemporaryDirectory() as folder:
        observed = observe(Path(folder), options.only)
    recorded = json.loads(file.read_text())["runs"] if file.exists() else {}
    if options.write:
        machine = {"processor": platform.machine(), "torch": torch.__version__}
        runs = {"machine": machine, "runs": recorded | observed}
        file.write_text(json.dumps(runs, indent=1) + "\n")
        print(f"{len(observed)} recorded in {file.name}")
        return 0
    different = [name for name, value in observed.items() if value != recorded.get(name)]
    for name in different:
        print(f"{name}: {recorded.get(name)}\n  is now {observed[name]}")
    print(f"{len(observed)} compared, {len(different)} different")
    return 1 if different else 0


def observe(folder: Path, only: str) -> dict[str, Any]:
    """By name, what each run and each command comes to."""
    observed: dict[str, Any] = {}
    for workers, runs in ((1, ONE), (2, TWO)):
        for name, settings in runs.items():
            if only in name:
                _show(observed, name, train(folder / name, *settings, workers=workers))
    if only in "resumed":
        settings = (*RESUMED, BITS4, "quantizer.error_feedback=true")
        _show(observed, "resumed", resumed(folder / "resumed", *settings))
    if only == "":
        _show(observed, "evaluate", command(folder, "evaluate", "pgd", "--attacks", "clean,pgd-5"))
        _show(observed, "autoattack", command(folder, "evaluate", "pgd", "--attacks", "autoattack"))
        _show(
            observed,
            "certify",
            command(folder, "certify", "smooth", "--n", "1000", "--batch", "500"),
        )
    if only in "plan":
        for sweep in ("bits,protocol", "nodes"):
            cluster = ("digits", "--nodes", "4", "--devices", "2", "--cores", "2", "--compute", "1")
            _show(observed, f"plan {sweep}", command(folder, "plan", *cluster, "--sweep", sweep))
    return observed


def _show(observed: dict[str, Any], name: str, value: Any) -> None:
    observed[name] = value
    print(name, value if isinstance(value, str) else value.get("last", ""), flush=True)


def train(out: Path, *settings: str, workers: int) -> dict[str, Any]:
    """One run; the digests of its weights, and its accuracies."""
    _run(*_train_words(out, *settings, workers=workers))
    return described(out)


def _train_words(out: Path, *settings: str, workers: int) -> list[str]:
    words = ["train", "digits", *TINY, *settings, "--workers", str(workers)]
    return [*words, "--out", str(out), "--quiet"]


def resumed(out: Path, *settings: str) -> dict[str, Any]:
    """The same for a run that is killed in the middle of an epoch and resumed."""
    command = [sys.executable, "-m", "dat", *_train_words(out, *settings, workers=2)]
    process = subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL)
    while not list(out.glob("checkpoints/*[0-9]")):
        assert process.poll() is None, "it ended before its first checkpoint"
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    _run("train", "--resume", str(out), "--workers", "2", "--quiet")
    return described(out)


def described(out: Path) -> dict[str, Any]:
    result = json.loads((out / "result.json").read_text())
    digests = {path.stem: digest(path) for path in sorted(out.glob("*.safetensors"))}
    return digests | {key: result[key] for key in ("ta", "ra", "best_epoch", "steps")}


def digest(path: Path) -> str:
    """Of a file's tensors, whatever else it says."""
    sha = hashlib.sha256()
    with safe_open(path, "pt") as file:
        for name in sorted(file.keys()):
            tensor = file.get_tensor(name).contiguous()
            sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            sha.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def command(folder: Path, name: str, *words: str) -> str:
    """The digest of what a command prints as JSON."""
    places = [str(folder / word) if (folder / word).is_dir() else word for word in words]
    options = [] if name == "plan" else ["--images", "40", "--quiet"]
    printed = json.loads(_run(name, *places, *options, "--json"))
    return hashlib.sha256(json.dumps(_timeless(printed), sort_keys=True).encode()).hexdigest()


def _timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _timeless(v) for k, v in value.items() if not any(word in k for word in TIMES)}
    return [_timeless(item) for item in value] if isinstance(value, list) else value


def _run(*words: str) -> str:
    command = [sys.executable, "-m", "dat", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}\n{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
