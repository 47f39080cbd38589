"""Makes a network smaller until it keeps a share of its latency: uniform widths, criteria, Torch-Pruning, our search.

Everything here runs in one process on one core, where ONNX Runtime times single pictures with one thread. A method
without a search of its own is a family of networks from large to small, of which bisection takes the largest that
keeps the bound; so all methods end at the same measured latency.
"""

from __future__ import annotations

import copy
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import compress
from analysis.search_study.data import Files
from analysis.search_study.subjects import CRITERIA, Part, Subject
from compress.measure import Latency, measure_latency
from compress.search.criteria import channel_scores
from compress.search.lab import time_ratio
from compress.search.network import Scores, apply
from compress.search.search import search
from compress.search.spec import SearchSpec
from compress.search.structure import Structure, analyse

ENGINE, THREADS = "onnxruntime", 1
MULTIPLE = 8
MARGIN = 0.98
"""Methods aim a little below the bound, because the next measurement will differ."""
_NEAR = 0.97
_BISECTIONS = 7
_LOADS, _RUNS = 3, 100  # of a measurement, and most runs of each load
_BATCH = 64

Family = Callable[[float], nn.Module]
"""Networks by the share that is taken away, from 0 to 0.9."""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """Effort of a search.

    Attributes:
        networks, trials, images, reconstruction_steps: as of `SearchSpec`.
        search_s: seconds after which a search begins no further trial.
        seconds: of a measurement of latency.
    """

    networks: int = 9
    trials: int = 8
    images: int = 128
    reconstruction_steps: int = 5
    search_s: float = 300.0
    seconds: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Found:
    """A smaller network before it is fine-tuned.

    Attributes:
        network: float, on the CPU.
        ratio: its time, INT8 where the subject is, over that of the float network.
        dense: that of the dense network in the same format; the bound is a share of it.
        seconds: that finding it took.
        facts: of the method, for the page.
    """

    network: nn.Module
    ratio: float
    dense: float
    seconds: float
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Bench:
    """Times networks of a subject beside its float network.

    Attributes:
        subject: whose format the networks get.
        network: the float network.
        images: to calibrate on.
        effort: of a measurement.
        folder: of the files that are timed.
    """

    subject: Subject
    network: nn.Module
    images: Tensor
    effort: Effort
    folder: Path

    def ratio(self, network: nn.Module) -> float:
        """Time of a network in the subject's format over that of the float network, timed in turn."""
        files = {"float": self.folder / "float.onnx", "small": self.folder / "small.onnx"}
        if not files["float"].is_file():
            exported(self.network, self.images, files["float"])
        exported(network, self.images, files["small"], int8=self.subject.int8, quick=True)
        rows = [timed(files, self.subject.batch, self.effort.seconds / _LOADS) for _ in range(_LOADS)]
        return float(np.median([time_ratio(row["small"], row["float"]) for row in rows]))

    def largest(self, family: Family, bound: float) -> tuple[nn.Module, float, float]:
        """The largest network of a family within a bound, its ratio and the share that was taken away."""
        low, high, best = 0.0, 0.9, None
        for _ in range(_BISECTIONS):
            share = (low + high) / 2
            network = family(share)
            ratio = self.ratio(network)
            if ratio <= bound:
                best, high = (network, ratio, share), share
                if ratio >= _NEAR * bound:
                    break
            else:
                low = share
        if best is None:
            raise ValueError(f"no network of the family keeps {bound:.3f}; the smallest takes {ratio:.3f}")
        return best


def find(part: Part, network: nn.Module, files: Files, folder: Path, effort: Effort) -> Found:
    """Make the network of a part smaller by the part's method."""
    begun, subject, method = time.perf_counter(), part.subject, part.method
    images = torch.from_numpy(np.load(files.calibration))
    network = network.eval()
    facts: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="search-study-") as own:
        bench = Bench(subject, network, images, effort, Path(own))
        dense = bench.ratio(network) if subject.int8 else 1.0
        bound = MARGIN * part.slack * subject.bound * dense
        if method == "dense":
            made, ratio = network, dense
        elif method.startswith("search"):
            made, ratio, facts = searched(part, bench, bound, folder)
        else:
            made, ratio, share = bench.largest(family_of(method, network, images), bound)
            facts = {"share": share}
    return Found(network=made, ratio=ratio, dense=dense, seconds=time.perf_counter() - begun, facts=facts)


def family_of(method: str, network: nn.Module, images: Tensor) -> Family:
    """Return the family of a method.

    Raises:
        KeyError: an unknown method.
    """
    if method.startswith("torch-pruning"):
        return lambda share: torch_pruned(network, images, share, across=method.endswith("global"))
    structure = analyse(network, images[:2])
    if method == "uniform":
        scores = channel_scores(structure, "taylor", images.split(_BATCH))
        return lambda share: _kept(structure, scores, dict.fromkeys(structure.groups, 1 - share))
    if method not in CRITERIA:
        raise KeyError(method)
    scores = channel_scores(structure, method, images.split(_BATCH))
    return lambda share: _kept(structure, scores, ranked(scores, share))


