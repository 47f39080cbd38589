"""The studies of the figures in results/: run one from the repository root with `python -m analysis.STUDY.run`."""
