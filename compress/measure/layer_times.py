"""How long each layer of a network takes on an engine, in several forms of the network, measured in turn.

An engine fuses and reorders, so what it times are its own layers; each is charged to the network's layer that stands
first among the names of what was fused into it, which are those that export gives (`/layer1/0/conv1/Conv`). A
convolution with the add, activation and quantizer behind it is one such layer. What belongs to none (pools,
conversions at the input) is the rest.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx

from compress.engines import Engine, build_engine
from compress.engines.onnx_file import read_onnx
from compress.errors import EngineError
from compress.progress import NoProgress, Progress

_QUIET = NoProgress()


@dataclass(frozen=True, kw_only=True)
class LayerTimes:
    """Time of one run of a network on an engine, layer by layer.

    Attributes:
        label: of the engine.
        ms: median time by layer of the network; a layer that took none of its own is 0.
        rest_ms: of everything else.
    """

    label: str
    ms: Mapping[str, float]
    rest_ms: float

    @property
    def total_ms(self) -> float:
        """Of one run, without what the engine does between layers."""
        return sum(self.ms.values()) + self.rest_ms


def measure_layer_times(
    files: Mapping[str, Path],
    layers: Sequence[str],
    *,
    engine: str = "openvino",
    batch_size: int = 1,
    precision: str | None = None,
    threads: int | None = None,
    warmup: int = 5,
    runs: int = 30,
    progress: Progress = _QUIET,
) -> dict[str, LayerTimes]:
    """Time the layers of several ONNX files of one network, all in turn.

    Args:
        files: such as the float network and quantized ones, by name; written by `export_onnx`.
        layers: module paths of the network's layers.
        engine: one that tells its layers' times: `openvino`.
        batch_size: images of one run.
        precision: of what is not quantized; None = the engine's own choice.
        threads: CPU threads of one run; None = the engine's own choice.
        warmup: runs of each that are not timed.
        runs: timed runs of each.
        progress: hears of every round.

    Returns:
        Times by the names of `files`.

    Raises:
        EngineError: a file that the engine cannot take, or an engine that does not tell.
    """
    if runs < 1:
        raise EngineError(f"measure_layer_times: runs is {runs}: it must be 1 or more")
    with ExitStack() as stack:
        engines = {
            name: stack.enter_context(
                build_engine(path, engine, batch_size=batch_size, precision=precision, threads=threads, profile="yes")
            )
            for name, path in files.items()
        }
        owners = {name: _owners(built, files[name], layers) for name, built in engines.items()}
        seen: dict[str, list[dict[str, float]]] = {name: [] for name in files}
        progress.start("layer times", runs)
        for turn in range(-warmup, runs):
            for name, built in engines.items():
                built.run(_images(built, batch_size))
                if turn >= 0:
                    seen[name].append(_charged(built.layer_times_ms(), owners[name]))
            if turn >= 0:
                progress.advance("layer times")
        progress.finish("layer times")
        return {name: _median(built.info.label, seen[name], layers) for name, built in engines.items()}


def _images(engine: Engine, batch_size: int) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    return {
        tensor.name: generator.standard_normal((batch_size, *tensor.shape[1:])).astype(tensor.dtype)
        for tensor in engine.inputs
    }


def _owners(engine: Engine, path: Path, layers: Sequence[str]) -> dict[str, str]:
    """The network's layer for each layer of the engine that belongs to one."""
    prefixes = {f"/{layer.replace('.', '/')}/": layer for layer in layers}
    pattern = re.compile("|".join(re.escape(p) for p in sorted(prefixes, key=len, reverse=True)) or "(?!)")
    written = _node_of_output(path)
    found = {}
    for layer in engine.runtime_layers():
        for name in (*layer.original_names, layer.name):  # an inserted conversion has its reader's name in its own
            match = pattern.search(f"{written.get(name, name)}/")
            if match:
                found[layer.name] = prefixes[match.group()]
                break
    return found


def _node_of_output(path: Path) -> dict[str, str]:
    """Node by the output of the graph that it writes: OpenVINO calls the last layer by its result."""
    read_onnx(path)
    graph = onnx.load(str(path), load_external_data=False).graph
    outputs = {value.name for value in graph.output}
    return {name: node.name for node in graph.node for name in node.output if name in outputs}


def _charged(times: Mapping[str, float], owners: Mapping[str, str]) -> dict[str, float]:
    """Times by the network's layer; "" holds the rest."""
    sums: dict[str, float] = {}
    for name, ms in times.items():
        owner = owners.get(name, "")
        sums[owner] = sums.get(owner, 0.0) + ms
    return sums


def _median(label: str, runs: Sequence[Mapping[str, float]], layers: Sequence[str]) -> LayerTimes:
    def of(owner: str) -> float:
        return float(np.median([run.get(owner, 0.0) for run in runs]))

    return LayerTimes(label=label, ms={layer: of(layer) for layer in layers}, rest_ms=of(""))
