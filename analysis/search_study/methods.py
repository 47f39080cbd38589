"""Makes a network smaller until it keeps a share of its latency: uniform widths, criteria, Torch-Pruning, our search.

A method without a search of its own is a family of networks from large to small, of which the largest that keeps the
bound is taken; so all methods end at the same measured latency. Everything here runs on one core.
"""

from __future__ import annotations

import copy
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import compress
from analysis.search_study.choice import Choice, Whole
from analysis.search_study.subjects import BLOCKS, CRITERIA, ENGINE_BLOCK, SHARES, Part, Subject
from compress.graph.inputs import flat_tensors
from compress.measure import Latency, measure_latency
from compress.search.criteria import channel_scores
from compress.search.lab import time_ratio
from compress.search.latency_model import Check
from compress.search.network import Scores, distance
from compress.search.search import TARGETS, search
from compress.search.spec import SearchSpec
from compress.search.structure import Structure
from compress.training import recalibrate_batchnorm

THREADS = 1
MULTIPLE = 8
MARGIN = 0.98
"""Methods aim a little below the bound, because the next measurement will differ."""
_NEAR, _NARROW, _WIDE = 0.97, 0.02, 0.15
_MOST, _TRIES = 0.9, 6
_MOST_PEER = 0.7  # beyond it Torch-Pruning rounds small groups to no channel, and leaves them whole
_PEER = "torch-pruning"
_RUNS = 100  # most runs of a load
_BATCH, _HELD = 64, 64

Family = Callable[[float], Choice]
"""Networks by the share that is taken away, from 0 to 0.9."""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """Effort of a search and of a measurement.

    Attributes:
        networks, trials, images, reconstruction_steps: as of `SearchSpec`.
        search_s: seconds after which a search begins no further trial.
        loads, seconds: of a measurement of latency, and for each network in each load.
    """

    networks: int = 9
    trials: int = 8
    images: int = 128
    reconstruction_steps: int = 5
    search_s: float = 300.0
    loads: int = 3
    seconds: float = 0.3


@dataclass(frozen=True, kw_only=True)
class Found:
    """A smaller network before it is fine-tuned.

    Attributes:
        label: of the part, such as `uniform larger`.
        choice: what is left of the float network.
        ratio: its time, INT8 where the subject is, over that of the float network.
        dense: that of the dense network in the same format; the bound is a share of it.
        seconds: that finding all networks of the part took.
        facts: of the method, for the page.
    """

    label: str
    choice: Choice
    ratio: float
    dense: float
    seconds: float
    facts: Mapping[str, Any] = field(default_factory=dict)


class NoNetworkError(ValueError):
    """Not even the smallest network of a family keeps a bound."""


@dataclass(frozen=True)
class Bench:
    """Times networks of a subject beside its float network.

    Attributes:
        subject: whose format the networks get.
        whole: the float network.
        effort: of a measurement.
        folder: of the files that are timed.
    """

    subject: Subject
    whole: Whole
    effort: Effort
    folder: Path

    def ratio(self, choice: Choice) -> float:
        """Time of a network in the subject's format over that of the float network, timed in turn."""
        files = {"float": self.folder / "float.onnx", "small": self.folder / "small.onnx"}
        if not files["float"].is_file():
            exported(self.whole.network, self.whole.images, files["float"], self.subject, int8=False)
        exported(self.whole.make(choice), self.whole.images, files["small"], self.subject, quick=True)
        rows = [timed(files, self.subject, self.effort.seconds) for _ in range(self.effort.loads)]
        return float(np.median([time_ratio(row["small"], row["float"]) for row in rows]))

    def distance(self, choice: Choice) -> float:
        """Squared error of a network's outputs over their variance, after BatchNorm's statistics are measured again."""
        small, images = self.whole.make(choice), self.whole.images
        recalibrate_batchnorm(small, images[_HELD:].split(_BATCH))
        with torch.no_grad():
            own, other = (flat_tensors(network.eval()(images[:_HELD])) for network in (small, self.whole.network))
        return distance(own, other)


def find(part: Part, network: nn.Module, images: Tensor, folder: Path, effort: Effort) -> Iterator[Found]:
    """Make the network of a part smaller by the part's method; yield a network for each of the part's labels.

    Args:
        part: subject and method.
        network: the float network, on the CPU.
        images: of the training split, normalized.
        folder: of searches.
        effort: of searches and measurements.

    Raises:
        NoNetworkError: the method has none within the bound.
    """
    with tempfile.TemporaryDirectory(prefix="search-study-") as own:
        bench = Bench(part.subject, Whole(network, images), effort, Path(own))
        dense = bench.ratio(Choice()) if part.subject.int8 else 1.0
        begun = time.perf_counter()
        bound = MARGIN * part.subject.bound * dense
        if part.method == "dense":
            made: dict[str, Made] = {part.method: (Choice(), dense, {})}
        elif part.method == BLOCKS:
            made = _in_blocks(part, bench)
        elif part.method.startswith("search"):
            made = {part.method: searched(part, bench, bound, folder)}
        else:
            made = _of_family(part, bench, dense, bound)
        seconds = time.perf_counter() - begun
        for label, (choice, ratio, facts) in made.items():
            facts = {**facts, "distance": bench.distance(choice)}
            yield Found(label=label, choice=choice, ratio=ratio, dense=dense, seconds=seconds, facts=facts)


