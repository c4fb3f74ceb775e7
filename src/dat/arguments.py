"""The command line: every command's arguments, with help that teaches."""

from __future__ import annotations

import argparse
from pathlib import Path

WEIGHTS = ("best", "last", "ema-best", "ema-last")

ABOUT = """\
Train image classifiers that withstand adversarial attack, on one machine or on many.

  dat train digits --workers 2                          a robust digit classifier, in a minute
  dat train digits attack.steps=5 optimizer.name=lars   the same with other settings
  dat train my.yaml --out runs/mine                     a recipe of your own
  torchrun --nnodes 6 --nproc-per-node 6 ... -m dat train RECIPE      the same on a cluster
"""


def parse(words: list[str]) -> argparse.Namespace:
    """The arguments, with the command's name as `command`.

    argparse stops filling a list at the first option; the rest is taken as well.
    """
    parser = _parser()
    arguments, rest = parser.parse_known_args(words)
    options = [word for word in rest if word.startswith("-")]
    if options:
        parser.error(f"unknown option {options[0]}: see dat {words[0]} --help")
    if hasattr(arguments, "mixed"):
        _sort_out(arguments, rest)
    elif hasattr(arguments, "settings"):
        arguments.settings = [*arguments.settings, *rest]
    elif rest:
        parser.error(f"{rest[0]}: not expected here; see dat {words[0]} --help")
    return arguments


def _sort_out(arguments: argparse.Namespace, rest: list[str]) -> None:
    """Runs and settings may come in any order: a setting has an equals sign, and is no folder."""
    arguments.runs, arguments.settings = [], []
    for word in (*arguments.mixed, *rest):
        if "=" in word and not Path(word).is_dir():
            arguments.settings.append(word)
        else:
            arguments.runs.append(Path(word))


def _parser() -> argparse.ArgumentParser:
    parser = _teach(argparse.ArgumentParser(prog="dat"), ABOUT, "")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def add(name: str, help: str, examples: str) -> argparse.ArgumentParser:
        command = _teach(commands.add_parser(name, help=help), f"{help}.", examples)
        command.add_argument("--json", action="store_true", help="print JSON instead of a table")
        command.set_defaults(command=name)
        return command

    _train_arguments(
        add(
            "train",
            "train a model by a recipe, measure it, and leave a run's folder",
            "  dat train digits --workers 4 attack.steps=5 optimizer.name=lars\n"
            "  dat train digits threat.eps=0.2 seed=1 --out runs/stronger",
        )
    )
    _finetune_arguments(
        add(
            "finetune",
            "train by a recipe from pre-trained weights, with a new head",
            "  dat finetune runs/pretrained my.yaml train.epochs=3 --workers 2\n"
            "  dat finetune runs/pretrained my.yaml finetune.layers=head --weights ema-best\n"
            "  dat finetune runs/pretrained my.yaml finetune.size=64 finetune.decay=0.7\n"
            "  dat finetune --model mynets.small:Net --weights net.pt my.yaml finetune.size=224\n"
            "Images smaller than those of the pre-trained run are up-sampled inside the model:\n"
            "attacks and threat.eps stay in the pixels of your images.",
        )
    )
    _evaluate_arguments(
        add(
            "evaluate",
            "measure a run, or anybody's model, under attack",
            "  dat evaluate runs/digits --attacks clean,pgd-20,autoattack --workers 2\n"
            "  dat evaluate runs/digits --attacks pgd-100x5,cw-100 threat.eps=0.1\n"
            "  dat evaluate --model mynets.small:Net --weights net.pt --data images.npz \\\n"
            "      --attacks autoattack threat.eps=8/255\n"
            "An evaluation that was interrupted goes on where it was when it is started again.",
        )
    )
    _sweep_arguments(
        add(
            "sweep",
            "RA over eps and over the steps of the attack, for several runs",
            "  dat sweep runs/standard runs/digits --plot sweep.png\n"
            "  dat sweep runs/digits --eps 0,0.1,0.2,0.3 --attack cw-50 --workers 2",
        )
    )
    _certify_arguments(
        add(
            "certify",
            "prove robustness: certified accuracy (CA) of a smoothed classifier",
            "  dat certify runs/smooth --radii 0.05,0.1,0.15,0.2,0.3 --workers 2\n"
            "  dat certify runs/smooth --fixed --images 100 --plot ca.png\n"
            "  dat certify --model mynets.small:Net --weights net.pt --data images.npz "
            "--sigma 0.25 \\\n      --radii 0.25,0.5\n"
            "With --radii only whether each radius is reached is asked, which takes far fewer\n"
            "samples. A certification that was interrupted goes on when it is started again.",
        )
    )
    label = add(
        "label",
        "label images that have no labels by a run's model (pseudo-labels)",
        "  dat label runs/base --unlabelled pictures/ --out pseudo.npz\n"
        "  dat train my.yaml data.unlabelled=pictures/ data.pseudo_labels=pseudo.npz",
    )
    label.add_argument("mixed", nargs="+", metavar="RUN|key=value", help="a run's folder; settings")
    label.add_argument(
        "--unlabelled",
        metavar="WHAT",
        help="rest (what the run's data.labels left over), a folder of pictures, an .npy or .npz "
        "file, or a set (the run's data.unlabelled)",
    )
    label.add_argument("--weights", metavar="W", help=f"{', '.join(WEIGHTS)}, or a file (best)")
    label.add_argument("--out", type=Path, metavar="FILE", help="the file (RUN/pseudo.npz)")
    _workers_argument(label)
    label.add_argument("--quiet", action="store_true", help="show no progress")
    selftrain = add(
        "selftrain",
        "train a base model, label the unlabelled images by it, train robustly on both",
        "  dat selftrain digits data.labels=200 data.unlabelled=rest --workers 2\n"
        "  dat selftrain my.yaml data.unlabelled=pictures/ --base train.epochs=50",
    )
    _recipe_arguments(selftrain)
    selftrain.add_argument(
        "--base",
        action="append",
        default=[],
        metavar="key=value",
        help="a setting of the base model",
    )
    selftrain.add_argument("--out", type=Path, metavar="DIR", help="folder (runs/RECIPE-selftrain)")
    selftrain.add_argument("--overwrite", action="store_true", help="replace what is there")
    _workers_argument(selftrain)
    selftrain.add_argument("--quiet", action="store_true", help="show no progress")
    compare = add(
        "compare",
        "show finished runs side by side",
        "  dat compare runs/standard runs/dat-pgd",
    )
    compare.add_argument("mixed", nargs="+", metavar="RUN", help="runs' folders")
    add("recipes", "list the built-in recipes", "  dat recipes --json")
    config = add(
        "config",
        "show every setting of a recipe: value, meaning, allowed range",
        "  dat config digits\n  dat config digits optimizer.name=sgd",
    )
    _recipe_arguments(config)
    bench = commands.add_parser("bench", help="measure communication and quantizers")
    _teach(bench, "Measure on this machine what an exchange costs.", "")
    commands = bench.add_subparsers(metavar="WHAT", required=True)
    _bench_comm_arguments(
        add(
            "comm",
            "sum a gradient over workers by every protocol: seconds and bytes",
            "  dat bench comm --workers 4 --link 1gbit,10gbit,unshaped\n"
            "  dat bench comm --workers 6 --quantizer vector --bits 32,16,8 "
            "--protocols gather,server\n"
            "  torchrun --nnodes 6 ... -m dat bench comm       on a cluster of your own",
        )
    )
    _bench_quantizer_arguments(
        add(
            "quantizer",
            "encode and decode a gradient: speed beside a copy, size, noise",
            "  dat bench quantizer --bits 8,4,2\n  dat bench quantizer --plot speed.png",
        )
    )
    return parser


