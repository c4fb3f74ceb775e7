"""What a page's Python takes for granted, and what must have come of it: a function a page each."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import dat
from dat.config.recipes import read
from dat.config.schema import parse_edits
from dat.core.threat import ThreatModel
from dat.data import load
from dat.distributed import Buckets, Ledger, Reducer
from dat.distributed.phases import PlannedBucket
from dat.distributed.wire_format import Slot
from dat.jobs.train import train
from dat.tools.planning import Cluster, NetworkLink

Names = dict[str, Any]


def linear() -> Names:
    """A classifier of three tiny images."""
    random = torch.Generator().manual_seed(0)
    return {
        "model": torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 5)),
        "x": torch.rand(3, 1, 4, 4, generator=random),
        "y": torch.tensor([0, 1, 4]),
    }


def communication() -> Names:
    first = torch.nn.Linear(5, 3)
    model = torch.nn.Sequential(first, torch.nn.BatchNorm1d(3))
    return {
        "model": model,
        "world": dat.World.join(),
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "batches": [(torch.randn(8, 5), torch.randint(3, (8,))) for _ in range(3)],
        "global_batch": 8,
        "before": first.weight.detach().clone(),
    }


def finetuning() -> Names:
    net = dat.build_model("preact-resnet18", 4, width=2)
    images = torch.rand(48, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    return {
        "net": net,
        "images": images,
        "data": dat.ImageData.of(images, torch.arange(48) % 10),
        "before": {name: value.clone() for name, value in net.state_dict().items()},
    }


def ecosystem() -> Names:
    """With a model that was exported."""
    folder = Path(tempfile.mkdtemp())
    run = folder / "run"
    words = ("model.width=2", "train.epochs=1", "train.batch=640", "attack.name=fgsm")
    edits = parse_edits((*words, "evaluate.attacks=pgd-1", "evaluate.report=0"))
    train(read("digits", edits), "digits", run, quiet=True)
    x, y = load("digits").test.batch(torch.arange(3), torch.device("cpu"))
    exported = folder / "exported"
    dat.export_run(run, out=exported)
    return {
        "folder": exported,
        "x": x,
        "y": y,
        "threat": dat.ThreatModel(),
        "attack": dat.FGSM(),
        "objective": dat.Adversarial(),
        "step": 0,
    }


def a_robust_model(names: Names) -> None:
    assert names["accuracy"].ta > 85
    assert names["accuracy"].ra > 50


def weights_moved(names: Names) -> None:
    assert not torch.equal(names["before"], names["model"][0].weight)
    assert names["losses"].shape == (1, 1) and names["losses"].isfinite().all()


def examples_within_the_ball(names: Names) -> None:
    assert len(names["result"].broken_by) == 3
    assert float((names["x_adv"] - names["x"]).abs().max()) <= 8 / 255 + 1e-6


def certificates(names: Names) -> None:
    assert isinstance(names["found"], dat.Certified) and names["found"].samples.max() <= 1000
    assert names["classes"].shape == (3,)


def only_some_layers_learnt(names: Names) -> None:
    net = names["net"]
    for name, value in net.state_dict().items():
        learns = name.startswith(("stages.3.", "linear."))
        assert torch.equal(value, names["before"][name]) is not learns, name
    assert net(names["images"].repeat(1, 3, 1, 1)).shape == (48, 10)


def parts_of_training(names: Names) -> None:
    """The attack attacks, and all of them train together."""
    x, threat = torch.rand(6, 1, 3, 3, generator=torch.Generator().manual_seed(0)), ThreatModel()

    def loss(images: torch.Tensor) -> torch.Tensor:
        return images.flatten(1).sum(1)

    few, many = (names["Noise"](tries=tries)(loss, x, threat) for tries in (1, 30))
    assert (threat.size(many, x) <= threat.eps + 1e-6).all()
    assert (loss(many) >= loss(few)).all()
    assert (loss(many) > loss(few)).any()
    folder = Path(tempfile.mkdtemp())
    layer = torch.nn.Linear(9, 2)
    before = layer.weight.detach().clone()
    options = names["OptionsWithClipping"].read({"clip": 1e-3})
    trainer = dat.Trainer(
        model=torch.nn.Sequential(torch.nn.Flatten(), layer),
        data=dat.ImageData.of(x, torch.arange(6) % 2),
        attack=names["Noise"](),
        objective=names["MarginAttacked"](),
        optimizer=names["NAdam"](),
        options=options,
        callbacks=[dat.Logged(folder, [names["CSV"]()])],
        epochs=1,
        batch=6,
    )
    trainer.fit()
    assert not torch.equal(before, layer.weight)
    signs = dat.LALR(layer.parameters(), names["Signs"](), lr=0.1)
    assert signs.param_groups[0]["momentum"] == 0.9
    signs.step()
    gradients = [it.grad.flatten() for it in layer.parameters() if it.grad is not None]
    assert 0 < float(torch.cat(gradients).norm()) <= 1e-3 + 1e-6
    assert "epoch,1,loss," in (folder / "figures.csv").read_text()


def a_protocol(names: Names) -> None:
    """On one worker, and as it is planned; on several it is tested once it is in the registry."""
    values = torch.linspace(-2, 2, 64)
    with dat.World.join(device="cpu", threads=1) as world:
        ledger = Ledger(world.device)
        reducer = Reducer(Buckets(), names["Half"](), world, length=64, ledger=ledger)
        total = reducer.sum(0, values.clone(), [Slot((8, 8), 0)]).wait()
        reducer.close()
    assert torch.equal(total, values.half().float())
    link = NetworkLink.named("1gbit")
    cluster = Cluster(nodes=3, link=link, inside=link)
    bucket = PlannedBucket((Slot((8, 8), 0),), Buckets(), cluster, lambda kernel, bits: 0.0)
    assert names["Half"]().phases(bucket).busiest == 2 * 2 * 2 * 64 // 3


def components(names: Names) -> None:
    parts_of_training(names)
    a_protocol(names)


def loaded(names: Names) -> None:
    assert names["logits"].shape == (3, 10)
    assert len(names["found"].broken_by) == 3
    assert names["loss"].isfinite()


PREPARED: dict[str, Callable[[], Names]] = {
    "docs/communication.md": communication,
    "docs/ecosystem.md": ecosystem,
    "docs/evaluation.md": linear,
    "docs/certification.md": linear,
    "docs/finetuning.md": finetuning,
    "docs/threats.md": linear,
}
CHECKED: dict[str, Callable[[Names], None]] = {
    "README.md": a_robust_model,
    "docs/communication.md": weights_moved,
    "docs/ecosystem.md": loaded,
    "docs/evaluation.md": examples_within_the_ball,
    "docs/certification.md": certificates,
    "docs/finetuning.md": only_some_layers_learnt,
    "docs/extending.md": components,
}
