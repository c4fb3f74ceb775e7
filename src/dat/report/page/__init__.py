"""The report: everything about one or several runs, on one page that opens offline."""

from dat.report.page.write import write_page, write_plots

__all__ = ["write_page", "write_plots"]
