"""From a recipe to a run folder, in steps that can be resumed."""

from compress.pipeline.commands import default_folder, run
from compress.pipeline.run import COMMANDS

__all__ = ["COMMANDS", "default_folder", "run"]
