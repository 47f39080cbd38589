"""The pages of a run and of the comparison of two."""

from compress.report.comparison import write_comparison
from compress.report.write import write_report

__all__ = ["write_comparison", "write_report"]
