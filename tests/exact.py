"""INT8 results that are exact on every processor: sessions of ONNX Runtime, and the width of weights for OpenVINO."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from torch import nn

import compress
from compress.support.process import sums_bytes_in_16_bits

# On x86 without VNNI, OpenVINO's sums of products with weights of 8 bits saturate.
WEIGHTS = compress.WeightSpec(num_bits=7 if sums_bytes_in_16_bits() else 8)


def session_options() -> onnxruntime.SessionOptions:
    # Options with which ONNX Runtime's sums do not saturate either, and that keep it quiet.
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.x64quantprecision", "1")
    options.log_severity_level, options.intra_op_num_threads = 3, 1
    return options


def open_session(model: Path | str | onnx.ModelProto, *, optimize: bool = True) -> onnxruntime.InferenceSession:
    # Load a model; without `optimize` every node runs by itself, in the order of the file.
    options = session_options()
    if not optimize:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    source = model.SerializeToString() if isinstance(model, onnx.ModelProto) else str(model)
    return onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def optimized(
    model: Path | str, level: onnxruntime.GraphOptimizationLevel = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
) -> Path:
    # The file of what ONNX Runtime makes of a model as it loads it, beside the model.
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level, options.log_severity_level = level, 3
    path = Path(model).with_suffix(".optimized.onnx")
    options.optimized_model_filepath = str(path)
    onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
    return path


def kinds_on_engine(model: Path | str) -> list[str]:
    return [node.op_type for node in onnx.load(optimized(model)).graph.node]


def exported(
    model: nn.Module, x: torch.Tensor, path: Path, *, into: dict[str, Any] | None = None, **spec: Any
) -> tuple[torch.fx.GraphModule, Path]:
    # Quantize a model by a spec of these keys, and write it: the module and its file; `into` are options of the export.
    qmodel = compress.quantize(model.eval(), x, [x], spec=compress.QuantSpec(**spec))
    return qmodel, compress.export_onnx(qmodel, x, path, **(into or {}))


def on_engine(path: Path | str, name: str, x: np.ndarray | torch.Tensor, **options: Any) -> torch.Tensor:
    # Return the first result of a model with one input on one of compress's engines.
    with compress.build_engine(path, name, **options) as engine:
        return torch.from_numpy(next(iter(engine.run({engine.inputs[0].name: np.asarray(x)}).values())))


def compute(model: Path | str | onnx.ModelProto, x: np.ndarray, *, optimize: bool = True) -> np.ndarray:
    # Return the first result of a model with one input.
    session = open_session(model, optimize=optimize)
    return session.run(None, {session.get_inputs()[0].name: x})[0]
