"""Commands that show what there is."""

from __future__ import annotations

import argparse
from pathlib import Path

from dat.commands.arguments import Commands, positive, quiet_argument, recipe_arguments


def add(commands: Commands) -> None:
    compare = commands.add(
        "compare",
        _compare,
        "show finished runs side by side",
        "  dat compare runs/standard runs/dat-pgd",
    )
    compare.add_argument("mixed", nargs="+", metavar="RUN", help="runs' folders")
    report = commands.add(
        "report",
        _report,
        "write a page about one run or several: figures, curves, pictures, settings",
        "  dat report runs/digits                    runs/digits/report.html\n"
        "  dat report runs/a runs/b --out ab.html    side by side, what differs picked out\n"
        "  dat report runs/digits --images 1000      look at more test images\n"
        "  dat report runs/digits --plots pictures/  the charts as PNG and SVG as well",
    )
    _report_arguments(report)
    commands.add("recipes", _recipes, "list the built-in recipes", "  dat recipes --json")
    config = commands.add(
        "config",
        _config,
        "show every setting of a recipe: value, meaning, allowed range",
        "  dat config digits\n  dat config digits optimizer.name=sgd",
    )
    recipe_arguments(config)


def _report_arguments(report: argparse.ArgumentParser) -> None:
    report.add_argument("mixed", nargs="+", metavar="RUN", help="runs' folders, finished or not")
    report.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="the page (RUN/report.html; of several runs report.html)",
    )
    report.add_argument("--plots", type=Path, metavar="DIR", help="the charts as files, too")
    report.add_argument(
        "--images",
        type=positive,
        metavar="N",
        help="look closely at so many test images, anew (what was found before, else "
        "evaluate.report)",
    )
    report.add_argument("--open", action="store_true", help="show the page in the browser")
    quiet_argument(report)


def _report(arguments: argparse.Namespace, words: list[str]) -> int:
    from dat.build import read_run
    from dat.measure import look_closely
    from dat.report import print_json
    from dat.report.page import write_page, write_plots

    if arguments.settings:
        raise ValueError(f"{arguments.settings[0]}: not the folder of a run")
    runs: list[Path] = arguments.runs
    for run in runs:
        read_run(run)
    out = arguments.out or (runs[0] / "report.html" if len(runs) == 1 else Path("report.html"))
    if not out.parent.is_dir():
        raise ValueError(f"--out {out}: there is no folder {out.parent}")
    for run in runs:
        look_closely(run, arguments.images, quiet=arguments.quiet)
    write_page(runs, out)
    plots = write_plots(runs, arguments.plots) if arguments.plots else []
    if arguments.json:
        print_json({"page": str(out), "plots": [str(path) for path in plots]})
    else:
        print(f"{out}: {', '.join(str(run) for run in runs)}")
        for path in plots:
            print(path)
    if arguments.open:
        import webbrowser

        webbrowser.open(out.resolve().as_uri())
    return 0


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
