"""The commands, each a thin call into one function. torch is imported only when there is work."""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from dat.launch import is_worker, launch, settle_in

FAILED = 1
BAD_INPUT = 2
DIVERGED = 3
INTERRUPTED = 130
TRACEBACK = bool(os.environ.get("DAT_TRACEBACK"))
"""Set to see where an error came from."""

ABOUT = """\
Train image classifiers that withstand adversarial attack, on one machine or on many.

  dat train digits --workers 2                          a robust digit classifier, in a minute
  dat train digits attack.steps=5 optimizer.name=lars   the same with other settings
  dat train my.yaml --out runs/mine                     a recipe of your own
  torchrun --nnodes 6 --nproc-per-node 6 ... -m dat train RECIPE      the same on a cluster
"""


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run a command; bad input ends with one line on standard error and exit code 2."""
    words = list(sys.argv[1:] if argv is None else argv)
    settle_in()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # sockets warn, with pages of addresses
    arguments = _parse(words)
    try:
        code = arguments.run(arguments, words)
    except Exception as error:
        code = _fail(error)
    except KeyboardInterrupt:
        print("error: interrupted by SIGINT", file=sys.stderr)
        code = INTERRUPTED
    _leave(code)


def _leave(code: int) -> NoReturn:
    """End the process. A worker skips the interpreter's own ending: a thread of the process group
    that asks for the interpreter at that moment aborts it, and a finished run would look failed."""
    if is_worker():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _train(arguments: argparse.Namespace, words: list[str]) -> int:
    from dat.config import parse_edits
    from dat.recipes import read

    config = read(arguments.recipe, parse_edits(arguments.settings))
    out = arguments.out or _free_folder(Path(arguments.recipe).stem)
    if not is_worker():
        from dat.train.folder import RunFolder

        RunFolder.check(out, overwrite=arguments.overwrite)
    if _starts_workers(arguments):
        return launch(arguments.workers, [*words, "--out", str(out)])
    from dat.build import train
    from dat.report import print_json, runs_table

    result = train(
        config, arguments.recipe, out, overwrite=arguments.overwrite, quiet=arguments.quiet
    )
    if result is not None:
        if arguments.json:
            print_json(result)
        else:
            runs_table([result])
            print(f"\n{out}: best weights, metrics, TensorBoard events")
    return 0


def _evaluate(arguments: argparse.Namespace, words: list[str]) -> int:
    from dat.config import parse_edits

    edits = parse_edits(arguments.settings)
    from dat.build import measure, read_run

    read_run(arguments.run_folder, edits)
    if _starts_workers(arguments):
        return launch(arguments.workers, words)
    from dat.report import print_json, print_table

    found = measure(arguments.run_folder, arguments.weights, edits)
    if found is not None:
        if arguments.json:
            print_json(found)
        else:
            row = [found["run"], found["weights"], f"{found['ta']:.2f}", f"{found['ra']:.2f}"]
            note = f"RA: under {found['attack']}; {found['images']} test images."
            print_table(["Run", "Weights", "TA (%)", "RA (%)"], [row], note=note)
    return 0


def _compare(arguments: argparse.Namespace, words: list[str]) -> int:
    from dat.build import read_result
    from dat.report import print_json, runs_table

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


def _fail(error: Exception) -> int:
    """One line for what a user can mend; anything else is ours and keeps its traceback.

    What all workers know alike is said by the first one, and the others leave it the time to.
    """
    rank = int(os.environ.get("RANK", 0))
    told = is_lost(error) or isinstance(error, ValueError | OSError | ArithmeticError)
    if TRACEBACK or not told:
        traceback.print_exc()
        return FAILED
    if rank == getattr(error, "speaker", 0):
        print(f"error: {error}", file=sys.stderr)
    elif is_lost(error) or getattr(error, "everywhere", False):
        time.sleep(1)
    else:
        print(f"error: worker {rank}: {error}", file=sys.stderr)
    if is_lost(error):
        return FAILED
    return DIVERGED if isinstance(error, ArithmeticError) else BAD_INPUT


def is_lost(error: Exception) -> bool:
    """Another worker is gone. Its class is not imported here, as torch would come with it."""
    return hasattr(error, "speaker")


def _parse(words: list[str]) -> argparse.Namespace:
    """argparse stops filling a list at the first option; take the rest as well."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(words)
    options = [word for word in rest if word.startswith("-")]
    if options:
        parser.error(f"unknown option {options[0]}: see dat {words[0]} --help")
    if hasattr(arguments, "settings"):
        arguments.settings = [*arguments.settings, *rest]
    elif hasattr(arguments, "runs"):
        arguments.runs = [*arguments.runs, *map(Path, rest)]
    elif rest:
        parser.error(f"{rest[0]}: not expected here; see dat {words[0]} --help")
    return arguments


def _parser() -> argparse.ArgumentParser:
    parser = _teach(argparse.ArgumentParser(prog="dat"), ABOUT, "")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def add(name: str, run: Any, help: str, examples: str) -> argparse.ArgumentParser:
        command = _teach(commands.add_parser(name, help=help), f"{help}.", examples)
        command.add_argument("--json", action="store_true", help="print JSON instead of a table")
        command.set_defaults(run=run)
        return command

    _train_arguments(
        add(
            "train",
            _train,
            "train a model by a recipe, measure it, and leave a run's folder",
            "  dat train digits --workers 4 attack.steps=5 optimizer.name=lars\n"
            "  dat train digits threat.eps=0.2 seed=1 --out runs/stronger",
        )
    )
    _evaluate_arguments(
        add(
            "evaluate",
            _evaluate,
            "measure a finished run again, with its own or other settings",
            "  dat evaluate runs/digits --workers 2\n"
            "  dat evaluate runs/digits evaluate.steps=100 evaluate.restarts=5 threat.eps=0.1",
        )
    )
    compare = add(
        "compare",
        _compare,
        "show finished runs side by side",
        "  dat compare runs/standard runs/dat-pgd",
    )
    compare.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="runs' folders")
    add("recipes", _recipes, "list the built-in recipes", "  dat recipes --json")
    config = add(
        "config",
        _config,
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
            _bench_comm,
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
            _bench_quantizer,
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
    _workers_argument(train)
    train.add_argument("--out", type=Path, metavar="DIR", help="the run's folder (runs/RECIPE)")
    train.add_argument("--overwrite", action="store_true", help="replace the run in that folder")
    train.add_argument("--quiet", action="store_true", help="show no progress")


def _evaluate_arguments(evaluate: argparse.ArgumentParser) -> None:
    evaluate.add_argument("run_folder", type=Path, metavar="RUN", help="the run's folder")
    _settings_argument(evaluate)
    _workers_argument(evaluate)
    evaluate.add_argument(
        "--weights",
        default="best",
        choices=("best", "last", "ema-best", "ema-last"),
        help="which weights (best)",
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
