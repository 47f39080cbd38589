"""Finds the first layer whose output on an engine is not the one that the ONNX file defines."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx.utils import Extractor

from compress.engines import Engine, build_engine
from compress.engines.base import Arrays
from compress.engines.onnx_file import existing_file
from compress.errors import EngineError
from compress.measure.parity import sqnr_db
from compress.onnx_graph.graph import WEIGHTED_OPS

LEAST_DB = 25.0
"""Signal to noise below which a tensor differs; differences of rounding, single steps, stay above it."""


@dataclass(frozen=True, kw_only=True)
class LayerDifference:
    """One tensor on the engine against the file.

    Attributes:
        node: of the ONNX file that computes it.
        sqnr_db: signal to noise of the engine's, in dB; inf if they are equal, -inf if the engine's is not finite.
        before_db: the least of those before it; far above `sqnr_db` if this layer is at fault.
    """

    node: str
    op_type: str
    tensor: str
    sqnr_db: float
    before_db: float = float("inf")


def cut_file(model: onnx.ModelProto, outputs: list[str], target: Path) -> Path:
    """Write the part of a model that computes `outputs`."""
    typed = onnx.shape_inference.infer_shapes(model)
    known = {value.name for value in (*typed.graph.value_info, *typed.graph.input, *typed.graph.output)}
    for name in set(outputs) - known:  # results of operators that onnx cannot infer
        typed.graph.value_info.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None))
    cut = Extractor(typed).extract_model([value.name for value in typed.graph.input], outputs)
    del cut.graph.value_info[:]  # engines infer the shapes of what is left
    onnx.save(cut, str(target))
    return target


def probe_file(onnx_path: Path | str, out: Path | str) -> tuple[LayerDifference, ...]:
    """Write a copy of an ONNX file whose inner tensors are outputs too, and return those in the order of the nodes.

    They are the inputs of quantizers (without these, the outputs of convolutions and products) and the file's outputs.
    """
    model = onnx.load(str(existing_file(onnx_path)))
    graph = model.graph
    produced = {name: node for node in graph.node for name in node.output}
    quantized = {node.input[0] for node in graph.node if node.op_type == "QuantizeLinear"} & set(produced)
    inner = quantized or {node.output[0] for node in graph.node if node.op_type in WEIGHTED_OPS}
    own = {value.name for value in graph.output}
    types = {value.name: value for value in onnx.shape_inference.infer_shapes(model).graph.value_info}
    graph.output.extend(types[name] for name in produced if name in inner - own and name in types)
    onnx.save(model, str(out))
    given = {value.name for value in graph.output}
    return tuple(
        LayerDifference(node=node.name or name, op_type=node.op_type, tensor=name, sqnr_db=float("inf"))
        for name, node in produced.items()
        if name in given
    )


def _run(engine: Engine, images: NDArray[Any]) -> Arrays:
    if len(engine.inputs) != 1:
        raise EngineError(f"{engine.info.label} has {len(engine.inputs)} inputs; layers are compared on images alone")
    return engine.run({engine.inputs[0].name: images})


def _compared(probe: LayerDifference, expected: Arrays, got: Arrays) -> LayerDifference:
    finite = np.isfinite(got[probe.tensor]).all()
    return replace(probe, sqnr_db=sqnr_db(expected[probe.tensor], got[probe.tensor]) if finite else float("-inf"))


def first_difference(
    onnx_path: Path | str,
    engine: str,
    images: NDArray[Any],
    *,
    precision: str | None = None,
    least_db: float = LEAST_DB,
    **options: Any,
) -> LayerDifference | None:
    """Find the first layer whose output on an engine is not ONNX Runtime's, node by node; None if there is none.

    Arguments are those of `build_engine`; images are (N, C, H, W) float32. A tensor below `least_db` differs.

    Raises:
        EngineError: the copy does not build or run.
    """
    with tempfile.TemporaryDirectory() as folder:
        probed = Path(folder) / "probed.onnx"
        probes = probe_file(onnx_path, probed)

        def build(path: Path | str) -> Engine:
            return build_engine(path, engine, batch_size=len(images), precision=precision, **options)

        with build_engine(probed, "onnxruntime", fuse="no") as reference, build(probed) as judged:
            expected, got = _run(reference, images), _run(judged, images)
        before = float("inf")
        for row in (_compared(probe, expected, got) for probe in probes):
            if row.sqnr_db < least_db:
                return replace(row, before_db=before)
            before = min(before, row.sqnr_db)

        model = onnx.load(str(onnx_path))

        def alone(probe: LayerDifference) -> LayerDifference:
            with build(cut_file(model, [probe.tensor], Path(folder) / "cut.onnx")) as judged:
                return _compared(probe, expected, _run(judged, images))

        return _first_of_parts(probes, alone, least_db)


def _first_of_parts(
    probes: Sequence[LayerDifference], alone: Callable[[LayerDifference], LayerDifference], least_db: float
) -> LayerDifference | None:
    """Search by halving for the first part of the file that differs; None if the whole file does not."""
    bad, good, low, high = alone(probes[-1]), None, -1, len(probes) - 1
    if bad.sqnr_db >= least_db:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        row = alone(probes[middle])
        if row.sqnr_db < least_db:
            bad, high = row, middle
        else:
            good, low = row, middle
    return replace(bad, before_db=float("inf") if good is None else good.sqnr_db)
