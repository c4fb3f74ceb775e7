"""`dat compare`: runs side by side."""

from __future__ import annotations

import argparse

from dat.cli.arguments import Commands


def add(commands: Commands) -> None:
    compare = commands.add(
        "compare",
        _compare,
        "compare the results of runs, and the settings in which they differ",
        "  dat compare runs/standard runs/dat-pgd\n"
        "A run that is not finished is listed with its number of completed epochs.",
    )
    compare.add_argument("mixed", nargs="+", metavar="RUN", help="run folders, finished or not")


def _compare(arguments: argparse.Namespace, argv: list[str]) -> int:
    from dat.config.runs import read_progress, read_run
    from dat.report import ComparedRun, print_json, show_comparison_of_runs
    from dat.report.page.gather import flatten, short_names

    if arguments.settings:
        raise ValueError(f"{arguments.settings[0]}: not the folder of a run")
    results = [read_progress(run) for run in arguments.runs]
    if arguments.json:
        print_json(results)
        return 0
    unique = list(dict.fromkeys(run.resolve() for run in arguments.runs))
    names = dict(zip(unique, short_names(unique), strict=True))
    show_comparison_of_runs(
        [
            ComparedRun(
                names[run.resolve()],
                flatten(read_run(run, trust=True)[1].dump()),  # nothing is built
                result if result["finished"] else None,
                result["epoch"],
            )
            for run, result in zip(arguments.runs, results, strict=True)
        ]
    )
    return 0
