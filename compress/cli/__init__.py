"""The command line: parse, call, print; no work of its own."""

from compress.cli.app import main, run

__all__ = ["main", "run"]
