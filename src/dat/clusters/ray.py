"""Ray: a script that trains by a recipe under Ray Train."""

from __future__ import annotations

import json
from importlib import resources

from dat.clusters.job import Job


def ray_script(job: Job) -> str:
    """The script. What a user named is in it as one quoted text, which is read as JSON."""
    facts = {
        "recipe": job.recipe,
        "settings": list(job.settings),
        "out": job.out,
        "workers": job.nodes * job.devices,
        "gpus": job.gpus,
        "restarts": job.restarts,
        "variables": {name: value for name, value in job.variables.items() if "IFNAME" in name},
    }
    text = resources.files(__package__).joinpath("ray_job.txt").read_text()
    return text.replace("@JOB@", repr(json.dumps(facts)))