Made = tuple[Choice, float, dict[str, Any]]
"""A network, its time, and facts for the page."""


def _of_family(part: Part, bench: Bench, dense: float, bound: float) -> dict[str, Made]:
    """The largest network of a family within a bound; where a part has two labels, the next larger one as well."""
    family, known = family_of(part.method, bench.whole, part.subject.multiple), {0.0: dense}
    most = _MOST_PEER if part.method.startswith(_PEER) else _MOST
    shares = brackets(lambda away: bench.ratio(family(away)), known, bound, most)
    facts = {"tried": {f"{share:.3f}": time for share, time in sorted(known.items())}}
    return {
        label: (family(share), known[share], {"share": share, **facts})
        for label, share in zip(part.labels, shares, strict=False)
    }


def _in_blocks(part: Part, bench: Bench) -> dict[str, Made]:
    """Uniform widths in multiples that engines compute at a time, whatever they take."""
    structure, batches = bench.whole.structure, bench.whole.images.split(_BATCH)
    scores, made = channel_scores(structure, "taylor", batches), dict[str, Made]()
    for label, share in zip(part.labels, SHARES, strict=True):
        widths = _widths(structure, dict.fromkeys(structure.groups, share), ENGINE_BLOCK)
        choice = bench.whole.choice(widths, scores)
        made[label] = choice, bench.ratio(choice), {"share": 1 - share}
    return made


def brackets(
    measured: Callable[[float], float], known: dict[float, float], bound: float, most: float = _MOST
) -> tuple[float, float]:
    """Return the least share to take away whose network keeps a bound, and the next smaller share.

    The shares are found by the secant rule on measured times.

    Args:
        measured: time of the network of a share.
        known: times by share, that of 0 among them; those that are measured are added.
        bound: largest time.
        most: largest share.

    Raises:
        NoNetworkError: not even the smallest network keeps the bound.
    """
    known[most] = measured(most)
    if known[most] > bound:
        raise NoNetworkError(f"no network of the family keeps {bound:.3f}; the smallest takes {known[most]:.3f}")
    for _ in range(_TRIES):
        high = min(share for share, time in known.items() if time <= bound)
        low = max((share for share in known if share < high), default=high)
        near = known[high] >= _NEAR * bound
        if high - low < (_WIDE if near else _NARROW):
            break
        aim = bound * (1 + _NEAR) / 2
        part = (known[low] - aim) / (known[low] - known[high])
        share = high - _WIDE / 2 if near else low + (high - low) * min(max(part, 0.1), 0.9)
        known[share] = measured(share)
    high = min(share for share, time in known.items() if time <= bound)
    return high, max((share for share in known if share < high), default=high)


def family_of(method: str, whole: Whole, multiple: int = MULTIPLE) -> Family:
    """Return the family of a method; Torch-Pruning keeps a multiple of so many channels.

    Raises:
        KeyError: an unknown method.
    """
    if method.startswith(_PEER):
        return lambda share: torch_pruned(whole, share, across=method.endswith("global"), multiple=multiple)
    structure, batches = whole.structure, whole.images.split(_BATCH)
    if method == "uniform":
        scores = channel_scores(structure, "taylor", batches)
        return lambda share: whole.choice(_widths(structure, dict.fromkeys(structure.groups, 1 - share)), scores)
    if method not in CRITERIA:
        raise KeyError(method)
    scores = channel_scores(structure, method, batches)
    return lambda share: whole.choice(_widths(structure, ranked(scores, share)), scores)


def ranked(scores: Scores, share: float) -> dict[str, float]:
    """Share of each group that is kept when this share of all channels goes, by scores over their group's mean."""
    relative = {name: own / own.mean().clamp_min(1e-12) for name, own in scores.items()}
    threshold = torch.cat(list(relative.values())).quantile(share)
    return {name: float((own > threshold).double().mean()) for name, own in relative.items()}


