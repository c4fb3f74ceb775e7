"""The commands, each a thin call into one function. torch is imported only when there is work."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dat.arguments import parse
from dat.launch import is_worker, launch

if TYPE_CHECKING:
    from dat.config import RunConfig
    from dat.finetune import Origin
    from dat.measure import Subject

STEPS = (1, 2, 5, 10, 20, 50, 100)

"""What a sweep goes over."""


def _train(arguments: argparse.Namespace, words: list[str]) -> int:
    from dat.config import parse_edits
    from dat.recipes import read

    config = read(arguments.recipe, parse_edits(arguments.settings))
    out = arguments.out or _free_folder(Path(arguments.recipe).stem)
    return _fit(arguments, words, config, arguments.recipe, out)


def _finetune(arguments: argparse.Namespace, words: list[str]) -> int:
    from dat.config import parse_edits
    from dat.recipes import read

    origin, recipe = _origin(arguments)
    edits = parse_edits(arguments.settings)
    config = read(recipe, origin.edits(edits))
    out = arguments.out or _free_folder(f"{Path(recipe).stem}-finetuned")
    if origin.run is not None and out.resolve() == Path(origin.name).resolve():
        raise ValueError(f"--out {out}: is the run to start from; choose another")
    given = "size" in edits.get("finetune", {})
    resolution = None if given else origin.resolution
    return _fit(arguments, words, config, recipe, out, resolution=resolution)


def _origin(arguments: argparse.Namespace) -> tuple[Origin, str]:
    """What to start from, and the recipe to train by."""
    from dat.arguments import WEIGHTS
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
    resolution: Callable[[], int | None] | None = None,
) -> int:
    """Train, on workers that are started if need be, and show the result."""
    if not is_worker():
        from dat.train.folder import RunFolder

        RunFolder.check(out, overwrite=arguments.overwrite)
    if _starts_workers(arguments):
        return launch(arguments.workers, [*words, "--out", str(out)])
    from dat.report import print_json, runs_table, warn
    from dat.training import train

    result = train(
        config,
        recipe,
        out,
        overwrite=arguments.overwrite,
        quiet=arguments.quiet,
        resolution=resolution,
    )
    if result is not None:
        if arguments.json:
            print_json(result)
        else:
            seen = result["collapses"] if arguments.quiet else []  # else it was said at once
            warn([*seen, *result["warnings"]])
            runs_table([result])
            print(f"\n{out}: best weights, metrics, TensorBoard events")
    return 0


def _evaluate(arguments: argparse.Namespace, words: list[str]) -> int:
    from dat.config import parse_edits

    settings = _settings(arguments)
    settings += [f"evaluate.attacks={arguments.attacks}"] if arguments.attacks else []
    subject = _subject(arguments, parse_edits(settings))
    folder = _kept_in(arguments, subject, "evaluations")
    if arguments.examples and folder is None:
        raise ValueError("--examples: needs a folder to keep them in, not --out none")
    if _starts_workers(arguments):
        return launch(arguments.workers, words)
    from dat.measure import measure
    from dat.report import show_measured

    found = measure(
        subject,
        folder,
        check=not arguments.no_checks,
        keep=arguments.examples,
        quiet=arguments.quiet,
    )
    if found is not None:
        show_measured(found, as_json=arguments.json)
    return 0


def _certify(arguments: argparse.Namespace, words: list[str]) -> int:
    from dat.config import parse_edits
    from dat.measure import Certification, certify_subject, own_sigma
    from dat.report import check_picture, show_certified, warn

    subject = _subject(arguments, parse_edits(_settings(arguments)))
    sigma = arguments.sigma if arguments.sigma is not None else own_sigma(subject)
    if sigma is None:
        raise ValueError("--sigma: this model was not trained with noise; say how much, e.g. 0.25")
    asked = Certification(
        sigma=sigma,
        seed=subject.config.seed,
        radii=arguments.radii,
        fixed=arguments.fixed or not arguments.radii,
        n0=arguments.n0,
        n=arguments.n,
        alpha=arguments.alpha,
        batch=arguments.batch,
    )
    if arguments.plot:
        check_picture(arguments.plot)
    if not is_worker():
        warn(asked.check())
    if _starts_workers(arguments):
        return launch(arguments.workers, words)
    folder = _kept_in(arguments, subject, "certificates")
    found = certify_subject(subject, asked, folder, quiet=arguments.quiet)
    if found is not None:
        show_certified(found, as_json=arguments.json, plot=arguments.plot)
    return 0


def _label(arguments: argparse.Namespace, words: list[str]) -> int:
    from dat.config import parse_edits
    from dat.measure import Subject

    if len(arguments.runs) != 1:
        raise ValueError("give the folder of one run, whose model labels the images")
    (run,) = arguments.runs
    edits = parse_edits(arguments.settings)
    subject = Subject.of_run(run, arguments.weights or "best", edits)
    if _starts_workers(arguments):
        return launch(arguments.workers, words)
    from dat.report import show_labelled
    from dat.selftrain import PSEUDO, label

    out = arguments.out or run / PSEUDO
    found = label(subject, arguments.unlabelled, out, quiet=arguments.quiet)
    if found is not None:
        show_labelled(found, as_json=arguments.json)
    return 0


def _selftrain(arguments: argparse.Namespace, words: list[str]) -> int:
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
    out = arguments.out or _free_folder(f"{Path(arguments.recipe).stem}-selftrain")
    options = [f"--{name}" for name in ("json", "quiet") if getattr(arguments, name)]
    options += ["--workers", str(arguments.workers)] if arguments.workers else []
    commands = stages(
        arguments.recipe, arguments.settings, config.data.unlabelled, arguments.base, out
    )
    for stage in commands:
        again = ["--overwrite"] * (arguments.overwrite and stage[0] == "train")
        full = [*stage, *options, *again]
        print(f"dat {' '.join(stage)}", file=sys.stderr)
        code = COMMANDS[stage[0]](parse(full), full)
        if code:
            return code
    return 0


def _settings(arguments: argparse.Namespace) -> list[str]:
    """Settings as they were given, and those that have an option of their own."""
    settings = list(arguments.settings)
    settings += [f"evaluate.images={arguments.images}"] if arguments.images else []
    if arguments.data and not arguments.model:
        settings.append(f"data.name={arguments.data}")
    return settings


def _subject(arguments: argparse.Namespace, edits: dict[str, Any]) -> Subject:
    """What is to be evaluated: a run, or a model of the user's."""
    from dat.measure import Subject

    if arguments.model:
        if arguments.runs:
            raise ValueError(f"{arguments.runs[0]}: give a run or --model, not both")
        if not arguments.data:
            raise ValueError("--model: also needs --data, the images to measure it on")
        weights = Path(arguments.weights) if arguments.weights else None
        return Subject.of_model(arguments.model, weights, arguments.data, edits)
    if len(arguments.runs) != 1:
        raise ValueError("give the folder of one run, or --model, --weights and --data")
    return Subject.of_run(arguments.runs[0], arguments.weights or "best", edits)


