"""Figures, markdown and HTML of a run."""

from compress.report.data import RunData, read_run
from compress.report.tables import SUMMARY_COLUMNS, SummaryRow, summary_notes, summary_table, unavailable_engines
from compress.report.write import write_report

__all__ = [
    "SUMMARY_COLUMNS",
    "RunData",
    "SummaryRow",
    "read_run",
    "summary_notes",
    "summary_table",
    "unavailable_engines",
    "write_report",
]
