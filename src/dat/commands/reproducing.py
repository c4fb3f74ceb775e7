"""The command that makes the paper's tables and figures."""

from __future__ import annotations

import argparse
from pathlib import Path

from dat.commands.arguments import Commands, positive, quiet_argument


def add(commands: Commands) -> None:
    reproduce = commands.add(
        "reproduce",
        _reproduce,
        "a table or figure of the paper, run by run",
        "  dat reproduce                       what there is, and what is done\n"
        "  dat reproduce table1                on this machine: real data, narrow networks\n"
        "  dat reproduce table1 --seeds 1 --jobs 2\n"
        "  dat reproduce theorem1              the bound beside what is measured\n"
        "  dat reproduce table1 --scale paper --dry-run     the commands for a cluster\n"
        "What is done is not run again: a study that was interrupted goes on.",
    )
    reproduce.add_argument("study", nargs="?", metavar="STUDY", help="e.g. table1; none lists all")
    reproduce.add_argument(
        "--scale",
        choices=("desk", "paper"),
        default="desk",
        help="of data, network, workers (desk)",
    )
    reproduce.add_argument("--seeds", type=positive, metavar="N", help="(the study's own)")
    reproduce.add_argument("--jobs", type=positive, default=1, metavar="N", help="runs at once (1)")
    reproduce.add_argument(
        "--runs", type=Path, default=Path("runs/reproduce"), metavar="DIR",
        help="where the runs lie (runs/reproduce)",
    )  # fmt: skip
    reproduce.add_argument(
        "--out", type=Path, default=Path("results"), metavar="DIR", help="(results)"
    )
    reproduce.add_argument(
        "--dry-run", action="store_true", help="show what would be run, and write its recipes"
    )
    quiet_argument(reproduce)


def _reproduce(arguments: argparse.Namespace, words: list[str]) -> int:
    from dat.report import print_json, print_table
    from dat.reproduce import THEOREM, cells, headers, read_study, reproduce

    if arguments.study is None:
        return _list(arguments)
    if arguments.study == THEOREM:
        return _theorem(arguments)
    study = read_study(arguments.study, arguments.scale)
    if arguments.dry_run:
        return _show_plan(arguments)
    found = reproduce(
        study,
        seeds=arguments.seeds,
        runs=arguments.runs,
        out=arguments.out,
        at_once=arguments.jobs,
        quiet=arguments.quiet,
    )
    if arguments.json:
        print_json(found)
        return 0
    note = f"{found['note']}\nAll of it is in {arguments.out / study.name}."
    print_table(headers(study.columns), cells(found["rows"], study.columns), note=note)
    return 0


def _list(arguments: argparse.Namespace) -> int:
    from dat.report import print_json, print_table
    from dat.reproduce import Plan, names, read_study

    rows = []
    for name in names(arguments.scale):
        study = read_study(name, arguments.scale)
        plan = Plan(study, arguments.runs, arguments.seeds or study.seeds)
        rows.append({"study": name, "runs": str(plan.count()), "title": study.title})
    if arguments.json:
        print_json(rows)
        return 0
    print_table(
        ["Study", "Runs", "What"], [[row["study"], row["runs"], row["title"]] for row in rows],
        note="dat reproduce STUDY; theorem1 is made without training runs",
    )  # fmt: skip
    return 0


def _show_plan(arguments: argparse.Namespace) -> int:
    from dat.report import print_json, print_table
    from dat.reproduce import Plan, read_study

    study = read_study(arguments.study, arguments.scale)
    plan = Plan(study, arguments.runs, arguments.seeds or study.seeds)
    rows = plan.listing()
    if arguments.json:
        print_json(rows)
        return 0
    print_table(
        ["Row", "Seed", "Done", "Command"],
        [[it["row"], it["seed"], "yes" if it["done"] else "", it["command"]] for it in rows],
        note="Recipes are written. The seeds of a tuned row are known once its tries are there.",
    )
    return 0


def _theorem(arguments: argparse.Namespace) -> int:
    from dat.report import print_json, print_table
    from dat.reproduce import prove

    found = prove(arguments.out, seeds=arguments.seeds or 4, quiet=arguments.quiet)
    if arguments.json:
        print_json(found)
        return 0
    print_table(found["headers"], found["table"], note=found["note"])
    return 0
