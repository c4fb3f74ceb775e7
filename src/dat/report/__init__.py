"""Output for people: progress during a run, tables and plots of results, the report page."""

from typing import TYPE_CHECKING

from dat.core.lazy import lazy_names

if TYPE_CHECKING:
    from dat.core.progress import progress_bar
    from dat.report.comparison import ComparedRun, show_comparison_of_runs
    from dat.report.evaluations import (
        show_certified,
        show_evaluation,
        show_labelled,
        show_sweep,
        warn,
    )
    from dat.report.plots import Chart, bar_chart, check_picture, line_charts
    from dat.report.profiles import show_profile
    from dat.report.progress import Progress, counting
    from dat.report.sets import bytes_bar, image_grid, save_picture, show_data, show_parts
    from dat.report.tables import print_json, print_table, print_text, runs_table
    from dat.report.verification import show_verification
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        renamed={"gauge": "progress_bar", "show_measured": "show_evaluation"},
        comparison="ComparedRun show_comparison_of_runs",
        evaluations="show_certified show_labelled show_evaluation show_sweep warn",
        plots="Chart bar_chart check_picture line_charts",
        profiles="show_profile",
        progress="Progress counting",
        sets="bytes_bar image_grid save_picture show_data show_parts",
        tables="print_json print_table print_text runs_table",
        verification="show_verification",
        **{".core.progress": "progress_bar"},
    )

__all__ = [
    "Chart",
    "ComparedRun",
    "Progress",
    "bar_chart",
    "bytes_bar",
    "check_picture",
    "counting",
    "image_grid",
    "line_charts",
    "print_json",
    "print_table",
    "print_text",
    "progress_bar",
    "runs_table",
    "save_picture",
    "show_certified",
    "show_comparison_of_runs",
    "show_data",
    "show_evaluation",
    "show_labelled",
    "show_parts",
    "show_profile",
    "show_sweep",
    "show_verification",
    "warn",
]