def _kept_in(arguments: argparse.Namespace, subject: Subject, kind: str) -> Path | None:
    """The folder for what is found; none if nothing is to be kept."""
    if arguments.out == "none":
        return None
    return Path(arguments.out) if arguments.out else subject.folder(kind)


def _sweep(arguments: argparse.Namespace, words: list[str]) -> int:
    from dat.config import parse_edits
    from dat.measure import Subject, default_eps, split_attack, sweep_all
    from dat.report import check_picture, show_sweep

    settings = list(arguments.settings)
    settings += [f"evaluate.images={arguments.images}"] if arguments.images else []
    edits = parse_edits(settings)
    if not arguments.runs:
        raise ValueError("give the folders of one or more runs")
    subjects = [Subject.of_run(run, arguments.weights, edits) for run in arguments.runs]
    attack, at_steps = split_attack(arguments.attack)
    if arguments.plot:
        check_picture(arguments.plot)
    eps, steps = _fractions(arguments.eps or ()), arguments.steps or ()
    if not eps and not steps:
        eps, steps = default_eps(subjects), STEPS
    if _starts_workers(arguments):
        return launch(arguments.workers, words)
    swept = sweep_all(
        subjects, eps=eps, steps=steps, attack=attack, at_steps=at_steps, quiet=arguments.quiet
    )
    if swept is not None:
        show_sweep(
            swept.curves,
            swept.warnings,
            attack=arguments.attack,
            as_json=arguments.json,
            plot=arguments.plot,
        )
    return 0


