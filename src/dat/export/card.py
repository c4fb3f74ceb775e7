"""README.md: the model card, as model hubs show it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml

from dat.export.facts import Facts
from dat.export.formats import HUB

CARD = "README.md"
TAGS = ("image-classification", "adversarial-robustness", "adversarial-training", "dat")

CODE = {
    HUB: """\
import dat

model = dat.load("FOLDER"OWN)  # eval mode; images in [0, 1] to logits
logits = model(images)""",
    "onnx": """\
import onnxruntime

session = onnxruntime.InferenceSession("model.onnx")
(logits,) = session.run(["logits"], {"images": images})  # float32, any number of images""",
    "torchscript": """\
import torch

model = torch.jit.load("model.torchscript")
logits = model(images)""",
    "exported": """\
import torch

model = torch.export.load("model.pt2").module()
logits = model(images)""",
}
NO_PROMISE = """\
RA and AA are what the attacks that were tried have left: a stronger one may find more. They hold
for this threat model and images like those that were measured, not for larger or other changes
(another norm, rotations, blur, patches), nor for other data.

{certified}"""
CERTIFIED = """\
CA is proven, but of the smoothed classifier, with noise of the stated sigma, and each claim may be
false with the small probability that `dat certify` was given."""
NOT_CERTIFIED = "Nothing here is proven: that is what `dat certify` is for."


def model_card(facts: Facts, formats: Sequence[str]) -> str:
    """Front matter, figures, what they do not promise, and how to load the model."""
    front = yaml.safe_dump(_front_matter(facts), sort_keys=False, allow_unicode=True)
    certified = any(it["name"] == "CA" for it in facts.figures)
    promise = NO_PROMISE.format(certified=CERTIFIED if certified else NOT_CERTIFIED)
    parts = [
        f"---\n{front}---",
        f"# {_title(facts)}",
        _about(facts),
        f"## Figures\n\n{_table(facts)}",
        f"## What the numbers do not promise\n\n{promise}",
        f"## Load it\n\n{_loading(facts, formats)}",
    ]
    return "\n\n".join(parts) + "\n"


def _front_matter(facts: Facts) -> dict[str, Any]:
    data = facts.training["data"]
    metrics = [
        {"type": "accuracy", "name": f"{it['name']} ({it['under']})", "value": it["value"]}
        for it in facts.figures
    ]
    result = {
        "task": {"type": "image-classification"},
        "dataset": {"name": data, "type": data},
        "metrics": metrics,
    }
    front: dict[str, Any] = {
        "library_name": "dat",
        "pipeline_tag": "image-classification",
        "tags": list(TAGS),
        "metrics": ["accuracy"],
    }
    if metrics:
        front["model-index"] = [{"name": _title(facts), "results": [result]}]
    return front


def _title(facts: Facts) -> str:
    method = facts.training.get("method", facts.training["recipe"])
    return f"{facts.network['model']['name']}, {method}, on {facts.training['data']}"


def _about(facts: Facts) -> str:
    channels, height, width = facts.shape
    told, threat = facts.training, facts.threat
    attack, optimizer = told["attack"]["name"], told["optimizer"]["name"]
    text = (
        f"Trained by DAT (distributed adversarial training) {facts.dat} with attack `{attack}` "
        f"(threat model: {threat['norm']}, eps {threat['eps']:.4g}, for pixels in [0, 1]), "
        f"objective `{told['objective']['name']}` and optimizer `{optimizer}`, "
        f"{told['train']['epochs']} epochs, batch {told['train']['batch']}, seed {told['seed']}; "
        f"the `{told['weights']}` weights.\n\n"
        f"It takes images of {channels} x {height} x {width} (channels, height, width) as floats "
        f"in [0, 1] and normalises them itself. It gives {facts.classes} logits"
    )
    if facts.smoothing:
        copies, sigma = facts.smoothing["copies"], facts.smoothing["sigma"]
        text += f", by the vote of {copies} noisy copies (sigma {sigma:g})"
    return f"{text}. `config.json` has every setting."


def _table(facts: Facts) -> str:
    if not facts.figures:
        return "These weights were not measured."
    rows = [
        f"| {it['name']} | {it['value']:.2f} | {it['under']} | {it['images']:,} |"
        for it in facts.figures
    ]
    header = ["| Figure | % | Under | Test images |", "| --- | --- | --- | --- |"]
    legend = "TA: accuracy on clean images. RA: under an attack. AA: under AutoAttack."
    if any(it["name"] == "CA" for it in facts.figures):
        legend += " CA: certified."
    return "\n".join([*header, *rows, "", legend])


def _loading(facts: Facts, formats: Sequence[str]) -> str:
    name = facts.network["model"]["name"]
    own = f", network={name!r}" if ":" in name else ""
    blocks = [CODE[it].replace("OWN", own) for it in dict.fromkeys(formats)]
    return "\n\n".join(f"```python\n{block}\n```" for block in blocks)
