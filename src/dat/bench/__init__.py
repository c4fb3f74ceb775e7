"""Measurements that a user can repeat: the quantizers' speed, and an exchange on a given link."""

from dat.bench.comm import CommPlan, bench_comm, measure_comm
from dat.bench.link import testbed
from dat.bench.quantizer import bench_quantizer
from dat.bench.show import show_comm, show_quantizer
from dat.bench.workers import run_workers

__all__ = [
    "CommPlan",
    "bench_comm",
    "bench_quantizer",
    "measure_comm",
    "run_workers",
    "show_comm",
    "show_quantizer",
    "testbed",
]
