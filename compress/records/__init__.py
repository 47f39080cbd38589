"""The files of a run folder as types."""
