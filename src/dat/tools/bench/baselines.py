"""The implementations that ours is compared with: named by `--against`, imported when needed."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from dat.core.settings import did_you_mean

BASELINES = {
    "attack": {
        "plain": "plain_loop",
        "torchattacks": "torchattacks_pgd",
        "foolbox": "foolbox_pgd",
        "art": "art_pgd",
    },
    "step": {"bare": "bare_step", "plain": "plain_step", "paper": "paper_step"},
    "optimizer": {
        "adamw": "torch_adamw",
        "sgd": "torch_sgd",
        "muon": "muon_optimizers",
        "timm": "timm_optimizers",
        "pytorch_optimizer": "pytorch_optimizers",
    },
    "evaluate": {"plain": "plain_loop"},
    "loader": {"dataloader": "dataloader", "dataloader-2": "dataloader_processes"},
    "startup": {
        "torch": "IMPORT_TORCH",
        "dat": "IMPORT_DAT",
        "help": "SHOW_HELP",
        "train": "FIRST_STEP",
    },
}
"""The names for `--against`, by benchmark, and what each stands for in the benchmark's module. They
are here so that they can be checked before torch is imported."""
PACKAGES = {"art": "adversarial-robustness-toolbox"}
"""The name to install, where it is not the name to import."""
OFFICIAL = (
    "official: the authors' code cannot be imported without CUDA and is not bundled; use paper, a "
    "step that follows their description"
)


def check_baselines(bench: str, names: Sequence[str]) -> None:
    for name in names:
        if name not in BASELINES[bench]:
            if name == "official":
                raise ValueError(OFFICIAL)
            raise ValueError(f"--against {name}: unknown{did_you_mean(name, BASELINES[bench])}")


def load_baselines(bench: str, names: Sequence[str]) -> dict[str, Any]:
    """The baselines with these names, in this order, from the benchmark's module."""
    check_baselines(bench, names)
    module = importlib.import_module(f"{__package__}.{bench}")
    return {name: getattr(module, BASELINES[bench][name]) for name in names}


def import_package(name: str) -> ModuleType:
    """Import a module of a baseline's package; if that fails, the error says what to install."""
    package = PACKAGES.get(name.partition(".")[0], name.partition(".")[0])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecations in their code
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name == name.partition(".")[0]:
            raise ValueError(
                f"--against: {package} is not installed; pip install {package}"
            ) from None
        raise ValueError(
            f"--against: {package} needs {error.name}, which is not installed; "
            f"pip install {error.name}"
        ) from None
    except Exception as error:  # a broken package, or one that does not support this torch
        reason = " ".join(str(error).split())
        raise ValueError(f"--against: {package} cannot be imported ({reason})") from None
