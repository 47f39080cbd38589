"""Studies of a recipe that are not steps of a run."""
