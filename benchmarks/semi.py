"""Few labels and many images without: what the unlabelled ones are worth.

    python benchmarks/fashion.py fashion.npz
    python benchmarks/semi.py fashion.npz [--labels 300] [--seeds 3]

Fashion-MNIST with a few labels, the rest of 5,000 images without, eps 0.1. Labelled images only,
against pseudo-labels with the cross-entropy (Carmon et al.), against TRADES with and without
pseudo-labels (the latter is UAT's regularizer), with DAT-PGD and DAT-FGSM. All have the same number
of updates. It goes on with the results that there are.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from runs import RESULTS, dat, mean_and_spread, save, table, train

RECIPE = str(Path(__file__).with_name("methods.yaml"))
BOTH = ("data.unlabelled=rest", "data.epoch_by=both", "train.epochs=5", "train.select_every=5")
WAYS: dict[str, tuple[str, ...]] = {
    "labelled only, AT": (),
    "labelled only, TRADES": ("objective.name=trades",),
    "pseudo-labels, AT": (*BOTH, "PSEUDO"),
    "pseudo-labels, TRADES": (*BOTH, "PSEUDO", "objective.name=trades"),
    "no labels, TRADES (UAT)": (*BOTH, "objective.name=trades"),
}
ATTACKS = {"PGD": ("attack.steps=3",), "FGSM": ("attack.name=fgsm",)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--labels", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    kept = RESULTS / "semi.json"
    results: dict[str, dict[str, Any]] = json.loads(kept.read_text()) if kept.exists() else {}
    labels = f"data.labels={arguments.labels}"
    for seed in range(arguments.seeds):
        with tempfile.TemporaryDirectory() as folder:
            words = (f"data.name={arguments.data}", f"seed={seed}", "comm.threads=1", labels)
            # 282 labelled images give 2 batches an epoch, both sets 49: as many updates for all
            few = ("train.epochs=122", "train.select_every=61")
            pseudo = Path(folder) / "pseudo.npz"
            for attack, steps in ATTACKS.items():
                for way, settings in WAYS.items():
                    found = results.setdefault(f"{way}, {attack}", {})
                    if str(seed) in found:
                        continue
                    if "PSEUDO" in settings and not pseudo.exists():
                        _label(words, few, Path(folder))
                    own = [*words, *steps, *settings]
                    own += [] if BOTH[0] in settings else few
                    own = [f"data.pseudo_labels={pseudo}" if it == "PSEUDO" else it for it in own]
                    found[str(seed)] = train(RECIPE, *own)
                    _show(results)


def _label(words: tuple[str, ...], few: tuple[str, ...], folder: Path) -> None:
    """A base model by standard training, and what it takes the rest for."""
    base = [*words, *few, "attack.name=none", "train.select_by=ta", "--out", f"{folder}/base"]
    dat("train", RECIPE, *base)
    dat("label", f"{folder}/base", "--unlabelled", "rest", "--out", f"{folder}/pseudo.npz")


def _show(results: dict[str, dict[str, Any]]) -> None:
    rows = []
    for way in WAYS:
        cells, counts = [], set()
        for attack in ATTACKS:
            runs = list(results.get(f"{way}, {attack}", {}).values())
            counts.add(len(runs))
            for key in ("ta", "ra"):
                cells.append(mean_and_spread([run[key] for run in runs]) if runs else "")
        rows.append([f"{way} ({min(counts)})", *cells])
    names = [f"{attack}, {key} (%)" for attack in ("DAT-PGD", "DAT-FGSM") for key in ("TA", "RA")]
    save(Path(__file__), results, table(["Training (seeds)", *names], rows))


if __name__ == "__main__":
    main()
