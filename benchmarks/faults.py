"""Twenty deaths in one run, and ten minutes of runs in a row: nothing differs, nothing grows.

    python benchmarks/faults.py [--kills 20] [--stops 4] [--minutes 10]

SIGKILL for a random one of three workers after a random number of steps, again and again, until the
run has finished by itself; its weights are compared with those of a run that was left alone. The
same with SIGSTOP, which the others notice by their timeout of five seconds. Then the default recipe
in a loop in one process: resident memory, open files, threads and child processes after every run.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from runs import save, table
from safetensors.torch import load_file

DAT = (sys.executable, "-m", "dat")
SETTINGS = (
    *("model.width=4", "attack.steps=2", "train.batch=48", "evaluate.attacks=pgd-1"),
    *("train.select_steps=1", "comm.threads=1", "train.save_every=3"),
)


def children(process: subprocess.Popen[bytes]) -> list[int]:
    listing = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return [int(pid) for pid in listing.read_text().split()] if listing.exists() else []


def reached(run: Path) -> int:
    names = [it.name for it in (run / "checkpoints").glob("*")]
    return max((int(name) for name in names if name.isdecimal()), default=0)


def alone(hits: int, folder: Path) -> float:
    """The undisturbed run: its seconds."""
    start = time.perf_counter()
    subprocess.run([*words(hits), "--out", "alone"], cwd=folder, check=True, capture_output=True)
    return time.perf_counter() - start


def words(hits: int) -> list[str]:
    epochs = f"train.epochs={-(-hits // 4) + 2}"
    return [*DAT, "train", "digits", *SETTINGS, epochs, "--workers", "3", "--quiet"]


def disturbed(number: signal.Signals, hits: int, most: int, folder: Path) -> dict[str, Any]:
    """The run of as many epochs as `most` hits want, hit so many times."""
    name, chance, done = number.name, random.Random(0), 0
    start = time.perf_counter()
    process = subprocess.Popen(
        [*words(most), "--out", name, "--restarts", str(hits), "comm.timeout=5"],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    aim = chance.randint(3, 9)
    while process.poll() is None:
        if done < hits and reached(folder / name) >= aim and children(process):
            os.kill(chance.choice(children(process)), number)
            done += 1
            aim += chance.randint(3, 8)
            time.sleep(1)  # until the dead are noticed
        time.sleep(0.02)
    took = time.perf_counter() - start
    one, other = (load_file(folder / it / "last.safetensors") for it in ("alone", name))
    same = one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
    print(f"{done} x {name}, exit code {process.returncode}, identical: {same}", flush=True)
    return {"hits": done, "code": process.returncode, "identical": same, "seconds": took}


def soak(minutes: float, folder: Path) -> dict[str, Any]:
    from dat.config.recipes import read
    from dat.jobs.train import train

    config = read("digits", {"comm": {"threads": 1}, "train": {"epochs": 3}})
    seen, end = [], time.monotonic() + 60 * minutes
    while time.monotonic() < end:
        train(config, "digits", folder / "soak", overwrite=True, quiet=True)
        status = Path("/proc/self/status").read_text()
        memory = int(status.split("VmRSS:")[1].split()[0]) / 1024
        tasks = len(os.listdir("/proc/self/task"))
        kids = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        seen.append((memory, len(os.listdir("/proc/self/fd")), tasks, len(kids)))
    names = ("memory_mb", "files", "threads", "processes")
    early, late = seen[min(2, len(seen) - 1)], seen[-1]  # the first runs fill caches
    print(f"{len(seen)} runs: {early} -> {late}", flush=True)
    return {"runs": len(seen)} | {
        name: [early[i], late[i], max(row[i] for row in seen)] for i, name in enumerate(names)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--stops", type=int, default=4)
    parser.add_argument("--minutes", type=float, default=10)
    arguments = parser.parse_args()
    kills, stops = arguments.kills, arguments.stops
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        found: dict[str, Any] = {}
        found["seconds_alone"] = alone(kills, place)
        found["killed"] = disturbed(signal.SIGKILL, kills, kills, place)
        found["stopped"] = disturbed(signal.SIGSTOP, stops, kills, place)
        found["soak"] = grown = soak(arguments.minutes, place)
    rows = [["seconds of the undisturbed run", f"{found['seconds_alone']:.0f}"]]
    for what in ("killed", "stopped"):
        it = found[what]
        same = "identical weights" if it["identical"] else "OTHER WEIGHTS"
        rows.append([f"workers {what}: {it['hits']}", f"{same}, {it['seconds']:.0f} s"])
    rows.append(["runs in a row", str(grown["runs"])])
    for name in ("memory_mb", "files", "threads", "processes"):
        early, late, most = grown[name]
        words = name.replace("_mb", " (MB)")
        rows.append([f"{words}: third run, last, most", f"{early:.0f}, {late:.0f}, {most:.0f}"])
    save(Path(__file__), found, table(["What", "Found"], rows))


if __name__ == "__main__":
    main()
