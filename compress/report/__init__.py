"""The report of a run: figures with captions, report.md and report.html."""

from compress.report.write import write_report

__all__ = ["write_report"]