def ranked(scores: Scores, share: float) -> dict[str, float]:
    """Share of each group that is kept when this share of all channels goes, by scores over their group's mean."""
    relative = {name: own / own.mean().clamp_min(1e-12) for name, own in scores.items()}
    threshold = torch.cat(list(relative.values())).quantile(share)
    return {name: float((own > threshold).double().mean()) for name, own in relative.items()}


def _kept(structure: Structure, scores: Scores, shares: Mapping[str, float]) -> nn.Module:
    """Keep a share of the channels of each group, in multiples as the search takes them."""
    configuration = {}
    for name, group in structure.groups.items():
        size = len(group.classes)
        step = MULTIPLE if size >= 4 * MULTIPLE else MULTIPLE // 2
        configuration[f"width {name}"] = str(min(size, max(step, round(shares[name] * size / step) * step)))
    return apply(structure, configuration, scores)


def torch_pruned(network: nn.Module, images: Tensor, share: float, *, across: bool) -> nn.Module:
    """Remove a share of the channels by Torch-Pruning's magnitude of groups, of each layer or of all together."""
    import torch_pruning  # optional: a peer

    small = copy.deepcopy(network)
    heads = [module for module in small.modules() if isinstance(module, nn.Linear)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch_pruning.pruner.BasePruner(
            small,
            images[:2],
            importance=torch_pruning.importance.GroupMagnitudeImportance(p=2),
            pruning_ratio=share,
            max_pruning_ratio=0.9,
            global_pruning=across,
            ignored_layers=heads,
            round_to=MULTIPLE,
        ).step()
    return small


def searched(part: Part, bench: Bench, bound: float, folder: Path) -> tuple[nn.Module, float, dict[str, Any]]:
    """Search, and take the best point of the front whose time keeps the bound when it is measured once more."""
    effort, subject = bench.effort, part.subject
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
    images = list(bench.images[:pictures].split(_BATCH))
    out = folder / f"{subject.name}-{part.method}"
    front = search(
        bench.network, images[0][:2], images, engine=ENGINE, latency=bound, spec=spec, out=out, cache=folder / "cache"
    )
    points = [p for p in front.front if p.figures.ratio <= bound]
    facts: dict[str, Any] = {
        "check": {"median_error": front.latency_check.median_error, "spearman": front.latency_check.spearman},
        "candidates": {"median_error": front.candidate_check.median_error, "spearman": front.candidate_check.spearman},
        "cached": front.timed.cached,
        "accuracy": front.accuracy_check(),
        "points": [
            [p.label, p.predicted_ratio, p.figures.ratio, p.predicted_distance, p.figures.distance]
            for p in front.points
        ],
    }
    for point in sorted(points, key=lambda p: p.figures.distance):
        network = front.network(point)
        ratio = bench.ratio(network)
        if ratio <= bound / MARGIN:
            break
    changed = {k: c for k, c in point.configuration.items() if c != front.lab.space.elements[k][0]}
    return network, ratio, {**facts, "chosen": point.label, "configuration": changed}


def exported(network: nn.Module, images: Tensor, path: Path, *, int8: bool = False, quick: bool = False) -> Path:
    """Write a network, quantized after calibration if it is to be INT8; `quick` is enough for its time."""
    if int8:
        spec = compress.QuantSpec(target="onnxruntime")
        network = compress.quantize(network.eval(), images[:2], images.split(_BATCH)[: 1 if quick else None], spec=spec)
    return compress.export_onnx(copy.deepcopy(network).eval(), images[:2], path)


def timed(files: Mapping[str, Path], batch: int, seconds: float) -> dict[str, Latency]:
    """Time files in turn, with one thread; every call loads them anew."""
    with ExitStack() as stack:
        engines = {
            name: stack.enter_context(compress.build_engine(path, ENGINE, batch_size=batch, threads=THREADS))
            for name, path in files.items()
        }
        rows = measure_latency(engines, batch_size=batch, runs=_RUNS, seconds=seconds)
    return {row.label: row for row in rows}


def hits(path: Path, files: Files, first: int, count: int) -> int:
    """Number of test pictures from `first` on whose class the engine finds."""
    images = np.load(files.images, mmap_mode="r")[first : first + count]
    targets = np.load(files.targets)[first : first + count]
    found = 0
    with compress.build_engine(path, ENGINE, threads=THREADS) as engine:
        name, output = engine.inputs[0].name, engine.outputs[0].name
        for at in range(0, len(images), _BATCH):
            logits = engine.run({name: np.ascontiguousarray(images[at : at + _BATCH])})[output]
            found += int((logits.argmax(1) == targets[at : at + _BATCH]).sum())
    return found
