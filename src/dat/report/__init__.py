"""Output for people: progress during a run, tables and plots of results, the report page."""

from typing import TYPE_CHECKING

from dat.core.lazy import lazy_names

if TYPE_CHECKING:
    from dat.report.evaluations import (
        show_certified,
        show_evaluation,
        show_labelled,
        show_sweep,
        warn,
    )
    from dat.report.plots import Chart, bar_chart, check_picture, line_charts
    from dat.report.profiles import show_profile
    from dat.report.progress import Progress, counting, progress_bar
    from dat.report.sets import bytes_bar, image_grid, save_picture, show_data, show_parts
    from dat.report.tables import print_json, print_table, runs_table
    from dat.report.verification import show_verification
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        renamed={"gauge": "progress_bar", "show_measured": "show_evaluation"},
        evaluations="show_certified show_labelled show_evaluation show_sweep warn",
        plots="Chart bar_chart check_picture line_charts",
        profiles="show_profile",
        progress="Progress counting progress_bar",
        sets="bytes_bar image_grid save_picture show_data show_parts",
        tables="print_json print_table runs_table",
        verification="show_verification",
    )

__all__ = [
    "Chart",
    "Progress",
    "bar_chart",
    "bytes_bar",
    "check_picture",
    "counting",
    "image_grid",
    "line_charts",
    "print_json",
    "print_table",
    "progress_bar",
    "runs_table",
    "save_picture",
    "show_certified",
    "show_data",
    "show_evaluation",
    "show_labelled",
    "show_parts",
    "show_profile",
    "show_sweep",
    "show_verification",
    "warn",
]
