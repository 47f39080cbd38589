"""INT8 results that are exact on every processor: sessions of ONNX Runtime, and the width of weights for OpenVINO."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime

from compress import WeightSpec
from compress.support.process import sums_bytes_in_16_bits

# On x86 without VNNI, OpenVINO's sums of products with weights of 8 bits saturate.
WEIGHTS = WeightSpec(num_bits=7 if sums_bytes_in_16_bits() else 8)


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


def compute(model: Path | str | onnx.ModelProto, x: np.ndarray, *, optimize: bool = True) -> np.ndarray:
    # Return the first result of a model with one input.
    session = open_session(model, optimize=optimize)
    return session.run(None, {session.get_inputs()[0].name: x})[0]
