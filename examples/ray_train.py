"""Adversarial training under Ray Train: Ray starts the workers and their process group.

    pip install "ray[train]"
    python examples/ray_train.py

Two workers on CPU; takes about a minute, including Ray's startup. On a Ray cluster, set
`num_workers` and `use_gpu`. `dat.Trainer` joins Ray's process group, so it can quantize gradients,
and the result equals that of `dat train --workers 2`.
"""

from __future__ import annotations

import logging
import tempfile
from typing import Any

import ray
from ray import train
from ray.train.torch import TorchTrainer


def work(settings: dict[str, Any]) -> None:
    """Train and evaluate, on every worker."""
    import torch
    from sklearn.datasets import load_digits

    import dat

    digits = load_digits()
    x = torch.from_numpy(digits.images).float().div(16).unsqueeze(1)  # pixels in [0, 1]
    y = torch.from_numpy(digits.target)
    threat = dat.ThreatModel(norm="linf", eps=0.1)
    torch.manual_seed(0)  # the same weights on every worker
    trainer = dat.Trainer(
        model=dat.build_model("cnn", 10, channels=1, width=8),
        data=dat.ImageData.of(x[:1400], y[:1400]),
        threat=threat,
        attack=dat.PGD(steps=5),
        objective=dat.Adversarial(clean_weight=0.5),
        optimizer=dat.LAMB(lr=0.05),
        schedule=dat.Cosine(),
        exchange=dat.GradientExchange(quantizer=dat.Buckets(bits=8)),
        epochs=settings["epochs"],
        batch=140,
        world=dat.World.join(device="cpu", threads=1),
    )
    trainer.fit()
    test = dat.ImageData.of(x[1400:], y[1400:])
    found = dat.evaluate(trainer.model, test, threat=threat, attack=dat.PGD(steps=10))
    weights = sum(float(it.detach().double().abs().sum()) for it in trainer.model.parameters())
    all_weights = trainer.world.gather(torch.tensor(weights, dtype=torch.float64)).tolist()
    metrics = {"ta": found.ta, "ra": found.ra, "workers": trainer.world.size}
    metrics["replicas"] = len(set(all_weights))
    with tempfile.TemporaryDirectory() as folder:  # Ray keeps metrics with a checkpoint
        torch.save(trainer.model.state_dict(), f"{folder}/model.pt")
        saved = train.Checkpoint.from_directory(folder) if trainer.world.first else None
        train.report(metrics, checkpoint=saved)


def main(epochs: int = 8) -> None:
    ray.init(num_cpus=2, include_dashboard=False, logging_level=logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        found = (
            TorchTrainer(
                work,
                train_loop_config={"epochs": epochs},
                scaling_config=train.ScalingConfig(num_workers=2, use_gpu=False),
                run_config=train.RunConfig(storage_path=folder),
            )
            .fit()
            .metrics
        )
    assert found is not None
    print(f"TA {found['ta']:.1f} %, RA {found['ra']:.1f} % under PGD-10, linf 0.1")
    print(f"workers: {found['workers']}, different replicas: {found['replicas']}")
    ray.shutdown()


if __name__ == "__main__":
    main()
