"""A worker of a search over invented networks, each trial of which takes so long."""

import time

from compress.search.lab import Figures
from compress.search.search import add_starts, open_study, run_trials
from compress.search.space import Space
from compress.support.progress import NoProgress

SPACE = Space(elements={f"width {i}": ("4", "3", "2", "1") for i in range(3)})
STARTS = {f"start {width}": dict.fromkeys(SPACE.elements, str(width)) for width in range(1, 5)}


def figures(configuration):
    kept = [int(choice) for choice in configuration.values()]
    return Figures(ms=1.0, ratio=sum(kept) / 12, distance=float(sum((4 - k) ** 2 for k in kept)), agreement=None)


def work(storage, count, seconds, seed=0):
    study = open_study(storage, "search", seed=seed, population=4)
    add_starts(study, SPACE, STARTS)

    def evaluate(configuration):
        print("begun", flush=True)
        time.sleep(seconds)
        return figures(configuration)

    run_trials(study, SPACE, evaluate, count=count, deadline=None, progress=NoProgress())
    return study
