"""Commands that train."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from dat.commands.arguments import Commands, quiet_argument, recipe_arguments, workers_argument
from dat.commands.starting import free_folder, goes_on, starts_workers
from dat.files import WEIGHTS, log_file
from dat.launch import is_worker, launch

if TYPE_CHECKING:
    from dat.config import RunConfig
    from dat.finetune import Origin


def add(commands: Commands) -> None:
    _train_arguments(
        commands.add(
            "train",
            _train,
            "train a model by a recipe, measure it, and leave a run's folder",
            "  dat train digits --workers 4 attack.steps=5 optimizer.name=lars\n"
            "  dat train digits threat.eps=0.2 seed=1 --out runs/stronger",
        )
    )
    _finetune_arguments(
        commands.add(
            "finetune",
            _finetune,
            "train by a recipe from pre-trained weights, with a new head",
            "  dat finetune runs/pretrained my.yaml train.epochs=3 --workers 2\n"
            "  dat finetune runs/pretrained my.yaml finetune.layers=head --weights ema-best\n"
            "  dat finetune runs/pretrained my.yaml finetune.size=64 finetune.decay=0.7\n"
            "  dat finetune --model mynets.small:Net --weights net.pt my.yaml finetune.size=224\n"
            "Images smaller than those of the pre-trained run are up-sampled inside the model:\n"
            "attacks and threat.eps stay in the pixels of your images.",
        )
    )
    _label_arguments(
        commands.add(
            "label",
            _label,
            "label images that have no labels by a run's model (pseudo-labels)",
            "  dat label runs/base --unlabelled pictures/ --out pseudo.npz\n"
            "  dat train my.yaml data.unlabelled=pictures/ data.pseudo_labels=pseudo.npz",
        )
    )
    _selftrain_arguments(
        commands.add(
            "selftrain",
            _selftrain,
            "train a base model, label the unlabelled images by it, train robustly on both",
            "  dat selftrain digits data.labels=200 data.unlabelled=rest --workers 2\n"
            "  dat selftrain my.yaml data.unlabelled=pictures/ --base train.epochs=50",
        )
    )


def _train_arguments(train: argparse.ArgumentParser) -> None:
    recipe_arguments(train, optional=True)
    _fit_arguments(train, "runs/RECIPE")
    train.add_argument(
        "--resume", type=Path, metavar="RUN", help="go on with a run that was interrupted"
    )


def _finetune_arguments(finetune: argparse.ArgumentParser) -> None:
    finetune.add_argument(
        "mixed",
        nargs="+",
        metavar="RUN|RECIPE|key=value",
        help="the pre-trained run's folder; a built-in name or a .yaml file; settings",
    )
    finetune.add_argument(
        "--weights", metavar="W", help=f"{', '.join(WEIGHTS)}, or a file (the run's best)"
    )
    finetune.add_argument("--model", metavar="M:F", help="instead of RUN: package.module:factory")
    _fit_arguments(finetune, "runs/RECIPE-finetuned")


def _fit_arguments(parser: argparse.ArgumentParser, usual: str) -> None:
    workers_argument(parser)
    parser.add_argument("--out", type=Path, metavar="DIR", help=f"the run's folder ({usual})")
    parser.add_argument("--overwrite", action="store_true", help="replace the run in that folder")
    parser.add_argument(
        "--restarts",
        type=int,
        default=3,
        metavar="N",
        help="when a worker dies, go on from the last checkpoint so often (3)",
    )
    parser.add_argument("--quiet", action="store_true", help="show no progress")


def _label_arguments(label: argparse.ArgumentParser) -> None:
    label.add_argument("mixed", nargs="+", metavar="RUN|key=value", help="a run's folder; settings")
    label.add_argument(
        "--unlabelled",
        metavar="WHAT",
        help="rest (what the run's data.labels left over), a folder of pictures, an .npy or .npz "
        "file, or a set (the run's data.unlabelled)",
    )
    label.add_argument("--weights", metavar="W", help=f"{', '.join(WEIGHTS)}, or a file (best)")
    label.add_argument("--out", type=Path, metavar="FILE", help="the file (RUN/pseudo.npz)")
    workers_argument(label)
    quiet_argument(label)


def _selftrain_arguments(selftrain: argparse.ArgumentParser) -> None:
    recipe_arguments(selftrain)
    selftrain.add_argument(
        "--base",
        action="append",
        default=[],
        metavar="key=value",
        help="a setting of the base model",
    )
    selftrain.add_argument("--out", type=Path, metavar="DIR", help="folder (runs/RECIPE-selftrain)")
    selftrain.add_argument("--overwrite", action="store_true", help="replace what is there")
    workers_argument(selftrain)
    quiet_argument(selftrain)


def _train(arguments: argparse.Namespace, words: list[str]) -> int:
    if arguments.resume:
        return _resume(arguments, words)
    if not arguments.recipe:
        raise ValueError("give a recipe (dat recipes), or --resume and the folder of a run")
    from dat.config import parse_edits
    from dat.recipes import read

    config = read(arguments.recipe, parse_edits(arguments.settings))
    out = arguments.out or free_folder(Path(arguments.recipe).stem)
    return _fit(arguments, words, config, arguments.recipe, out)


def _resume(arguments: argparse.Namespace, words: list[str]) -> int:
    """Go on with a run, with the settings that it has; only where it runs may differ."""
    from dat.build import read_run
    from dat.config import parse_edits

    given = [it for it in (arguments.recipe, *arguments.settings) if it]
    other = [it for it in given if not it.startswith("comm.")]
    if other or arguments.out:
        raise ValueError(
            f"{other[0] if other else '--out'}: a run is resumed as it was; only comm.* and "
            "--workers may be given"
        )
    recipe, config = read_run(arguments.resume, parse_edits(given))
    return _fit(arguments, words, config, recipe, arguments.resume, resume=True)


def _finetune(arguments: argparse.Namespace, words: list[str]) -> int:
    from dat.config import parse_edits
    from dat.recipes import read

    origin, recipe = _origin(arguments)
    edits = parse_edits(arguments.settings)
    config = read(recipe, origin.edits(edits))
    out = arguments.out or free_folder(f"{Path(recipe).stem}-finetuned")
    if origin.run is not None and out.resolve() == Path(origin.name).resolve():
        raise ValueError(f"--out {out}: is the run to start from; choose another")
    given = "size" in edits.get("finetune", {})
    resolution = None if given else origin.resolution
    return _fit(arguments, words, config, recipe, out, resolution=resolution)


def _origin(arguments: argparse.Namespace) -> tuple[Origin, str]:
    """What to start from, and the recipe to train by."""
    from dat.build import read_run
    from dat.finetune import Origin

    if arguments.model:
        if len(arguments.runs) != 1:
            raise ValueError("--model: give one recipe beside it, and no run")
        if not arguments.weights:
            raise ValueError("--model: also needs --weights, the file to start from")
        return Origin(arguments.model, Path(arguments.weights)), str(arguments.runs[0])
    if len(arguments.runs) != 2:
        raise ValueError("give the folder of a run and a recipe, or --model, --weights and one")
    run, recipe = arguments.runs
    weights = arguments.weights or "best"
    file = run / f"{weights}.safetensors" if weights in WEIGHTS else Path(weights)
    return Origin(str(run), file, read_run(run)[1]), str(recipe)


def _fit(
    arguments: argparse.Namespace,
    words: list[str],
    config: RunConfig,
    recipe: str,
    out: Path,
    *,
    resume: bool = False,
    resolution: Callable[[], int | None] | None = None,
) -> int:
    """Train, on workers that are started if need be, and show the result."""
    again = is_worker() and goes_on(out)
    if not is_worker() and not resume:
        from dat.train.folder import RunFolder

        RunFolder.check(out, overwrite=arguments.overwrite)
    if starts_workers(arguments):
        place = [] if resume else ["--out", str(out)]

        def hint() -> str:
            saved = any((out / "checkpoints").glob("[0-9]*"))
            return f"go on with: dat train --resume {out}" if saved else ""

        return launch(
            arguments.workers,
            [*words, *place],
            restarts=arguments.restarts,
            log=partial(log_file, out),
            hint=hint,
        )
    from dat.report import print_json, runs_table, warn
    from dat.train.checkpoint import has_checkpoint
    from dat.training import train

    result = train(
        config,
        recipe,
        out,
        overwrite=arguments.overwrite or again,
        quiet=arguments.quiet,
        resume=resume or (again and has_checkpoint(out)),
        resolution=resolution,
    )
    if result is not None:
        if arguments.json:
            print_json(result)
        else:
            seen = result["collapses"] if arguments.quiet else []  # else it was said at once
            warn([*seen, *result["warnings"]])
            runs_table([result])
            events = ", TensorBoard events" if "tensorboard" in config.train.log else ""
            print(f"\n{out}: best weights, metrics{events}")
            if (out / "report.html").is_file():
                print(f"{out / 'report.html'}: all of it, to look at")
    return 0


def _label(arguments: argparse.Namespace, words: list[str]) -> int:
    from dat.config import parse_edits
    from dat.measure import Subject

    if len(arguments.runs) != 1:
        raise ValueError("give the folder of one run, whose model labels the images")
    (run,) = arguments.runs
    edits = parse_edits(arguments.settings)
    subject = Subject.of_run(run, arguments.weights or "best", edits)
    if starts_workers(arguments):
        return launch(arguments.workers, words)
    from dat.report import show_labelled
    from dat.selftrain import PSEUDO, label

    out = arguments.out or run / PSEUDO
    found = label(subject, arguments.unlabelled, out, quiet=arguments.quiet)
    if found is not None:
        show_labelled(found, as_json=arguments.json)
    return 0


def _selftrain(arguments: argparse.Namespace, words: list[str]) -> int:
    from dat.commands import parse
    from dat.config import parse_edits
    from dat.recipes import read
    from dat.selftrain import stages

    config = read(arguments.recipe, parse_edits(arguments.settings))
    if config.data.unlabelled is None:
        raise ValueError("data.unlabelled: which images are to be labelled? e.g. rest, or a folder")
    if is_worker():
        raise ValueError(
            "selftrain starts its own workers; under a launcher call dat train, dat label and "
            "dat train, one after the other"
        )
    out = arguments.out or free_folder(f"{Path(arguments.recipe).stem}-selftrain")
    options = [f"--{name}" for name in ("json", "quiet") if getattr(arguments, name)]
    options += ["--workers", str(arguments.workers)] if arguments.workers else []
    commands = stages(
        arguments.recipe, arguments.settings, config.data.unlabelled, arguments.base, out
    )
    for stage in commands:
        again = ["--overwrite"] * (arguments.overwrite and stage[0] == "train")
        full = [*stage, *options, *again]
        print(f"dat {' '.join(stage)}", file=sys.stderr)
        parsed = parse(full)
        code = int(parsed.run(parsed, full))
        if code:
            return code
    return 0
