"""`dat reproduce`: the tables and figures of the paper."""

from __future__ import annotations

import argparse
from pathlib import Path

from dat.cli.arguments import Commands, positive_int, quiet_argument


def add(commands: Commands) -> None:
    reproduce = commands.add(
        "reproduce",
        _reproduce,
        "reproduce a table or figure of the paper",
        "  dat reproduce                       list the studies\n"
        "  dat reproduce table1                on this machine: real data, narrow networks\n"
        "  dat reproduce table1 --seeds 1 --jobs 2\n"
        "  dat reproduce theorem1              compare the bound with measurements\n"
        "  dat reproduce table1 --scale paper --dry-run     print the commands for a cluster\n"
        "Finished runs are not repeated: an interrupted study resumes.",
    )
    reproduce.add_argument(
        "study", nargs="?", metavar="STUDY", help="e.g. table1 (default: list all)"
    )
    reproduce.add_argument(
        "--scale",
        choices=("desk", "paper"),
        default="desk",
        help="scale of data, network and workers (default: desk)",
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
        default=Path("runs/reproduce"),
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
        "--dry-run", action="store_true", help="print the commands and write their recipes only"
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
    if arguments.dry_run:
        return _show_plan(arguments)
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


def _show_plan(arguments: argparse.Namespace) -> int:
    from dat.report import print_json, print_table
    from dat.tools.reproduce import StudyPlan, read_study

    study = read_study(arguments.study, arguments.scale)
    plan = StudyPlan(study, arguments.runs, arguments.seeds or study.seeds)
    runs = plan.listing()
    if arguments.json:
        print_json(runs)
        return 0
    print_table(
        ["Row", "Seed", "Done", "Command"],
        [[run["row"], run["seed"], "yes" if run["done"] else "", run["command"]] for run in runs],
        note="The recipes are written. A row that is tuned lists its tuning runs until they are "
        "finished, then its seeds.",
    )
    return 0


def _theorem(arguments: argparse.Namespace) -> int:
    from dat.report import print_json, print_table
    from dat.tools.reproduce import check_theorem

    results = check_theorem(arguments.out, seeds=arguments.seeds or 4, quiet=arguments.quiet)
    if arguments.json:
        print_json(results)
        return 0
    print_table(results["headers"], results["table"], note=results["note"])
    return 0
