"""CERTIFY of Cohen et al. 2019, as published and at a fraction of its cost."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dat.attacks import attack_mode
from dat.core.files import atomic_write
from dat.core.precision import PRECISIONS
from dat.core.progress import Progress, reporting
from dat.core.rng import seeded
from dat.data import Data, ImageData, image_data
from dat.distributed import World
from dat.evaluation.certification.certificates import Certified, gather, read, write
from dat.evaluation.certification.plans import Adaptive, Fixed
from dat.evaluation.certification.sampler import NoiseSampler
from dat.evaluation.checks import check_logits
from dat.evaluation.progress_file import ProgressStore, fingerprint
from dat.evaluation.workers import world_of
from dat.models import adapted, fold

TABLE = "certified.tsv"


def certify(
    model: nn.Module,
    x: Tensor | Data,
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
    progress: Progress | bool = False,
) -> Certified:
    """Certify a classifier smoothed by noise of standard deviation `sigma`, on images in [0, 1].

    With `radii`, test for each radius whether the label is certified within it; this takes at most
    `n` samples and usually far fewer. Without `radii`, or if `fixed`, compute each image's radius
    from `n` samples for the class that `n0` other samples select. The default batch size is the
    fastest one measured. Under torchrun all workers call this with the same arguments, share the
    images, and get the same result; with a `folder`, an interrupted call can be resumed.
    `progress=True` draws a bar.
    """
    data = _data(x, y) if isinstance(x, Tensor) else image_data(x)
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
    store = None
    if folder is not None:
        about = {"sigma": sigma, "plan": repr(plan), "seed": seed, "precision": precision}
        about["device"] = world.device.type  # noise differs between device types
        store = _open_store(Path(folder), about, model, data, world)
    earlier = list(read(store)) if store else []
    remaining = torch.ones(len(data), dtype=torch.bool)
    remaining[[certificate.row for certificate in earlier]] = False
    rows = remaining.nonzero().squeeze(1).tolist()[world.rank :: world.size]
    certificates = list(earlier) if world.first else []
    world.barrier()  # every worker reads before any writes
    with reporting(progress, "certifying", show=world.first) as report:
        report(0, len(rows))
        for new in plan.certify(sampler, rows):
            certificates += new
            if store:
                write(store, new)
            report(len(certificates) - (len(earlier) if world.first else 0), len(rows))
    certified = gather(
        certificates, data.labels, plan.radii, world, network=note, batch=sampler.batch
    )
    if store and world.first:
        atomic_write(store.folder / TABLE, certified.table().encode())
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
) -> tuple[NoiseSampler, str]:
    """A sampler of the model, and a note on how the network was optimized."""
    if not 0 < sigma < float("inf"):
        raise ValueError(f"sigma = {sigma}: must be above 0")
    if not 0 < alpha < 0.5:
        raise ValueError(f"alpha = {alpha}: must be above 0 and below 0.5")
    if n < 1 or (batch is not None and batch < 1):
        raise ValueError(f"n = {n}, batch = {batch}: must be at least 1")
    if precision not in PRECISIONS:
        raise ValueError(f"precision = {precision!r}: must be one of {', '.join(PRECISIONS)}")
    x, _ = data.batch(torch.arange(min(len(data), 8)), world.device)
    model = adapted(model, x)
    with attack_mode(model), seeded(world.device, seed, "fold"), torch.no_grad():
        world.run_or_fail_together(lambda: check_logits(model, x, data.classes))
        classes = model(x).shape[1]
        folded = fold(model, torch.cat((x, x + sigma * torch.randn_like(x))))
    return (
        NoiseSampler(
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
    invalid = [r for r in radii if not 0 <= r < float("inf")]
    if invalid:
        raise ValueError(f"radii = {invalid[0]}: must be at least 0")
    if not fixed and not radii:
        raise ValueError("radii: the adaptive mode tests given radii; give at least one")
    if not fixed and not labelled:
        raise ValueError("y: the adaptive mode tests whether the label is certified; give labels")


def _open_store(
    folder: Path, about: dict[str, Any], model: nn.Module, data: ImageData, world: World
) -> ProgressStore:
    x, _ = data.batch(torch.arange(min(len(data), 8)), world.device)
    network = adapted(model, x)
    with attack_mode(network), seeded(world.device, 0, "answers"), torch.no_grad():
        about = about | fingerprint(model, data, network(x))
    key = hashlib.blake2b(json.dumps(about).encode(), digest_size=4).hexdigest()
    store = ProgressStore(folder / f"sigma-{about['sigma']:g}-{key}", about)
    store.open_shared(world)
    return store
