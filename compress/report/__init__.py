"""The report of a run: figures with captions, report.md and report.html; and the comparison of two runs."""

from compress.report.comparison import write_comparison
from compress.report.write import write_report

__all__ = ["write_comparison", "write_report"]