def _bench_comm_arguments(comm: argparse.ArgumentParser) -> None:
    _workers_argument(comm, usual=2)
    comm.add_argument("--model", default="resnet50", help="whose gradient (resnet50)")
    comm.add_argument("--values", type=_count, metavar="N", help="a gradient of N values instead")
    comm.add_argument("--bits", type=_counts, default=(32, 8, 4), help="e.g. 32,8,4")
    comm.add_argument(
        "--protocols",
        type=_words,
        default=("dense", "gather", "server", "chunked", "ring"),
        help="e.g. dense,chunked (all)",
    )
    comm.add_argument("--quantizer", default="bucket", help="bucket, tensor or vector (bucket)")
    comm.add_argument(
        "--link",
        type=_words,
        default=(),
        help="hosts of their own with such links: 100mbit, 1gbit, 2.5gbit, 10gbit, 25gbit, "
        "unshaped; several with commas; needs root (workers on the loopback interface)",
    )
    comm.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    _measuring_arguments(comm)


def _bench_quantizer_arguments(quantizer: argparse.ArgumentParser) -> None:
    quantizer.add_argument(
        "--values", type=_count, default=25_000_000, metavar="N", help="how many (25e6)"
    )
    quantizer.add_argument("--bits", type=_counts, default=(16, 8, 4, 3, 2), help="e.g. 8,4,2")
    quantizer.add_argument(
        "--quantizers",
        type=_words,
        default=("bucket", "tensor", "vector"),
        help="e.g. bucket,vector (all)",
    )
    _measuring_arguments(quantizer)


def _measuring_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=_positive, default=5, metavar="N", help="(5)")
    parser.add_argument("--threads", type=_positive, metavar="N", help="CPU threads a process")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw it: .png, .svg or .pdf")


def _train_arguments(train: argparse.ArgumentParser) -> None:
    _recipe_arguments(train)
    _fit_arguments(train, "runs/RECIPE")


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
    _workers_argument(parser)
    parser.add_argument("--out", type=Path, metavar="DIR", help=f"the run's folder ({usual})")
    parser.add_argument("--overwrite", action="store_true", help="replace the run in that folder")
    parser.add_argument("--quiet", action="store_true", help="show no progress")


