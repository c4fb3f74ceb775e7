"""`dat finetune`: train from pre-trained weights."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from dat.cli.arguments import Commands, weights_argument
from dat.cli.fit import fit, fit_arguments
from dat.cli.workers import free_folder
from dat.core.files import WEIGHTS

if TYPE_CHECKING:
    from dat.config.finetune import PretrainedModel


def add(commands: Commands) -> None:
    finetune = commands.add(
        "finetune",
        _finetune,
        "fine-tune a pre-trained model with a recipe and a new head",
        "  dat finetune runs/pretrained my.yaml train.epochs=3 --workers 2\n"
        "  dat finetune runs/pretrained my.yaml finetune.layers=head --weights ema-best\n"
        "  dat finetune runs/pretrained my.yaml finetune.size=64 finetune.decay=0.7\n"
        "  dat finetune --model timm/convnext_tiny my.yaml finetune.size=64\n"
        "  dat finetune --model mynets.small:Net --weights net.pt my.yaml finetune.size=224\n"
        "Images smaller than the pre-training images are upsampled inside the model, so attacks\n"
        "and threat.eps apply at the resolution of your images.",
    )
    finetune.add_argument(
        "mixed",
        nargs="+",
        metavar="RUN|RECIPE|key=value",
        help="the pre-trained run's folder; a built-in recipe or a .yaml file; settings",
    )
    weights_argument(finetune)
    finetune.add_argument(
        "--model",
        metavar="MODEL",
        help="a model instead of a run: timm/NAME, torchvision/NAME or hf/NAME, with the weights "
        "of the library; or package.module:factory",
    )
    fit_arguments(finetune, "runs/RECIPE-finetuned")


def _finetune(arguments: argparse.Namespace, argv: list[str]) -> int:
    from dat.config.recipes import read, user_settings
    from dat.config.schema import parse_edits

    origin, recipe = _origin(arguments)
    edits = parse_edits(arguments.settings)
    config = read(recipe, origin.edits(edits), trust=arguments.trust)
    out = arguments.out or free_folder(f"{Path(recipe).stem}-finetuned")
    if origin.run is not None and out.resolve() == Path(origin.name).resolve():
        raise ValueError(f"--out {out} is the pre-trained run: choose another folder")
    size_given = "size" in edits.get("finetune", {})
    if not arguments.trust:
        sized = size_given or config.finetune.size is not None
        origin.refuse_code(user_settings(recipe, edits), config.data.name, sized=sized)
    resolution = None if size_given else origin.resolution
    return fit(arguments, argv, config, recipe, out, resolution=resolution)


def _origin(arguments: argparse.Namespace) -> tuple[PretrainedModel, str]:
    """The model to start from, and the recipe to train with."""
    from dat.config.finetune import PretrainedModel
    from dat.config.runs import read_run
    from dat.models import is_library

    if arguments.model:
        if len(arguments.runs) != 1:
            raise ValueError("--model: specify exactly one recipe, and no run")
        if not arguments.weights and not is_library(arguments.model):
            raise ValueError("--model: requires --weights, the file to start from")
        file = Path(arguments.weights) if arguments.weights else None
        return PretrainedModel(arguments.model, file), str(arguments.runs[0])
    if len(arguments.runs) != 2:
        raise ValueError("specify a run folder and a recipe, or --model, --weights and a recipe")
    run, recipe = arguments.runs
    weights = arguments.weights or "best"
    file = run / f"{weights}.safetensors" if weights in WEIGHTS else Path(weights)
    _, config = read_run(run, trust=True)  # of its code only what is used is checked, later
    return PretrainedModel(str(run), file, config), str(recipe)
