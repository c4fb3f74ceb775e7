"""Benchmarks of attacks, training steps, optimizers, evaluation, loading, startup, quantizers, and
of the gradient exchange on a given link."""

from typing import TYPE_CHECKING

from dat.core.lazy import lazy_names

if TYPE_CHECKING:
    from dat.tools.bench.attack import bench_attack
    from dat.tools.bench.comm import CommPlan, bench_comm, measure_comm
    from dat.tools.bench.evaluate import bench_evaluate
    from dat.tools.bench.link import testbed
    from dat.tools.bench.loader import bench_loader
    from dat.tools.bench.optimizer import bench_optimizer
    from dat.tools.bench.quantizer import bench_quantizer
    from dat.tools.bench.show import show_comm, show_comparison, show_quantizer
    from dat.tools.bench.startup import bench_startup
    from dat.tools.bench.step import StepWorkload, bench_step
    from dat.tools.bench.timing import Comparison
    from dat.tools.bench.workers import run_workers
    from dat.tools.bench.workload import Workload
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        renamed={
            "Race": "Comparison",
            "Scene": "Workload",
            "StepScene": "StepWorkload",
            "show_race": "show_comparison",
        },
        attack="bench_attack",
        comm="CommPlan bench_comm measure_comm",
        evaluate="bench_evaluate",
        link="testbed",
        loader="bench_loader",
        optimizer="bench_optimizer",
        quantizer="bench_quantizer",
        timing="Comparison",
        workload="Workload",
        show="show_comm show_comparison show_quantizer",
        startup="bench_startup",
        step="StepWorkload bench_step",
        workers="run_workers",
    )

__all__ = [
    "CommPlan",
    "Comparison",
    "StepWorkload",
    "Workload",
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
    "show_comparison",
    "show_quantizer",
    "testbed",
]
