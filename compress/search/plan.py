"""The two models of a search on disk."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from compress.errors import SearchError
from compress.files import read_json, write_json
from compress.search.accuracy_model import AccuracyModel
from compress.search.lab import Lab
from compress.search.latency_model import Sample, check, fit
from compress.search.space import key_of
from compress.search.timing import Timed

PLAN = "plan.json"
_ANEW = "name another folder (out), or remove this one"


def write_plan(folder: Path, lab: Lab, timed: Timed, accuracy: AccuracyModel) -> Path:
    """Write the models of a search into its folder."""
    return write_json(
        folder / PLAN,
        {
            "identity": identity(lab),
            "engine": lab.engine,
            "block": lab.block,
            "check": {"predicted": timed.check.predicted, "measured": timed.check.measured},
            "smallest": timed.smallest,
            "cached": timed.cached,
            "samples": [[json.loads(key), s.time, dict(s.layers)] for key, s in timed.samples.items()],
            "accuracy": asdict(accuracy),
        },
    )


def read_plan(folder: Path, lab: Lab, *, needed: bool, resume: bool) -> tuple[Timed, AccuracyModel] | None:
    """Return the models of the search in a folder; None if there is none.

    Raises:
        SearchError: it is needed and missing, present without `resume`, of another search, or damaged.
    """
    path = folder / PLAN
    if not path.is_file():
        if needed:
            raise SearchError(f"{folder} holds no search: begin it without --worker, and let workers join afterwards")
        return None
    if not resume:
        raise SearchError(f"{folder} holds a search already; resume goes on with it, or {_ANEW}")
    try:
        tree = read_json(path)
        if tree["identity"] != identity(lab):
            raise SearchError(f"{folder} holds a search of another network, space or engine; {_ANEW}")
        return _timed(tree, lab), AccuracyModel(**tree["accuracy"])
    except (KeyError, TypeError, ValueError, OSError) as error:
        raise SearchError(f"{path} cannot be read ({error}); {_ANEW}") from error


def read_block(folder: Path) -> int | None:
    """The block of channels of a folder's search, or None."""
    path = folder / PLAN
    try:
        return int(read_json(path)["block"]) if path.is_file() else None
    except (KeyError, TypeError, ValueError, OSError) as error:
        raise SearchError(f"{path} cannot be read ({error}); {_ANEW}") from error


def identity(lab: Lab) -> str:
    """A text that differs between searches of incomparable trials."""
    digest = hashlib.sha256()
    for name, tensor in sorted(lab.structure.graph.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    same = replace(lab.spec, trials=1, hours=None, attempts=1)  # these may change when a search goes on
    digest.update(json.dumps([asdict(same), lab.engine, dict(lab.space.elements)]).encode())
    return digest.hexdigest()[:24]


def _timed(tree: dict[str, Any], lab: Lab) -> Timed:
    seen = tree["check"]
    samples = {
        key_of(c): Sample(costs=lab.costs.of(c), time=time, layers=layers) for c, time, layers in tree["samples"]
    }
    return Timed(
        model=fit(list(samples.values()), block=lab.block),
        check=check(seen["predicted"], seen["measured"]),
        samples=samples,
        cached=int(tree["cached"]),
    )
