"""Ray: a script that trains a recipe with Ray Train."""

from __future__ import annotations

import json
from importlib import resources

from dat.jobs.clusters.job import ClusterJob


def ray_script(job: ClusterJob) -> str:
    """The script. User input is one quoted string in it, which is parsed as JSON."""
    parameters = {
        "recipe": job.recipe,
        "settings": list(job.settings),
        "out": job.out,
        "workers": job.nodes * job.devices,
        "gpus": job.gpus,
        "restarts": job.restarts,
        "variables": {name: value for name, value in job.variables.items() if "IFNAME" in name},
    }
    text = resources.files(__package__).joinpath("ray_job.txt").read_text()
    return text.replace("@JOB@", repr(json.dumps(parameters)))
