"""The report: one self-contained HTML page about one or several runs, made from their folders alone."""

from fedgist.experiments.report.page import MissingPlotly, check_installed, page, write

__all__ = ["MissingPlotly", "check_installed", "page", "write"]
