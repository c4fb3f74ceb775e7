"""The same run on many nodes: files and commands for torchrun, SLURM, Kubernetes and Ray."""

from dat.core.deprecation import renamed_names
from dat.jobs.clusters.job import ClusterJob
from dat.jobs.clusters.kubernetes import KINDS, MOUNT, keeps_checkpoints, manifest
from dat.jobs.clusters.ray import ray_script
from dat.jobs.clusters.slurm import Queue, script
from dat.jobs.clusters.torchrun import commands

__all__ = [
    "KINDS",
    "MOUNT",
    "ClusterJob",
    "Queue",
    "commands",
    "keeps_checkpoints",
    "manifest",
    "ray_script",
    "script",
]

__getattr__ = renamed_names(__name__, Job="ClusterJob")
