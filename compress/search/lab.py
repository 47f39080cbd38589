"""A candidate from configuration to measured figures."""

from __future__ import annotations

import fnmatch
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from compress.engines.base import Engine
from compress.errors import SearchError
from compress.export.onnx import export_onnx
from compress.measure.latency import NOT_MEASURED, Latency, loaded, measure_latency
from compress.measure.parity import agreement
from compress.quantization import QuantSpec, Rule
from compress.quantization.ptq.quantize import quantize
from compress.search import SearchSpec
from compress.search.network import Scores, apply, distance, reconstruct, removed_classes
from compress.search.space import FLOAT, Configuration, Costs, Space, Structure, formats_of, left_out, sparse_layers
from compress.sparsity import SparsityRule, SparsitySpec
from compress.sparsity.parametrization import squash_masks
from compress.sparsity.sparsifier import sparsify
from compress.training.optim import recalibrate_batchnorm

REFERENCE = "float"
_QUICK = 1  # calibration batches of a network that is only timed
_LOADS, _LOAD_S = 3, 1.0  # times that files are loaded to be timed, while that takes less than so long for each file


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Time on the engine.

    Attributes:
        ratio: over float's.
        unquiet: why the ratio is not to be reported, or ""; bounds are judged by it all the same.
    """

    ms: float
    ratio: float
    unquiet: str = ""

    def ratio_text(self, digits: int = 3) -> str:
        return NOT_MEASURED if self.unquiet else f"{self.ratio:.{digits}f}"


@dataclass(frozen=True, kw_only=True)
class Figures(Speed):
    """Measurements of a candidate on the engine.

    Attributes:
        distance: squared error of outputs over float's variance, held-out images.
        agreement: with float's class; None without logits.
    """

    distance: float
    agreement: float | None


@dataclass(frozen=True)
class Lab:
    """What candidates are built and measured with.

    Attributes:
        quantization: its rules come first.
        fit: images to learn from.
        held: images to measure on.
        block: channels computed at a time.
        runs, seconds: most, for each network and load.
        cache: of times; None = the user's.
    """

    structure: Structure
    space: Space
    spec: SearchSpec
    quantization: QuantSpec
    engine: str
    scores: Scores
    fit: Sequence[Tensor]
    held: Sequence[Tensor]
    block: int = 1
    runs: int = 40
    seconds: float = 0.4
    version: str = ""
    cache: Path | None = None
    costs: Costs = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "costs", Costs(self.structure))

    @property
    def example(self) -> Tensor:
        images = torch.cat([batch.cpu() for batch in self.fit])
        times = -(-self.spec.batch_size // len(images))
        return images.repeat(times, *[1] * (images.ndim - 1))[: self.spec.batch_size]

    @cached_property
    def images(self) -> Tensor:
        images = torch.cat([batch.cpu() for batch in self.held])
        whole = max(len(images) // self.spec.batch_size, 1) * self.spec.batch_size
        return images.repeat(-(-whole // len(images)), *[1] * (images.ndim - 1))[:whole]


def build(lab: Lab, configuration: Configuration, *, steps: int | None = None) -> nn.Module:
    """Return a configuration's float network, reconstructed and with 2:4 masks; `steps` None = the specification's."""
    small = apply(lab.structure, configuration, lab.scores)
    if removed_classes(lab.structure, configuration, lab.scores) or left_out(configuration):
        count = lab.spec.reconstruction_steps if steps is None else steps
        reconstruct(small, lab.structure, configuration, lab.scores, lab.fit, steps=count)
    if spec := sparsity_of(lab, small, configuration):
        sparsify(small, spec, example_inputs=lab.fit[0])
        squash_masks(small)
        recalibrate_batchnorm(small, lab.fit)
    return small.eval()


def sparsity_of(lab: Lab, network: nn.Module, configuration: Configuration) -> SparsitySpec | None:
    there = _paths(network)
    rules = [SparsityRule(match=layer) for layer in sparse_layers(lab.structure, configuration) if layer in there]
    every = SparsityRule(match="*", enable=False)
    return SparsitySpec(pattern="2:4", kernels="any", rules=(every, *rules)) if rules else None


def _paths(network: nn.Module) -> set[str]:
    return {path for path, _ in network.named_modules(remove_duplicate=False)}


def quantization_of(lab: Lab, network: nn.Module, configuration: Configuration) -> QuantSpec | None:
    names = _paths(network)
    formats = {k: v for k, v in formats_of(lab.structure, configuration).items() if k in names}
    if set(formats.values()) <= {FLOAT}:
        return None
    base, rules = lab.quantization, []
    for layer, name in formats.items():
        if name == FLOAT:
            rules.append(Rule(match=layer, enable=False))
        else:
            own = base.weights if name == "int8" else replace(base.weights, num_bits=int(name.removeprefix("int")))
            rules.append(Rule(match=layer, weights=own))
    if len(set(formats.values())) == 1 and "int8" in formats.values():
        rules = []  # what no rule names is INT8
    kept = [rule for rule in base.rules if any(fnmatch.fnmatch(name, rule.match) for name in names)]
    return replace(base, rules=(*kept, *rules))


def with_formats(lab: Lab, network: nn.Module, configuration: Configuration, *, quick: bool = False) -> nn.Module:
    spec = quantization_of(lab, network, configuration)
    if spec is None:
        return network
    batches = list(lab.fit)[:_QUICK] if quick else list(lab.fit)
    return quantize(network, lab.fit[0][:2], batches, spec=spec)


def export(lab: Lab, network: nn.Module, path: Path) -> Path:
    return export_onnx(network.cpu(), lab.example, path, dynamic_batch=False)


def measure(lab: Lab, configuration: Configuration, reference: Path) -> Figures:
    with tempfile.TemporaryDirectory(prefix="compress-search-") as folder:
        network = with_formats(lab, build(lab, configuration), configuration)
        files = {REFERENCE: reference, "candidate": export(lab, network, Path(folder) / "candidate.onnx")}
        outputs: dict[str, list[Tensor]] = {}
        timed = []
        for engines in fresh_engines(lab, files):
            outputs = outputs or {name: run_images(lab, engine) for name, engine in engines.items()}
            timed.append(time_engines(lab, engines))
    far = distance(outputs["candidate"], outputs[REFERENCE])
    if not np.isfinite(far):
        raise SearchError("the candidate's outputs are not finite")
    classes = [output.ndim for output in outputs["candidate"]] == [2]
    return Figures(
        ms=float(np.median([row["candidate"].p50_ms for row in timed])),
        ratio=median_ratio(timed, "candidate"),
        distance=far,
        agreement=agreement(*(outputs[name][0].numpy() for name in (REFERENCE, "candidate"))) if classes else None,
        unquiet=next((one.unquiet for row in timed for one in row.values() if one.unquiet), ""),
    )


def engines_of(lab: Lab, files: Mapping[str, Path]) -> AbstractContextManager[dict[str, Engine]]:
    spec = lab.spec
    precisions = dict.fromkeys(files, spec.precision)
    return loaded(files, lab.engine, precisions=precisions, batch_size=spec.batch_size, threads=spec.threads)


def fresh_engines(lab: Lab, files: Mapping[str, Path]) -> Iterator[dict[str, Engine]]:
    """Load files up to `_LOADS` times, because each load's time differs by some percent."""
    spent = 0.0
    for _ in range(_LOADS):
        begun = time.monotonic()
        with engines_of(lab, files) as engines:
            spent += time.monotonic() - begun
            yield engines
        if spent > _LOAD_S * len(files):
            return


def median_ratio(timed: Sequence[Mapping[str, Latency]], label: str) -> float:
    """Time over that of the float network, the median of several loads."""
    return float(np.median([time_ratio(row[label], row[REFERENCE]) for row in timed]))


def time_engines(lab: Lab, engines: Mapping[str, Engine]) -> dict[str, Latency]:
    timed = measure_latency(engines, batch_size=lab.spec.batch_size, runs=lab.runs, seconds=lab.seconds)
    return {row.label: row for row in timed}


def time_ratio(value: Latency, reference: Latency) -> float:
    """Lower quartiles over float's: other load only adds time."""
    return float(np.quantile(value.turns_ms, 0.25) / np.quantile(reference.turns_ms, 0.25))


def run_images(lab: Lab, engine: Engine) -> list[Tensor]:
    name = engine.inputs[0].name
    rows = [engine.run({name: part.numpy()}) for part in lab.images.split(lab.spec.batch_size)]
    return [torch.from_numpy(np.concatenate([np.asarray(r[o.name]) for r in rows])).float() for o in engine.outputs]
