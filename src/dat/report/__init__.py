"""What people look at: progress while it runs, tables when it is done."""

from dat.report.plots import bar_chart, check_picture
from dat.report.progress import Progress, counting
from dat.report.tables import print_json, print_table, runs_table

__all__ = [
    "Progress",
    "bar_chart",
    "check_picture",
    "counting",
    "print_json",
    "print_table",
    "runs_table",
]