def _evaluate_arguments(evaluate: argparse.ArgumentParser) -> None:
    evaluate.add_argument(
        "mixed", nargs="*", metavar="RUN|key=value", help="a run's folder; settings, threat.eps=0.1"
    )
    evaluate.add_argument(
        "--attacks",
        metavar="LIST",
        help="clean, fgsm, pgd-20, pgd-100x5 (five restarts), cw-20, pgd-dlr-20, apgd-ce, "
        "apgd-dlr, apgd-margin, apgd-t, fab-t, square, autoattack, autoattack-rand; several with "
        "commas (the run's own)",
    )
    _subject_arguments(evaluate)
    _images_argument(evaluate)
    _workers_argument(evaluate)
    evaluate.add_argument(
        "--out",
        metavar="DIR",
        help="where verdicts are kept, to go on after an interruption; none keeps nothing "
        "(RUN/evaluations)",
    )
    evaluate.add_argument("--examples", action="store_true", help="keep adversarial examples there")
    evaluate.add_argument(
        "--no-checks", action="store_true", help="do not look for signs of false robustness"
    )
    evaluate.add_argument("--quiet", action="store_true", help="show no progress")


def _sweep_arguments(sweep: argparse.ArgumentParser) -> None:
    sweep.add_argument("mixed", nargs="+", metavar="RUN|key=value", help="runs' folders; settings")
    sweep.add_argument("--eps", type=_words, metavar="LIST", help="e.g. 0,2/255,4/255,8/255")
    sweep.add_argument("--steps", type=_counts, metavar="LIST", help="e.g. 1,10,20,50,100")
    sweep.add_argument("--attack", default="pgd-20", help="pgd-20, cw-20, apgd-ce-20 (pgd-20)")
    sweep.add_argument(
        "--weights", default="best", choices=WEIGHTS, help="which weights of the runs (best)"
    )
    sweep.add_argument("--plot", type=Path, metavar="FILE", help="draw it: .png, .svg or .pdf")
    _images_argument(sweep)
    _workers_argument(sweep)
    sweep.add_argument("--quiet", action="store_true", help="show no progress")


def _certify_arguments(certify: argparse.ArgumentParser) -> None:
    certify.add_argument(
        "mixed", nargs="*", metavar="RUN|key=value", help="a run's folder; settings"
    )
    certify.add_argument(
        "--sigma", type=float, help="standard deviation of the noise (the run's objective.sigma)"
    )
    certify.add_argument(
        "--radii", type=_numbers, default=(), metavar="LIST", help="e.g. 0.05,0.1,0.15,0.2"
    )
    certify.add_argument(
        "--fixed", action="store_true", help="the whole radius, from n samples for every image"
    )
    certify.add_argument("--n", type=_count, default=100_000, help="samples at most (1e5)")
    certify.add_argument("--n0", type=_count, default=100, help="samples to choose the class (100)")
    certify.add_argument(
        "--alpha", type=float, default=0.001, help="chance of a false claim, for an image (0.001)"
    )
    certify.add_argument(
        "--batch", type=_positive, metavar="B", help="samples at a time (the fastest, measured)"
    )
    _subject_arguments(certify)
    _images_argument(certify)
    _workers_argument(certify)
    certify.add_argument(
        "--out",
        metavar="DIR",
        help="where certificates are kept, one line an image; none keeps nothing "
        "(RUN/certificates)",
    )
    certify.add_argument("--plot", type=Path, metavar="FILE", help="draw it: .png, .svg or .pdf")
    certify.add_argument("--quiet", action="store_true", help="show no progress")


def _subject_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--weights", metavar="W", help=f"{', '.join(WEIGHTS)}, or a file (a run's best)"
    )
    parser.add_argument("--model", metavar="M:F", help="instead of a run: package.module:factory")
    parser.add_argument("--data", metavar="NAME", help="a set, an .npz file, or package.module:f")


def _images_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--images", type=_positive, metavar="N", help="the first N test images (all)"
    )


def _teach(parser: argparse.ArgumentParser, about: str, examples: str) -> argparse.ArgumentParser:
    parser.description = about
    parser.epilog = f"examples:\n{examples}" if examples else None
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    return parser


def _recipe_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help="a built-in name or a .yaml file")
    _settings_argument(parser)


def _settings_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "settings", nargs="*", default=[], metavar="key=value", help="settings, e.g. attack.steps=5"
    )


def _workers_argument(parser: argparse.ArgumentParser, usual: int = 1) -> None:
    text = f"worker processes on this machine ({usual})"
    parser.add_argument("--workers", type=_positive, metavar="M", help=text)


def _words(text: str) -> tuple[str, ...]:
    return tuple(word for word in text.split(",") if word)


def _counts(text: str) -> tuple[int, ...]:
    return tuple(map(_positive, _words(text)))


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(map(float, _words(text)))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: must be numbers, with commas") from None


def _count(text: str) -> int:
    """A whole number that may be large: 25e6."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value.is_integer() or value < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number, at least 1")
    return int(value)


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number, at least 1")
    return int(text)
