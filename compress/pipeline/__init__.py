"""From a recipe to a run folder, step by step; every step can be resumed."""

from compress.pipeline.commands import COMMANDS, default_folder, run

__all__ = ["COMMANDS", "default_folder", "run"]
