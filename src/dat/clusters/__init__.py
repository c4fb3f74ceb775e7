"""The same run on many nodes: what torchrun, SLURM, Kubernetes and Ray are given to start it."""

from dat.clusters.job import Job
from dat.clusters.kubernetes import KINDS, manifest
from dat.clusters.ray import ray_script
from dat.clusters.slurm import Queue, script
from dat.clusters.torchrun import commands

__all__ = ["KINDS", "Job", "Queue", "commands", "manifest", "ray_script", "script"]
