"""The functions that handle devices by their source and run on no simulated device, with the reason
for each."""

REASONS: dict[str, tuple[str, ...]] = {
    "counts devices, for a scheduler or a plan; there are no tensors": (
        "cli/launch.py:_job",
        "distributed/protocols/hybrid.py:Hybrid.phases",
        "jobs/clusters/kubernetes.py:_pytorch_job",
        "jobs/clusters/kubernetes.py:_resources",
        "jobs/clusters/kubernetes.py:_train_job",
        "jobs/clusters/ray.py:ray_script",
        "jobs/clusters/slurm.py:_directives",
        "jobs/clusters/slurm.py:script",
        "jobs/clusters/torchrun.py:torchrun",
        "tools/planning/scaling.py:sizes",
    ),
    "stays in host memory on purpose": (
        "export/folder.py:_test_images",
        "jobs/data.py:contact_sheet",
        "models/transfer.py:_new_head",
        "tools/bench/workload.py:Workload.images",
    ),
    "measures the time of exchanges between workers, or of kernels, for a plan": (
        "distributed/choice.py:_chunked_is_faster",
        "distributed/probe.py:_time.<locals>.run",
        "distributed/probe.py:probe_bucket",
        "distributed/probe.py:probe_ring",
        "distributed/probe.py:probe_swap",
        "tools/planning/calibration.py:_kernels",
        "tools/planning/calibration.py:_median",
        "tools/planning/costs.py:fingerprint",
    ),
    "a benchmark, which starts processes of its own": (
        "tools/bench/attack.py:foolbox_pgd",
        "tools/bench/comm.py:_exchange",
        "tools/bench/comm.py:measure_comm",
        "tools/bench/evaluate.py:bench_evaluate",
        "tools/bench/step.py:_ours",
        "tools/bench/step.py:make_worker",
    ),
    "resumes a run, which this suite does not": (
        "train/atta.py:PerturbationStore.restore",
        "train/free.py:FreeReplay.load_worker_state",
        "train/resharding.py:reshard",
        "train/trainer.py:Trainer._rehearse",
    ),
    "the simulated device is there, is alone, has no TF32, and is never out of memory": (
        "core/devices.py:_is_bound",
        "core/devices.py:exact_float32",
        "core/devices.py:missing_accelerator",
        "core/devices.py:release_cached_memory",
    ),
    "workers with data that stays on their nodes evaluate alone": (
        "distributed/world.py:SingleWorker.gather",
        "distributed/world.py:SingleWorker.sum",
        "distributed/world.py:World.single",
    ),
    "of DAT's own convolutions, which `ways` refuses for an accelerator": (
        "kernels/convolve/layers.py:_is_supported",
    ),
    "no caller yet": ("core/devices.py:copies_in_background",),
}
NOT_ENTERED = {name: reason for reason, names in REASONS.items() for name in names}
