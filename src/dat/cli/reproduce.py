"""`dat reproduce`: the tables and figures of the paper."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from dat.cli.arguments import Commands, positive_int, quiet_argument

if TYPE_CHECKING:
    from dat.tools.reproduce import Study

RUNS = Path("runs/reproduce")


def add(commands: Commands) -> None:
    reproduce = commands.add(
        "reproduce",
        _reproduce,
        "reproduce a table or figure of the paper",
        "  dat reproduce                       list the studies\n"
        "  dat reproduce table1                on this machine: real data, narrow networks\n"
        "  dat reproduce table1 --seeds 1 --jobs 2\n"
        "  dat reproduce theorem1              compare the bound with measurements\n"
        "  dat reproduce table1 --dry-run      what the rows differ in, and what they cost\n"
        "  dat reproduce table1 --scale paper  at the paper's scale: print commands for a cluster\n"
        "Finished runs are not repeated: an interrupted study resumes.",
    )
    reproduce.add_argument(
        "study", nargs="?", metavar="STUDY", help="e.g. table1 (default: list all)"
    )
    reproduce.add_argument(
        "--scale",
        choices=("desk", "paper"),
        default="desk",
        help="scale of data, network and workers (default: desk); paper prints commands for a "
        "cluster, unless this machine has enough GPUs",
    )
    reproduce.add_argument(
        "--seeds",
        type=positive_int,
        metavar="N",
        help="number of seeds (default: that of the study)",
    )
    reproduce.add_argument(
        "--jobs", type=positive_int, default=1, metavar="N", help="concurrent runs (default: 1)"
    )
    reproduce.add_argument(
        "--runs",
        type=Path,
        default=RUNS,
        metavar="DIR",
        help="folder of the runs (default: runs/reproduce)",
    )
    reproduce.add_argument(
        "--out",
        type=Path,
        default=Path("results"),
        metavar="DIR",
        help="folder for the results (default: results)",
    )
    reproduce.add_argument(
        "--dry-run",
        action="store_true",
        help="show what would be run and what it costs; only recipes are written",
    )
    quiet_argument(reproduce)


def _reproduce(arguments: argparse.Namespace, argv: list[str]) -> int:
    from dat.report import print_json, print_table
    from dat.tools.reproduce import THEOREM, read_study

    if arguments.study is None:
        return _list(arguments)
    if arguments.study == THEOREM:
        return _theorem(arguments)
    study = read_study(arguments.study, arguments.scale)
    if arguments.dry_run or _needs_cluster(arguments, study):
        return _show_plan(arguments, study)
    from dat.tools.reproduce import cells, headers, reproduce

    results = reproduce(
        study,
        seeds=arguments.seeds,
        runs=arguments.runs,
        out=arguments.out,
        at_once=arguments.jobs,
        quiet=arguments.quiet,
    )
    if arguments.json:
        print_json(results)
        return 0
    note = f"{results['note']}\nFull results: {arguments.out / study.name}"
    print_table(headers(study.columns), cells(results["rows"], study.columns), note=note)
    return 0


def _needs_cluster(arguments: argparse.Namespace, study: Study) -> bool:
    """Whether runs at the paper's scale are missing that need more GPUs than this machine has."""
    if arguments.scale != "paper":
        return False
    from dat.core import devices
    from dat.tools.reproduce import StudyPlan

    plan = StudyPlan(study, arguments.runs, arguments.seeds or study.seeds)
    gpus = len(list(devices.describe_devices()))
    return any(run.row.workers > gpus for run in plan.known_runs() if not run.done())


def _list(arguments: argparse.Namespace) -> int:
    from dat.report import print_json, print_table
    from dat.tools.reproduce import StudyPlan, names, read_study

    rows = []
    for name in names(arguments.scale):
        study = read_study(name, arguments.scale)
        plan = StudyPlan(study, arguments.runs, arguments.seeds or study.seeds)
        rows.append({"study": name, "runs": str(plan.count()), "title": study.title})
    if arguments.json:
        print_json(rows)
        return 0
    print_table(
        ["Study", "Runs", "Title"],
        [[row["study"], row["runs"], row["title"]] for row in rows],
        note="dat reproduce STUDY runs one; theorem1 needs no training runs",
    )
    return 0


def _show_plan(arguments: argparse.Namespace, study: Study) -> int:
    from dat.report import print_json, print_table
    from dat.tools.reproduce import StudyPlan
    from dat.tools.reproduce.launching import SLURM, TORCHRUN, slurm_lines, torchrun_lines
    from dat.tools.reproduce.outline import HEADERS, describe_cost, outline, outline_rows

    plan = StudyPlan(study, arguments.runs, arguments.seeds or study.seeds)
    about = outline(plan)
    if arguments.json:
        print_json(about | {"commands": plan.listing()})
        return 0
    print(f"{study.title}\n")
    print_table(HEADERS, outline_rows(about["rows"]))
    print("\n" + "\n".join(describe_cost(about["cost"], plan.seeds)))
    missing = [run for run in plan.known_runs() if not run.done()]
    for run in missing:
        run.prepare()
    if arguments.scale == "desk":
        print(f"The recipes are in {arguments.runs}; --json lists the command of each run.")
        return 0
    for introduction, lines in ((TORCHRUN, torchrun_lines), (SLURM, slurm_lines)):
        print(f"\n{introduction}")
        for run in missing:
            print("\n" + "\n".join(lines(run)))
    again = "these runs are finished, this lists what is left, or writes the table"
    print(f"\n# When {again}:\ndat reproduce {_words(arguments)}")
    return 0


def _words(arguments: argparse.Namespace) -> str:
    """The arguments of the command that collects the results."""
    words = [arguments.study, "--scale", arguments.scale]
    words += ["--seeds", str(arguments.seeds)] if arguments.seeds else []
    if arguments.runs != RUNS:
        words += ["--runs", str(arguments.runs)]
    return shlex.join(words)


def _theorem(arguments: argparse.Namespace) -> int:
    from dat.report import print_json, print_table
    from dat.tools.reproduce import check_theorem

    results = check_theorem(arguments.out, seeds=arguments.seeds or 4, quiet=arguments.quiet)
    if arguments.json:
        print_json(results)
        return 0
    print_table(results["headers"], results["table"], note=results["note"])
    return 0
