"""Times each layer of a network on an engine, in several forms of the network, in turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from compress.engines import Engine, build_engine
from compress.engines.onnx_file import load_onnx
from compress.errors import EngineError
from compress.export.names import find_module
from compress.measure.latency import random_inputs
from compress.support.progress import NoProgress, Progress

_QUIET = NoProgress()


@dataclass(frozen=True, kw_only=True)
class LayerTimes:
    """Time of one run of a network on an engine, layer by layer.

    Attributes:
        ms: median time by layer of the network; 0 for a layer without time of its own.
    """

    label: str
    ms: Mapping[str, float]
    rest_ms: float

    @property
    def total_ms(self) -> float:
        """Time of one run, without the time between layers."""
        return sum(self.ms.values()) + self.rest_ms


def measure_engine_layers(
    files: Mapping[str, Path],
    layers: Sequence[str],
    *,
    engine: str = "openvino",
    batch_size: int = 1,
    precision: str | None = None,
    threads: int | None = None,
    warmup: int = 5,
    runs: int = 30,
    follow: bool = False,
    progress: Progress = _QUIET,
) -> dict[str, LayerTimes]:
    """Time the layers of several ONNX files (by name, of `export_onnx`) of one network, in turn; times by name of file.

    Time of fused nodes goes to the first of the network's layers, module paths, among them; with `follow`, that of
    activations, pools, quantizers and the like to the layer whose result they take. The engine reports the times of its
    layers, as `openvino` and `onnxruntime` do. A precision or threads of None are the engine's choice.

    Raises:
        EngineError: the engine cannot take a file, or does not report times.
    """
    if runs < 1:
        raise EngineError(f"measure_engine_layers: runs is {runs}: it must be 1 or more")
    with ExitStack() as stack:
        engines = {
            name: stack.enter_context(
                build_engine(path, engine, batch_size=batch_size, precision=precision, threads=threads, profile="yes")
            )
            for name, path in files.items()
        }
        seen: dict[str, list[dict[str, float]]] = {name: [] for name in files}
        progress.start("layer times", runs)
        for turn in range(-warmup, runs):
            for name, built in engines.items():
                built.run(random_inputs(built, name, batch_size))
                if turn >= 0 and not built.remembers_runs:
                    seen[name].append(built.layer_times_ms())
            if turn >= 0:
                progress.advance("layer times")
        progress.finish("layer times")
        seen |= {name: built.layer_runs_ms()[-runs:] for name, built in engines.items() if built.remembers_runs}
        return {
            name: _median(built, seen[name], layers, _owners(built, files[name], layers, follow))
            for name, built in engines.items()
        }


def _owners(engine: Engine, path: Path, layers: Sequence[str], follow: bool) -> dict[str, str]:
    graph = load_onnx(path).graph
    written, found = _node_of_output(graph), {}
    followed, last = _followed(graph, layers) if follow else {}, None
    for layer in engine.runtime_layers():
        names = [written.get(name, name) for name in (*layer.original_names, layer.name)]
        # The name of an inserted conversion contains its consumer's.
        owners = [owner for name in names if (owner := find_module(name, layers)) is not None]
        owners += [followed[part] for name in names if (part := _part_of(name, followed)) is not None]
        owners += [last] if follow and last is not None else []  # an engine's own node has no name of the file's
        if owners:
            found[layer.name] = last = owners[0]
    return found


def _node_of_output(graph: Any) -> dict[str, str]:
    """The node by the graph output that it writes: OpenVINO names the last layer by its result."""
    outputs = {value.name for value in graph.output}
    return {name: node.name for node in graph.node for name in node.output if name in outputs}


def _followed(graph: Any, layers: Sequence[str]) -> dict[str, str]:
    """The layer that each node belongs to or follows, by the node's name."""
    makers: dict[str, str] = {}
    found: dict[str, str] = {}
    for node in graph.node:
        before = (makers[name] for name in node.input if name in makers)
        owner = find_module(node.name, layers) or next(before, None)
        if owner is not None:
            found[node.name] = owner
            makers |= dict.fromkeys(node.output, owner)
    return found


def _part_of(name: str, nodes: Mapping[str, str]) -> str | None:
    """The longest node name that an engine's name is or begins with."""
    return name if name in nodes else max((node for node in nodes if node and node in name), key=len, default=None)


def _by_owner(times: Mapping[str, float], owners: Mapping[str, str]) -> dict[str, float]:
    """Sum times by the network's layer; "" holds the rest."""
    sums: dict[str, float] = {}
    for name, ms in times.items():
        owner = owners.get(name, "")
        sums[owner] = sums.get(owner, 0.0) + ms
    return sums


def _median(
    engine: Engine, runs: Sequence[Mapping[str, float]], layers: Sequence[str], owners: Mapping[str, str]
) -> LayerTimes:
    sums = [_by_owner(run, owners) for run in runs]

    def of(owner: str) -> float:
        return float(np.median([run.get(owner, 0.0) for run in sums]))

    return LayerTimes(label=engine.info.label, ms={layer: of(layer) for layer in layers}, rest_ms=of(""))
