"""Measurements that a user can repeat: attacks, steps, optimizers, evaluation, loading, startup,
quantizers, and an exchange on a given link."""

from dat.bench.attack import bench_attack
from dat.bench.comm import CommPlan, bench_comm, measure_comm
from dat.bench.evaluate import bench_evaluate
from dat.bench.link import testbed
from dat.bench.loader import bench_loader
from dat.bench.optimizer import bench_optimizer
from dat.bench.quantizer import bench_quantizer
from dat.bench.race import Race
from dat.bench.scene import Scene
from dat.bench.show import show_comm, show_quantizer, show_race
from dat.bench.startup import bench_startup
from dat.bench.step import StepScene, bench_step
from dat.bench.workers import run_workers

__all__ = [
    "CommPlan",
    "Race",
    "Scene",
    "StepScene",
    "bench_attack",
    "bench_comm",
    "bench_evaluate",
    "bench_loader",
    "bench_optimizer",
    "bench_quantizer",
    "bench_startup",
    "bench_step",
    "measure_comm",
    "run_workers",
    "show_comm",
    "show_quantizer",
    "show_race",
    "testbed",
]
