"""A quantized file beside its float file: what it costs, and an engine that computes something else."""

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from compress import QuantSpec, check_onnx, quantize_onnx
from tests.exact import WEIGHTS
from tests.onnx_ptq.files import model_of, weights

X = np.random.default_rng(0).standard_normal((12, 3, 8, 8)).astype(np.float32)


@pytest.fixture
def files(tmp_path):
    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["a"], name="first"),
        helper.make_node("Conv", ["a", "v"], ["y"], name="second"),
        helper.make_node("Shape", ["x"], ["sizes"]),
        helper.make_node("Gather", ["sizes", "zero"], ["images"]),
        helper.make_node("ConstantOfShape", ["images"], ["states"]),
    ]
    constants = {"w": weights(8, 3, 3, 3), "v": weights(4, 8, 1, 1), "b": 3 * weights(8), "zero": np.zeros(1, np.int64)}
    proto = model_of(nodes, constants, shape=("n", 3, 8, 8))
    proto.graph.output.append(helper.make_tensor_value_info("states", 1, ["n"]))
    onnx.save(proto, tmp_path / "float.onnx")
    spec = QuantSpec(target="openvino", weights=WEIGHTS)
    return tmp_path / "float.onnx", quantize_onnx(tmp_path / "float.onnx", [X], spec=spec, out=tmp_path / "q.onnx")


def test_a_good_file_has_no_warning(files):
    found = check_onnx(*files, X, target="openvino")
    assert (found.images, found.engine, found.warning) == (8, "openvino", "")
    assert found.written_db > 25
    assert found.engine_db > 25


def test_an_engine_that_computes_something_else_is_said(files):
    """With the bias in the convolution, OpenVINO uses that of one channel for all where the batch is open."""
    float_path, path = files
    proto = onnx.load(path)
    conv = next(node for node in proto.graph.node if node.name == "first")
    apart = next(node for node in proto.graph.node if node.op_type == "Add")
    bias = next(numpy_helper.to_array(t) for t in proto.graph.initializer if t.name == apart.input[1])
    proto.graph.initializer.append(numpy_helper.from_array(bias.reshape(-1), "bias"))
    conv.input.append("bias")
    conv.output[0] = apart.output[0]
    proto.graph.node.remove(apart)
    onnx.save(proto, path)
    found = check_onnx(float_path, path, X, target="openvino")
    assert found.engine_db < found.written_db - 20
    assert "openvino computes something else than the file says" in found.warning


def test_a_file_far_from_float_is_said(files):
    float_path, path = files
    proto = onnx.load(path)
    for tensor in proto.graph.initializer:
        if tensor.name.endswith("_scale") and not tensor.dims:  # of the activations
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) * np.float32(30), tensor.name))
    onnx.save(proto, path)
    found = check_onnx(float_path, path, X, target="tensorrt")
    assert (found.engine, found.engine_db) == ("", None)
    assert "far from float" in found.warning
    assert "--mend-sqnr" in found.warning
