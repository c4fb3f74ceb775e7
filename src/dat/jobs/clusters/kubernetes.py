"""Kubernetes: a TrainJob of Kubeflow Trainer (v2), or a PyTorchJob of its training operator (v1).

Both set torchrun's parameters (nodes, workers per node, master) in the pods' environment. The job
also names the run for torchrun, so that a restarted pod resumes from the run's last checkpoint.
Manifests are built as objects and serialized by the YAML library: no text is pasted.
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Any

import yaml

from dat.jobs.clusters.job import NAME, ClusterJob

KINDS = ("trainjob", "pytorchjob")
IMAGE = re.compile(r"[a-z0-9]([\w.:/@-]{0,254}\w)?")
MOUNT = "/runs"
"""Where the volume is mounted; the path of the run's folder is relative to it."""


def manifest(
    job: ClusterJob, image: str, *, kind: str = "trainjob", volume: str | None = None
) -> str:
    """The YAML for `kubectl apply -f`."""
    if not IMAGE.fullmatch(image):
        raise ValueError(f"--image {image!r}: not a valid image name, e.g. registry.here/dat:1")
    if volume is not None and not NAME.fullmatch(volume):
        raise ValueError(
            f"--volume-claim {volume!r}: not a valid name of a persistent volume claim"
        )
    resource = {"trainjob": _train_job, "pytorchjob": _pytorch_job}[kind](job, image, volume)
    return yaml.safe_dump(resource, sort_keys=False, default_flow_style=False)


def keeps_checkpoints(out: str, volume: str | None) -> bool:
    """Whether the run's folder is on a volume that outlives the pods."""
    return volume is not None and PurePosixPath(MOUNT) in PurePosixPath(out).parents


def _command(job: ClusterJob) -> list[str]:
    """What a pod runs; setup commands are the only text that a shell reads."""
    before = ["bash", "-c", f'{job.setup.rstrip()}\nexec "$@"', "dat"] if job.setup else []
    return [
        *before,
        *("torchrun", "--max-restarts", str(job.restarts), "--rdzv-id", job.name),
        *("-m", "dat", *job.train),
    ]


def _environment(job: ClusterJob) -> list[dict[str, str]]:
    return [{"name": name, "value": value} for name, value in job.variables.items()]


def _resources(job: ClusterJob) -> dict[str, Any]:
    amount = {"nvidia.com/gpu": job.devices} if job.gpus else {"cpu": job.devices}
    return {"requests": amount, "limits": dict(amount)}


def _volumes(volume: str) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    claim = {"name": "runs", "persistentVolumeClaim": {"claimName": volume}}
    return [claim], [{"name": "runs", "mountPath": MOUNT}]


def _train_job(job: ClusterJob, image: str, volume: str | None) -> dict[str, Any]:
    trainer: dict[str, Any] = {
        "image": image,
        "command": _command(job),
        "numNodes": job.nodes,
        "numProcPerNode": job.devices,
        "resourcesPerNode": _resources(job),
        "env": _environment(job),
    }
    spec: dict[str, Any] = {"runtimeRef": {"name": "torch-distributed"}, "trainer": trainer}
    if volume:
        volumes, mounts = _volumes(volume)
        container = {"name": "node", "volumeMounts": mounts}
        pod = {"volumes": volumes, "containers": [container]}
        spec["podTemplateOverrides"] = [{"targetJobs": [{"name": "node"}], "spec": pod}]
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": job.name},
        "spec": spec,
    }


def _pytorch_job(job: ClusterJob, image: str, volume: str | None) -> dict[str, Any]:
    def replicas(count: int) -> dict[str, Any]:
        container: dict[str, Any] = {
            "name": "pytorch",  # the operator expects this name
            "image": image,
            "command": _command(job),
            "resources": _resources(job),
            "env": _environment(job),
        }
        pod: dict[str, Any] = {"containers": [container]}
        if volume:
            pod["volumes"], container["volumeMounts"] = _volumes(volume)
        # OnFailure: torchrun exits with 1, whatever its workers' exit codes
        return {"replicas": count, "restartPolicy": "OnFailure", "template": {"spec": pod}}

    others = {"Worker": replicas(job.nodes - 1)} if job.nodes > 1 else {}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": job.name},
        "spec": {
            "nprocPerNode": str(job.devices),
            "pytorchReplicaSpecs": {"Master": replicas(1), **others},
        },
    }
