"""CERTIFY of Cohen et al. 2019, as it was published and at a fraction of its cost."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dat.attacks import attack_mode
from dat.certification.certificates import Certified, gather, read, write
from dat.certification.plans import Adaptive, Fixed
from dat.certification.sampler import Sampler
from dat.comm import World
from dat.data import ImageData
from dat.evaluation.accuracy import world_of
from dat.evaluation.checks import check_answers
from dat.evaluation.journal import Notebook, fingerprint
from dat.evaluation.survey import PRECISIONS, Progress, silent
from dat.files import write_whole
from dat.models import fold
from dat.rng import seeded

TABLE = "certified.tsv"


def certify(
    model: nn.Module,
    x: Tensor | ImageData,
    y: Tensor | None = None,
    *,
    sigma: float,
    radii: Sequence[float] = (),
    fixed: bool | None = None,
    n0: int = 100,
    n: int = 100_000,
    alpha: float = 0.001,
    batch: int | None = None,
    seed: int = 0,
    precision: str = "float32",
    folder: Path | str | None = None,
    world: World | None = None,
    progress: Progress = silent,
) -> Certified:
    """Certify a classifier, smoothed by noise of `sigma`, at images in [0, 1].

    With `radii`, it is asked for each of them whether the image is certified right within it, with
    at most `n` samples and mostly far fewer. Without, or if `fixed`, every image gets its radius
    from `n` samples for the class that `n0` others chose. The batch is measured unless it is given.
    Under torchrun all workers call it with the same arguments, share the images, and get the same
    result; with a `folder` an interrupted call goes on where it was.
    """
    data = x if isinstance(x, ImageData) else _data(x, y)
    world = world_of(model) if world is None else world
    if fixed is None:
        fixed = not radii
    _check(radii, fixed=fixed, n0=n0, labelled=data.has_labels)
    sampler, note = prepare(
        model,
        data,
        world,
        sigma=sigma,
        alpha=alpha,
        n=n,
        batch=batch,
        seed=seed,
        precision=precision,
    )
    plan = Fixed(n0, n, alpha) if fixed else Adaptive(tuple(sorted(set(radii))), n, alpha)
    notebook = None
    if folder is not None:
        about = {"sigma": sigma, "plan": repr(plan), "seed": seed, "precision": precision}
        about["device"] = world.device.type  # each draws its own noise
        notebook = _notebook(Path(folder), about, model, data, world)
    done = list(read(notebook)) if notebook else []
    left = torch.ones(len(data), dtype=torch.bool)
    left[[it.row for it in done]] = False
    mine = left.nonzero().squeeze(1).tolist()[world.rank :: world.size]
    found = list(done) if world.first else []
    world.meet()  # all have read before anybody writes
    progress(0, len(mine))
    for certificates in plan.work(sampler, mine):
        found += certificates
        if notebook:
            write(notebook, certificates)
        progress(len(found) - (len(done) if world.first else 0), len(mine))
    certified = gather(found, data.labels, plan.radii, world, network=note, batch=sampler.batch)
    if notebook and world.first:
        write_whole(notebook.folder / TABLE, certified.table().encode())
    return certified


def prepare(
    model: nn.Module,
    data: ImageData,
    world: World,
    *,
    sigma: float,
    alpha: float,
    n: int,
    batch: int | None = None,
    seed: int = 0,
    precision: str = "float32",
) -> tuple[Sampler, str]:
    """Something that samples the model, and what was done to make it fast."""
    if not 0 < sigma < float("inf"):
        raise ValueError(f"sigma = {sigma}: must be above 0")
    if not 0 < alpha < 0.5:
        raise ValueError(f"alpha = {alpha}: must be above 0 and below 0.5")
    if n < 1 or (batch is not None and batch < 1):
        raise ValueError(f"n = {n}, batch = {batch}: must be at least 1")
    if precision not in PRECISIONS:
        raise ValueError(f"precision = {precision!r}: must be one of {', '.join(PRECISIONS)}")
    x, _ = data.batch(torch.arange(min(len(data), 8)), world.device)
    with attack_mode(model), seeded(world.device, seed, "fold"), torch.no_grad():
        world.together(lambda: check_answers(model, x, data.classes))
        classes = model(x).shape[1]
        folded = fold(model, torch.cat((x, x + sigma * torch.randn_like(x))))
    return (
        Sampler(
            folded.network,
            data,
            sigma=sigma,
            classes=classes,
            device=world.device,
            seed=seed,
            precision=precision,
            batch=batch,
        ),
        folded.note,
    )


def _data(x: Tensor, y: Tensor | None) -> ImageData:
    labels = torch.zeros(len(x), dtype=torch.int64) if y is None else y.detach().cpu()
    data = ImageData.of(x.detach().cpu(), labels)
    return data.without_labels() if y is None else data


def _check(radii: Sequence[float], *, fixed: bool, n0: int, labelled: bool) -> None:
    if n0 < 1:
        raise ValueError(f"n0 = {n0}: must be at least 1")
    wrong = [r for r in radii if not 0 <= r < float("inf")]
    if wrong:
        raise ValueError(f"radii = {wrong[0]}: must be at least 0")
    if not fixed and not radii:
        raise ValueError("radii: the adaptive mode asks whether a radius is reached; name some")
    if not fixed and not labelled:
        raise ValueError("y: the adaptive mode asks whether a label is certified; give the labels")


def _notebook(
    folder: Path, about: dict[str, Any], model: nn.Module, data: ImageData, world: World
) -> Notebook:
    x, _ = data.batch(torch.arange(min(len(data), 8)), world.device)
    with attack_mode(model), seeded(world.device, 0, "answers"), torch.no_grad():
        about = about | fingerprint(model, data, model(x))
    key = hashlib.blake2b(json.dumps(about).encode(), digest_size=4).hexdigest()
    notebook = Notebook(folder / f"sigma-{about['sigma']:g}-{key}", about)
    notebook.shared(world)
    return notebook
