"""Small ONNX files for the tests of engines and measurements."""

from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper, parser

CLASSIFIER = """
<ir_version: 8, opset_import: ["" : 19]>
classifier (float[batch, 3, 8, 8] input) => (float[batch, 5] logits) {
    convolved = Conv<pads = [1, 1, 1, 1]>(input, weight, bias)
    rectified = Relu(convolved)
    pooled = GlobalAveragePool(rectified)
    flat = Flatten(pooled)
    logits = Gemm<transB = 1>(flat, head, head_bias)
}
"""


def classifier(path: Path, *, metadata: dict[str, str] | None = None, batch: int | None = None, seed: int = 0) -> Path:
    return write(path, CLASSIFIER, weights(seed), metadata=metadata, batch=batch)


def weights(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = {"weight": (4, 3, 3, 3), "bias": (4,), "head": (5, 4), "head_bias": (5,)}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


QUANTIZED = """
<ir_version: 9, opset_import: ["" : 19]>
quantized (float[batch, 3, 8, 8] input) => (float[batch, 5] logits) {
    input_q = QuantizeLinear(input, input_scale, input_zero)
    input_dq = DequantizeLinear(input_q, input_scale, input_zero)
    weight_dq = DequantizeLinear<axis = 0>(weight_q, weight_scale, weight_zero)
    convolved = Conv<pads = [1, 1, 1, 1]>(input_dq, weight_dq, bias)
    rectified = Relu(convolved)
    rectified_q = QuantizeLinear(rectified, rectified_scale, rectified_zero)
    rectified_dq = DequantizeLinear(rectified_q, rectified_scale, rectified_zero)
    pooled = GlobalAveragePool(rectified_dq)
    flat = Flatten(pooled)
    logits = Gemm<transB = 1>(flat, head, head_bias)
}
"""


def quantized_classifier(path: Path) -> Path:
    values = weights()
    scale = (np.abs(values["weight"]).max(axis=(1, 2, 3)) / 127).astype(np.float32)
    steps = np.rint(values.pop("weight") / scale[:, None, None, None]).astype(np.int8)
    values |= {"weight_q": steps, "weight_scale": scale, "weight_zero": np.zeros(4, np.int8)}
    values |= {"input_scale": np.float32(4 / 127), "input_zero": np.int8(0)}
    values |= {"rectified_scale": np.float32(20 / 255), "rectified_zero": np.uint8(0)}
    return write(path, QUANTIZED, values)


def write(
    path: Path,
    text: str,
    values: dict[str, np.ndarray],
    *,
    metadata: dict[str, str] | None = None,
    batch: int | None = None,
) -> Path:
    model = parser.parse_model(text)
    model.graph.initializer.extend(numpy_helper.from_array(np.asarray(v), name) for name, v in values.items())
    onnx.helper.set_model_props(model, metadata or {})
    if batch is not None:
        for value in (*model.graph.input, *model.graph.output):
            value.type.tensor_type.shape.dim[0].dim_value = batch
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, str(path))
    return path


def images(count: int = 2, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, 3, 8, 8)).astype(np.float32)
