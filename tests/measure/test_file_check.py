"""A quantized file beside its float file: what it costs, and an engine that computes something else."""

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from compress.measure.file_check import check_onnx
from compress.onnx_ptq.quantize import quantize_onnx
from compress.quantization.spec import QuantSpec
from tests.onnx_ptq.files import model_of, weights

X = np.random.default_rng(0).standard_normal((12, 3, 8, 8)).astype(np.float32)


@pytest.fixture
def files(tmp_path):
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], name="first"),
        helper.make_node("ReduceMax", ["a"], ["m"], name="largest", axes=[2, 3], keepdims=1),
        helper.make_node("Conv", ["m", "v"], ["y"], name="second"),
    ]
    proto = model_of(nodes, {"w": weights(8, 3, 3, 3), "v": weights(4, 8, 1, 1)}, shape=("n", 3, 8, 8))
    onnx.save(proto, tmp_path / "float.onnx")
    spec = QuantSpec(target="openvino")
    return tmp_path / "float.onnx", quantize_onnx(tmp_path / "float.onnx", [X], spec=spec, out=tmp_path / "q.onnx")


def test_a_good_file_has_no_warning(files):
    found = check_onnx(*files, X, target="openvino")
    assert (found.images, found.engine, found.warning) == (8, "openvino", "")
    assert found.written_db > 25
    assert found.engine_db > 25


def test_an_engine_that_computes_something_else_is_said(files):
    """Without the maximum that keeps them apart, OpenVINO fuses a reduction with the quantizer after it."""
    float_path, path = files
    proto = onnx.load(path)
    (apart,) = [node for node in proto.graph.node if node.op_type == "Max"]
    for node in proto.graph.node:
        if node.op_type == "ReduceMax":
            node.output[0] = apart.output[0]
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
