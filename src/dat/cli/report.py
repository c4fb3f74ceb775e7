"""`dat report`: an HTML report on one or more runs."""

from __future__ import annotations

import argparse
from pathlib import Path

from dat.cli.arguments import Commands, positive_int, quiet_argument, trust_argument


def add(commands: Commands) -> None:
    report = commands.add(
        "report",
        _report,
        "write an HTML report on one or more runs: metrics, curves, images, settings",
        "  dat report runs/digits                    write runs/digits/report.html\n"
        "  dat report runs/a runs/b --out ab.html    side by side, with the differences\n"
        "  dat report runs/digits --images 1000      analyze the errors on 1000 test images\n"
        "  dat report runs/digits --plots pictures/  also save the charts as PNG and SVG",
    )
    report.add_argument("mixed", nargs="+", metavar="RUN", help="run folders, finished or not")
    trust_argument(report)
    report.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="output file (default: RUN/report.html; report.html for several runs)",
    )
    report.add_argument("--plots", type=Path, metavar="DIR", help="also save the charts as files")
    report.add_argument(
        "--images",
        type=positive_int,
        metavar="N",
        help="repeat the error analysis on N test images (default: the saved analysis, else "
        "evaluate.report images)",
    )
    report.add_argument("--open", action="store_true", help="open the report in the browser")
    quiet_argument(report)


def _report(arguments: argparse.Namespace, argv: list[str]) -> int:
    from dat.config.runs import is_analyzed
    from dat.report import print_json
    from dat.report.page import write_page, write_plots

    runs: list[Path] = arguments.runs
    trusted = _trusted_code(arguments)
    out = arguments.out or (runs[0] / "report.html" if len(runs) == 1 else Path("report.html"))
    if not out.parent.is_dir():
        raise ValueError(f"--out {out}: folder {out.parent} does not exist")
    for run in runs:
        if arguments.images or not is_analyzed(run):
            _analyze_errors(run, trusted[run], arguments)
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


def _trusted_code(arguments: argparse.Namespace) -> dict[Path, list[str]]:
    """For each run, the settings on the command line that repeat the code its config names."""
    from dat.config.runs import read_run
    from dat.config.trust import repeated_code

    trusted = {
        run: repeated_code(read_run(run, trust=True)[1], arguments.settings)
        for run in arguments.runs
    }
    for setting in arguments.settings:
        if not any(setting in settings for settings in trusted.values()):
            raise ValueError(f"{setting}: not the folder of a run")
    return trusted


def _analyze_errors(run: Path, settings: list[str], arguments: argparse.Namespace) -> None:
    """Analyze a run's errors. Unless --images asks for it, untrusted code is only a warning."""
    from dat.config.schema import parse_edits
    from dat.config.trust import UntrustedCode
    from dat.jobs.report import look_closely
    from dat.report import warn

    try:
        look_closely(
            run,
            arguments.images,
            edits=parse_edits(settings),
            trust=arguments.trust,
            quiet=arguments.quiet,
        )
    except UntrustedCode as error:
        if arguments.images is not None:
            raise
        warn([f"{error}; the report omits the error analysis"])
