"""Adversarial training with the Hugging Face Trainer.

    pip install transformers accelerate
    python examples/hf_trainer.py

Takes seconds on one CPU core; the network is built from a config, so nothing is downloaded. Attacks
need pixels in [0, 1]: set `do_normalize=False` in the image processor, and put the normalization
into the model instead (`dat.normalized`).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from transformers import (
    EvalPrediction,
    ResNetConfig,
    ResNetForImageClassification,
    Trainer,
    TrainingArguments,
)

import dat


def logits_of(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda images: model(pixel_values=images).logits


class RobustTrainer(Trainer):
    """Trains on adversarial examples. Evaluation also attacks: `compute_metrics` receives the
    logits of adversarial examples."""

    loss_is_scaled_for_ga = False  # the Trainer divides the mean loss by the accumulation steps

    def __init__(
        self,
        *words: Any,
        threat: dat.ThreatModel,
        attack: dat.Attack,
        objective: dat.Objective,
        **named: Any,
    ) -> None:
        super().__init__(*words, **named)
        self.threat: dat.ThreatModel = threat
        self.attack: dat.Attack = attack
        self.objective: dat.Objective = objective

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        # new random starts in each step and process
        seed = self.state.global_step * self.args.world_size + self.args.process_index
        x, y = inputs["pixel_values"], inputs["labels"]
        batch = dat.Batch.of(x, y, threat=self.threat, seed=seed)
        bare = self.accelerator.unwrap_model(model)  # no communication during the attack
        with dat.attack_mode(bare):
            phi = self.objective.phi(logits_of(bare), batch)
            x_adv = self.attack(phi, x, self.threat, batch.draws.fork("attack"))
        outcome = self.objective.loss(logits_of(model), batch, x_adv)
        loss = outcome.loss.mean()
        return (loss, {"logits": outcome.logits}) if return_outputs else loss


def robust_accuracy(prediction: EvalPrediction) -> dict[str, float]:
    correct = np.asarray(prediction.predictions).argmax(1) == prediction.label_ids
    return {"ra": 100 * float(correct.mean())}


def network() -> Any:
    config = ResNetConfig(
        num_channels=1,
        embedding_size=16,
        hidden_sizes=[32, 64],
        depths=[1, 1],
        layer_type="basic",
        id2label={label: str(label) for label in range(10)},
    )
    net: Any = ResNetForImageClassification(config)
    net.resnet.embedder.pooler = nn.Identity()  # digits have 8 x 8 pixels
    return net


def examples(x: Tensor, y: Tensor) -> list[dict[str, Any]]:
    """The items that a Hugging Face dataset yields."""
    return [
        {"pixel_values": image, "labels": int(label)} for image, label in zip(x, y, strict=True)
    ]


def load() -> tuple[Tensor, Tensor]:
    digits = load_digits()
    x = torch.from_numpy(digits.images).float().div(16).unsqueeze(1)  # pixels in [0, 1]
    return x, torch.from_numpy(digits.target)


def make_trainer(net: nn.Module, folder: str, epochs: float) -> RobustTrainer:
    x, y = load()
    return RobustTrainer(
        net,
        TrainingArguments(
            folder,
            num_train_epochs=epochs,
            per_device_train_batch_size=70,
            per_device_eval_batch_size=397,
            learning_rate=5e-3,
            lr_scheduler_type="cosine",
            use_cpu=True,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=examples(x[:1400], y[:1400]),
        eval_dataset=examples(x[1400:], y[1400:]),
        compute_metrics=robust_accuracy,
        threat=dat.ThreatModel(norm="linf", eps=0.1),
        attack=dat.PGD(steps=5),
        objective=dat.Adversarial(clean_weight=0.5),
    )


def main(epochs: int = 8) -> None:
    torch.manual_seed(0)
    net = network()
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(net, folder, epochs)
        trainer.train()
        print(f"the Trainer's evaluation: RA {trainer.evaluate()['eval_ra']:.1f} % under PGD-5")
    x, y = load()
    threat = trainer.threat
    found = dat.evaluate(net.eval(), (x[1400:], y[1400:]), threat=threat, attack=dat.PGD(steps=10))
    print(f"TA {found.ta:.1f} %, RA {found.ra:.1f} % under PGD-10, {threat.norm} {threat.eps}")


if __name__ == "__main__":
    main()
