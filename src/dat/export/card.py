"""README.md: the model card for model hubs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml

from dat.core.glossary import legend, plural
from dat.core.threat import show_radius
from dat.export.description import ModelDescription
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
(logits,) = session.run(["logits"], {"images": images})  # float32, any batch size""",
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
RA and AA are accuracies under the attacks named above; a stronger attack may find lower ones. They
hold for this threat model and for images like those tested, not for larger or other perturbations
(another norm, rotations, blur, patches), nor for other data.

{certified}"""
CERTIFIED = """\
CA is certified, but for the smoothed classifier with noise of the stated sigma, and each
certificate is false with the small probability passed to `dat certify`."""
NOT_CERTIFIED = "None of these figures is certified; `dat certify` gives certified accuracy."


def model_card(description: ModelDescription, formats: Sequence[str]) -> str:
    """Front matter, figures, their limits, and how to load the model."""
    front = yaml.safe_dump(_front_matter(description), sort_keys=False, allow_unicode=True)
    certified = any(figure["name"] == "CA" for figure in description.figures)
    limits = NO_PROMISE.format(certified=CERTIFIED if certified else NOT_CERTIFIED)
    sections = [
        f"---\n{front}---",
        f"# {_title(description)}",
        _about(description),
        f"## Figures\n\n{_table(description)}",
        f"## What the numbers do not promise\n\n{limits}",
        f"## Load it\n\n{_loading(description, formats)}",
    ]
    return "\n\n".join(sections) + "\n"


def _front_matter(description: ModelDescription) -> dict[str, Any]:
    data = description.training["data"]
    metrics = [
        {
            "type": "accuracy",
            "name": f"{figure['name']} ({figure['under']})",
            "value": figure["value"],
        }
        for figure in description.figures
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
        front["model-index"] = [{"name": _title(description), "results": [result]}]
    return front


def _title(description: ModelDescription) -> str:
    method = description.training.get("method", description.training["recipe"])
    return f"{description.network['model']['name']}, {method}, on {description.training['data']}"


def _about(description: ModelDescription) -> str:
    channels, height, width = description.shape
    training, threat = description.training, description.threat
    attack, optimizer = training["attack"]["name"], training["optimizer"]["name"]
    train = training["train"]
    text = (
        f"Trained by DAT (distributed adversarial training) {description.dat} with attack "
        f"`{attack}` (threat model: {threat['norm']}, eps {show_radius(threat['eps'])}, "
        f"for pixels in [0, 1]), "
        f"objective `{training['objective']['name']}` and optimizer `{optimizer}`, "
        f"{plural(train['epochs'], 'epoch')}, batch {train['batch']}, seed {training['seed']}; "
        f"the `{training['weights']}` weights.\n\n"
        f"It takes images of {channels} x {height} x {width} (channels, height, width) as floats "
        f"in [0, 1] and normalizes them itself. It returns {description.classes} logits"
    )
    if description.smoothing:
        copies, sigma = description.smoothing["copies"], description.smoothing["sigma"]
        text += f", by majority vote over {copies} noisy copies (sigma {sigma:g})"
    return f"{text}. `config.json` contains all settings."


def _table(description: ModelDescription) -> str:
    if not description.figures:
        return "These weights have not been evaluated."
    rows = [
        f"| {figure['name']} | {figure['value']:.2f} | {figure['under']} | {figure['images']:,} |"
        for figure in description.figures
    ]
    header = ["| Figure | % | Under | Test images |", "| --- | --- | --- | --- |"]
    names = [figure["name"] for figure in description.figures]
    return "\n".join([*header, *rows, "", legend(names)])


def _loading(description: ModelDescription, formats: Sequence[str]) -> str:
    name = description.network["model"]["name"]
    custom = f", network={name!r}" if ":" in name else ""
    blocks = [CODE[format_].replace("OWN", custom) for format_ in dict.fromkeys(formats)]
    return "\n\n".join(f"```python\n{block}\n```" for block in blocks)
