"""Adversarial training in a custom loop, on all devices that Accelerate finds.

    pip install accelerate
    python examples/accelerate_loop.py
    ACCELERATE_USE_CPU=true torchrun --nproc-per-node 2 examples/accelerate_loop.py

Takes seconds on one CPU core. The attack runs on the unwrapped module, so the processes do not
communicate during the attack; the loss goes through the wrapped one, which averages gradients.
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import dat


def main(epochs: int = 8) -> None:
    accelerator = Accelerator()
    digits = load_digits()
    x = torch.from_numpy(digits.images).float().div(16).unsqueeze(1)  # pixels in [0, 1]
    y = torch.from_numpy(digits.target)
    order = torch.Generator().manual_seed(0)
    train = TensorDataset(x[:1400], y[:1400])
    loader = DataLoader(
        train, batch_size=140 // accelerator.num_processes, shuffle=True, generator=order
    )

    threat = dat.ThreatModel(norm="linf", eps=0.1)
    attack, objective = dat.PGD(steps=5), dat.Adversarial(clean_weight=0.5)
    net = dat.build_model("cnn", 10, channels=1, width=8)  # the same weights in every process
    optimizer = dat.LAMB(net.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    model, optimizer, loader = accelerator.prepare(net, optimizer, loader)

    bare, step = accelerator.unwrap_model(model), 0
    for _ in range(epochs):
        for images in loader:
            seed = step * accelerator.num_processes + accelerator.process_index
            batch = dat.Batch.of(*images, threat=threat, seed=seed)
            with dat.attack_mode(bare):
                phi = objective.phi(bare, batch)
                x_adv = attack(phi, batch.x, threat, batch.draws.fork("attack"))
            with accelerator.accumulate(model):  # steps once per gradient_accumulation_steps
                accelerator.backward(objective.loss(model, batch, x_adv).loss.mean())
                optimizer.step()
                optimizer.zero_grad()
            step += 1
        schedule.step()

    test = dat.ImageData.of(x[1400:], y[1400:])
    found = dat.evaluate(bare.eval(), test, threat=threat, attack=dat.PGD(steps=10))
    if accelerator.is_main_process:
        print(f"TA {found.ta:.1f} %, RA {found.ra:.1f} % under PGD-10, {threat.norm} {threat.eps}")
        print(f"processes: {accelerator.num_processes}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
