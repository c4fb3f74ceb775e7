"""Adversarial training inside a LightningModule: the attack, objective and optimizer are DAT's.

    pip install lightning
    python examples/lightning_module.py

Takes seconds on one CPU core. Lightning moves data, counts epochs and calls the optimizer; under
its DDP strategy it averages gradients, and `training_step` stays the same. Validation also attacks.
"""

from __future__ import annotations

from typing import Any

import lightning
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dat


class Robust(lightning.LightningModule):
    """Trains any classifier of images in [0, 1] to withstand a threat model."""

    def __init__(self, model: nn.Module, threat: dat.ThreatModel) -> None:
        super().__init__()
        self.model, self.threat = model, threat
        self.attack = dat.PGD(steps=5)
        self.objective = dat.Adversarial(clean_weight=0.5)

    def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> Tensor:
        # new random starts in each step and process
        seed = self.global_step * self.trainer.world_size + self.global_rank
        images = dat.Batch.of(*batch, threat=self.threat, seed=seed)
        with dat.attack_mode(self.model):  # BN in eval mode
            phi = self.objective.phi(self.model, images)
            x_adv = self.attack(phi, images.x, self.threat, images.draws.fork("attack"))
        return self.objective.loss(self.model, images, x_adv).loss.mean()

    def validation_step(self, batch: tuple[Tensor, Tensor], number: int) -> None:
        """`Trainer.validate` calls this in inference mode; attacks leave that mode themselves."""
        x, y = batch
        x_adv = dat.PGD(steps=10)(dat.AttackTarget(self.model, y), x, self.threat)
        for name, images in {"ta": x, "ra": x_adv}.items():
            correct = (self.model(images).argmax(1) == y).float().mean()
            self.log(name, 100 * correct, sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = dat.LAMB(self.model.parameters(), lr=0.05)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main() -> None:
    lightning.seed_everything(0, verbose=False)
    digits = load_digits()
    x = torch.from_numpy(digits.images).float().div(16).unsqueeze(1)  # pixels in [0, 1]
    y = torch.from_numpy(digits.target)
    loader = DataLoader(TensorDataset(x[:1400], y[:1400]), batch_size=140, shuffle=True)
    validation = DataLoader(TensorDataset(x[1400:], y[1400:]), batch_size=140)

    threat = dat.ThreatModel(norm="linf", eps=0.1)
    module = Robust(dat.build_model("cnn", 10, channels=1, width=8), threat)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=8,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader, validation)
    last = trainer.callback_metrics
    print(f"Lightning's validation: TA {last['ta']:.1f} %, RA {last['ra']:.1f} %")

    test = dat.ImageData.of(x[1400:], y[1400:])
    found = dat.evaluate(module.model.eval(), test, threat=threat, attack=dat.PGD(steps=10))
    print(f"TA {found.ta:.1f} %, RA {found.ra:.1f} % under PGD-10, {threat.norm} {threat.eps}")


if __name__ == "__main__":
    main()
