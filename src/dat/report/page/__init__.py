"""The report: everything about one or several runs on a single self-contained page."""

from dat.report.page.write import write_page, write_plots

__all__ = ["write_page", "write_plots"]