def _fractions(words: Sequence[str]) -> tuple[float, ...]:
    """Radii as people write them: 8/255."""
    from dat.threat import ThreatModel

    try:
        return tuple(ThreatModel.read({"eps": word}).eps for word in words)
    except ValueError as error:
        raise ValueError(f"--{error}") from None


def _compare(arguments: argparse.Namespace, words: list[str]) -> int:
    from dat.build import read_result
    from dat.report import print_json, runs_table

    if arguments.settings:
        raise ValueError(f"{arguments.settings[0]}: not the folder of a run")
    results = [read_result(run) for run in arguments.runs]
    print_json(results) if arguments.json else runs_table(results)
    return 0


def _recipes(arguments: argparse.Namespace, words: list[str]) -> int:
    from dat.recipes import names, read
    from dat.report import print_json, print_table

    found = {name: read(name).about for name in names()}
    if arguments.json:
        print_json([{"recipe": name, "about": about} for name, about in found.items()])
    else:
        print_table(["Recipe", "About"], [[name, about] for name, about in found.items()])
    return 0


def _config(arguments: argparse.Namespace, words: list[str]) -> int:
    from dat.config import parse_edits
    from dat.recipes import read
    from dat.report import print_json, print_table

    config = read(arguments.recipe, parse_edits(arguments.settings))
    if arguments.json:
        print_json([row._asdict() for row in config.rows()])
    else:
        headers = ["Setting", "Value", "Meaning", "Allowed"]
        print_table(headers, [list(row) for row in config.rows()])
    return 0


def _bench_comm(arguments: argparse.Namespace, words: list[str]) -> int:
    from dat.bench import CommPlan, bench_comm, measure_comm, show_comm
    from dat.report import check_picture

    names = ("model", "values", "bits", "protocols", "quantizer", "repeats", "threads")
    plan = CommPlan(**{name: getattr(arguments, name) for name in names})
    if arguments.plot:
        check_picture(arguments.plot)
    if is_worker() and arguments.link and not arguments.result:
        raise ValueError("--link: makes hosts on one machine; leave it out under a launcher")
    if is_worker():
        rows = measure_comm(plan, arguments.result)
    else:
        rows = bench_comm(plan, arguments.workers or 2, arguments.link, words)
    if rows:
        show_comm(rows, as_json=arguments.json, plot=arguments.plot)
    return 0


def _bench_quantizer(arguments: argparse.Namespace, words: list[str]) -> int:
    from dat.bench import bench_quantizer, show_quantizer
    from dat.report import check_picture

    if arguments.plot:
        check_picture(arguments.plot)
    rows = bench_quantizer(
        arguments.bits,
        arguments.quantizers,
        values=arguments.values,
        repeats=arguments.repeats,
        threads=arguments.threads,
    )
    show_quantizer(rows, as_json=arguments.json, plot=arguments.plot)
    return 0


def _starts_workers(arguments: argparse.Namespace) -> bool:
    """This process only starts others; under a launcher it is itself a worker."""
    if is_worker():
        world = int(os.environ["WORLD_SIZE"])
        if arguments.workers not in (None, world):
            raise ValueError(
                f"--workers {arguments.workers}: the launcher started {world}; leave --workers out"
            )
        return False
    return arguments.workers is not None and arguments.workers > 1


def _free_folder(name: str) -> Path:
    """runs/NAME, or the first of runs/NAME-2, runs/NAME-3, ... that is not there yet."""
    path, number = Path("runs") / name, 1
    while path.exists():
        number += 1
        path = Path("runs") / f"{name}-{number}"
    return path


COMMANDS: dict[str, Callable[[argparse.Namespace, list[str]], int]] = {
    "train": _train,
    "finetune": _finetune,
    "evaluate": _evaluate,
    "sweep": _sweep,
    "certify": _certify,
    "label": _label,
    "selftrain": _selftrain,
    "compare": _compare,
    "recipes": _recipes,
    "config": _config,
    "comm": _bench_comm,
    "quantizer": _bench_quantizer,
}
