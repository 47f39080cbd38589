"""Studies that are not steps of a run."""