def _widths(structure: Structure, shares: Mapping[str, float], multiple: int = 0) -> dict[str, str]:
    """Channels of each group by their share, in multiples; 0 = of 8, and in groups of fewer than 32 of 4."""
    configuration = {}
    for name, group in structure.groups.items():
        size = len(group.classes)
        step = multiple or (MULTIPLE if size >= 4 * MULTIPLE else MULTIPLE // 2)
        configuration[f"width {name}"] = str(min(size, max(step, round(shares[name] * size / step) * step)))
    return configuration


def torch_pruned(whole: Whole, share: float, *, across: bool, multiple: int) -> Choice:
    """Remove a share of the channels by Torch-Pruning's magnitude of groups, of each layer or of all together."""
    import torch_pruning  # optional: a peer

    small = copy.deepcopy(whole.network)
    heads = [module for module in small.modules() if isinstance(module, nn.Linear)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pruner = torch_pruning.pruner.BasePruner(
            small,
            whole.images[:2],
            importance=torch_pruning.importance.GroupMagnitudeImportance(p=2),
            pruning_ratio=share,
            max_pruning_ratio=_MOST,
            global_pruning=across,
            ignored_layers=heads,
            round_to=multiple,
        )
        pruner.step()
    return Choice(history=[(name, bool(out), [int(i) for i in gone]) for name, out, gone in pruner.pruning_history()])


def searched(part: Part, bench: Bench, bound: float, folder: Path) -> Made:
    """Search, and take the best point of the front whose time keeps the bound when it is measured once more."""
    effort, subject, whole = bench.effort, part.subject, bench.whole
    pictures = min(effort.images, subject.pictures)
    spec = SearchSpec(
        widths=subject.widths,
        formats=("int8",) if subject.int8 else ("float",),
        blocks=part.method != "search-widths",
        images=pictures,
        reconstruction_steps=effort.reconstruction_steps,
        networks=effort.networks,
        trials=effort.trials,
        hours=effort.search_s / 3600,
        threads=THREADS,
        batch_size=subject.batch,
    )
    images = list(whole.images[:pictures].split(_BATCH))
    out = folder / f"{subject.name}-{part.method}"
    front = search(
        whole.network, images[0][:2], images, engine=subject.engine, latency=bound, spec=spec, out=out,
        cache=folder / "cache", resume=(out / "plan.json").is_file(),
    )  # fmt: skip
    points = [p for p in front.front if p.figures.ratio <= bound]
    facts: dict[str, Any] = {
        "check": {"median_error": front.latency_check.median_error, "spearman": front.latency_check.spearman},
        "candidates": checked(front.candidate_check),
        "cached": front.timed.cached,
        "accuracy": front.accuracy_check(),
        "points": [
            [p.label, p.predicted_ratio, p.figures.ratio, p.predicted_distance, p.figures.distance]
            for p in front.points
        ],
    }
    for point in sorted(points, key=lambda p: p.figures.distance):
        choice = whole.choice(
            {k: c for k, c in point.configuration.items() if c != front.lab.space.elements[k][0]}, front.lab.scores
        )
        ratio = bench.ratio(choice)
        if ratio <= bound / MARGIN:
            break
    return choice, ratio, {**facts, "chosen": point.label}


def checked(seen: Check) -> dict[str, Any]:
    """Predictions of latency in numbers: how many networks, median error, rank correlation and its interval."""
    return {
        "count": len(seen.measured),
        "median_error": seen.median_error,
        "spearman": seen.spearman,
        "interval": seen.interval,
    }


def exported(
    network: nn.Module, images: Tensor, path: Path, subject: Subject, *, int8: bool | None = None, quick: bool = False
) -> Path:
    """Write a network for the subject's batch size, quantized after calibration if it is to be INT8.

    Args:
        network: on the CPU.
        images: to calibrate on.
        path: of the file.
        subject: with batch size and engine.
        int8: None = as the subject says.
        quick: calibrate on one batch, which is enough for its time.
    """
    if subject.int8 if int8 is None else int8:
        batches = images.split(_BATCH)[: 1 if quick else None]
        if quick:  # channels that went leave layers without a value above zero until their statistics are those of now
            recalibrate_batchnorm(network, batches)
        spec = compress.QuantSpec(target=TARGETS[subject.engine])
        network = compress.quantize(network.eval(), images[:2], batches, spec=spec)
    return compress.export_onnx(copy.deepcopy(network).eval(), images[: subject.batch], path, dynamic_batch=False)


def timed(files: Mapping[str, Path], subject: Subject, seconds: float) -> dict[str, Latency]:
    """Time files in turn, with one thread; every call loads them anew."""
    with ExitStack() as stack:
        engines = {
            name: stack.enter_context(
                compress.build_engine(path, subject.engine, batch_size=subject.batch, threads=THREADS)
            )
            for name, path in files.items()
        }
        rows = measure_latency(engines, batch_size=subject.batch, runs=_RUNS, seconds=seconds)
    return {row.label: row for row in rows}
