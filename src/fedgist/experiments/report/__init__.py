"""The report: one HTML page about one or several runs, made from their folders alone; its one script lies beside it."""

from fedgist.experiments.report.page import MissingPlotly, check_installed, page, write

__all__ = ["MissingPlotly", "check_installed", "page", "write"]
