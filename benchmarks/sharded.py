"""A sharded model (FSDP2) beside whole ones (DDP): losses, trust ratios, bytes, memory a worker.

    python benchmarks/sharded.py

Losses: 20 steps of PGD-3 with LAMB on the digits, a ViT of 0.7 million weights, single precision;
differences are relative, the largest of all steps, to DDP on as many workers. Memory: three steps
of PGD-1 with LAMB of a ViT of 21 million weights on images of 32 x 32, the first one not counted;
the peak is the kernel's (VmHWM) above what a worker had before it made the model, "kept" is the
size of its weights, gradients and moments. All without the copy that DDP attacks (compute.fold).
malloc gives back what is freed. It goes on with the results that there are.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import tempfile
import traceback
from pathlib import Path
from typing import Any, NoReturn

import torch
from runs import RESULTS, save, table
from torch import Tensor

from dat.attacks import PGD
from dat.core.threat import ThreatModel
from dat.data import ImageData, load
from dat.distributed import Buckets, World, local_tensor
from dat.jobs.launch import STORE
from dat.models import build_model, normalized
from dat.optim import LAMB
from dat.tools.bench import memory
from dat.train import Callback, EpochRecord, Trainer
from dat.train.engine import Compute
from dat.train.step import StepReport

STEPS = 20
MMAP_THRESHOLD = -3
"""Of glibc's mallopt. Blocks above it are given back when they are freed; else what malloc keeps
for the next ones counts as in use."""
LOSSES: dict[int, dict[str, dict[str, Any]]] = {
    2: {"DDP, 2": {}, "FSDP, 2": {"shard": 2}},
    4: {
        "DDP, 4": {},
        "FSDP, 4": {"shard": 4},
        "FSDP, 4, a block at a time": {"shard": 4, "gather": "block"},
        "HSDP, 2 x 2": {"shard": 2},
        "FSDP, 4, 8 bits": {"shard": 4, "bits": 8},
    },
}
"""By the number of workers; all of one number in one go."""
MEMORY: dict[str, tuple[int, dict[str, Any]]] = {
    "1 worker": (1, {}),
    "DDP, 2": (2, {}),
    "FSDP, 2": (2, {"shard": 2}),
    "FSDP, 4": (4, {"shard": 4}),
    "FSDP, 2, a block at a time": (2, {"shard": 2, "gather": "block"}),
    "FSDP, 4, a block at a time": (4, {"shard": 4, "gather": "block"}),
}
"""Each in processes of their own: in one, a contestant would find the pages of the one before."""


class Watch(Callback):
    def __init__(self) -> None:
        gc.collect()
        self.before = memory.resident()
        self.losses: list[float] = []
        self.ratios: list[dict[str, float]] = []
        self.sent: list[int] = []
        self.peak = self.kept = self.at_end = 0

    def on_step_end(self, trainer: Trainer, epoch: int, report: StepReport) -> None:
        self.losses.append(report.loss)
        self.ratios.append(trainer.trust_ratios())
        self.sent.append(report.traffic.sent)
        if len(self.losses) > 1:
            self.peak = max(self.peak, memory.peak() - self.before)
        self.kept = sum(local_tensor(it).nbytes for it in _kept(trainer))
        memory.reset_peak()

    def on_epoch_end(self, trainer: Trainer, record: EpochRecord) -> None:
        self.at_end = memory.peak() - self.before


def _kept(trainer: Trainer) -> list[Tensor]:
    moments = [it for state in trainer.worker.optimizer.state.values() for it in state.values()]
    parameters = list(trainer.model.parameters())
    found = [*parameters, *(p.grad for p in parameters), *moments]
    return [it for it in found if isinstance(it, Tensor)]


def trainer_of(kind: str, options: dict[str, Any], world: World, watch: Watch) -> Trainer:
    quantizer = Buckets(bits=options.pop("bits", 32))
    common: dict[str, Any] = {
        "optimizer": LAMB(lr=0.01),
        "epochs": 1,
        "compute": Compute(fold=False),
        "quantizer": quantizer,
        "world": world,
        "callbacks": [watch],
        **options,
    }
    if kind == "losses":
        data = load("digits")
        model = normalized(build_model("vit-4", 10, channels=1, width=96), data.mean, data.std)
        some = data.train.take(torch.arange(48 * STEPS))
        attack, threat = PGD(steps=3), ThreatModel(eps=0.2)
        return Trainer(model=model, data=some, batch=48, attack=attack, threat=threat, **common)
    random = torch.Generator().manual_seed(0)
    pictures = torch.rand(24, 3, 32, 32, generator=random)
    some = ImageData.of(pictures, torch.arange(24) % 10, classes=10)
    model = build_model("vit-16", 10)
    return Trainer(model=model, data=some, batch=8, attack=PGD(steps=1), **common)


def work(kind: str, cases: dict[str, dict[str, Any]], folder: str) -> None:
    """What one worker does."""
    ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, 1 << 16)
    with World.join(device="cpu", threads=1) as world:
        found = {}
        for name, options in cases.items():
            watch = Watch()
            trainer = trainer_of(kind, options, world, watch)
            weights = sum(p.numel() for p in trainer.model.parameters())
            trainer.fit()
            found[name] = vars(watch) | {"weights": weights}
        Path(folder, f"{world.rank}.json").write_text(json.dumps(found))


def _be_a_worker(kind: str, cases: dict[str, dict[str, Any]], folder: str) -> NoReturn:
    code = 1
    try:
        work(kind, cases, folder)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def run(kind: str, workers: int, cases: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """In workers that are forked, as torch is loaded already; nothing here has started a thread."""
    with tempfile.TemporaryDirectory() as folder:
        common = {"WORLD_SIZE": workers, "LOCAL_WORLD_SIZE": workers, STORE: f"{folder}/store"}
        started = []
        for rank in range(workers):
            pid = os.fork()
            if not pid:
                own = common | {"RANK": rank, "LOCAL_RANK": rank}
                os.environ |= {name: str(value) for name, value in own.items()}
                _be_a_worker(kind, cases, folder)
            started.append(pid)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in started]
        if any(codes):
            raise OSError(f"the workers ended with {codes}")
        return [json.loads(Path(folder, f"{it}.json").read_text()) for it in range(workers)]


def difference(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(one, other, strict=True))


def losses() -> dict[str, Any]:
    found: dict[str, tuple[int, dict[str, Any]]] = {}
    for workers, cases in LOSSES.items():
        found |= {name: (workers, it) for name, it in run("losses", workers, cases)[0].items()}
    results = {}
    for name, (workers, mine) in found.items():
        ddp = found[f"DDP, {workers}"][1]
        ratios = [
            difference(list(one.values()), [other[key] for key in one])
            for one, other in zip(mine["ratios"], ddp["ratios"], strict=True)
        ]
        results[name] = {
            "losses": mine["losses"],
            "loss_difference": difference(mine["losses"], ddp["losses"]),
            "ratio_difference": max(ratios),
            "ratio_difference_first_step": ratios[0],
            "bytes_per_step": mine["sent"][1],
        }
    return results


def memories() -> dict[str, Any]:
    results = {}
    for name, (workers, options) in MEMORY.items():
        seen = [it[name] for it in run("memory", workers, {name: options})]
        most = {key: max(it[key] for it in seen) for key in ("peak", "kept", "at_end")}
        results[name] = most | {"sent": seen[0]["sent"][1], "weights": seen[0]["weights"]}
        print(name, results[name], flush=True)
    return results


def tables(results: dict[str, dict[str, Any]]) -> str:
    rows = []
    for name, it in results["losses"].items():
        keys = ("loss_difference", "ratio_difference_first_step", "ratio_difference")
        gaps = ["" if name.startswith("DDP") else f"{it[key]:.1e}" for key in keys]
        ends = f"{it['losses'][0]:.4f}, {it['losses'][-1]:.4f}"
        rows.append([name, ends, *gaps, f"{it['bytes_per_step'] / 1e6:.1f}"])
    head = ("", "loss, first and last", "losses differ", "ratios, step 1", "ratios, all")
    first = table((*head, "MB sent per step and worker"), rows)
    rows = [
        [name, *(f"{it[key] / 2**20:.0f}" for key in ("kept", "peak", "at_end", "sent"))]
        for name, it in results["memory"].items()
    ]
    head = ("", "kept", "peak within a step", "peak at the end of an epoch", "sent per step")
    second = table(tuple(f"{it} (MiB)" if it else it for it in head), rows)
    return f"{first}\n{second}"


def main() -> None:
    kept = RESULTS / "sharded.json"
    results = json.loads(kept.read_text()) if kept.exists() else {}
    for name, measure in (("losses", losses), ("memory", memories)):
        if name not in results:
            results[name] = measure()
            kept.write_text(json.dumps(results))
    save(Path(__file__), results, tables(results))


if __name__ == "__main__":
    main()
