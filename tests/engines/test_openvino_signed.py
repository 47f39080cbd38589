"""OpenVINO and signed activations that are concatenated: the oracle is ONNX Runtime without optimizations."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from compress import build_engine
from compress.engines.unsigned import joins_signed, to_unsigned
from tests.exact import open_session

RNG = np.random.default_rng(0)
X = RNG.standard_normal((2, 8, 12, 12)).astype(np.float32)


def joined():
    """Two halves, quantized with zero points 0 and -3, concatenated, and a convolution of INT8 weights."""
    init = {
        "s": np.float32(0.03),
        "s2": np.float32(0.02),
        "z": np.int8(0),
        "z2": np.int8(-3),
        "q": RNG.integers(-127, 128, (8, 16, 3, 3)).astype(np.int8),
        "ws": np.full(8, 0.005, np.float32),
        "wz": np.zeros(8, np.int8),
    }
    node = helper.make_node
    nodes = [
        node("QuantizeLinear", ["x", "s", "z"], ["aq"]),
        node("DequantizeLinear", ["aq", "s", "z"], ["a"]),
        node("QuantizeLinear", ["x", "s2", "z2"], ["bq"]),
        node("DequantizeLinear", ["bq", "s2", "z2"], ["b"]),
        node("Concat", ["a", "b"], ["c"], axis=1),
        node("DequantizeLinear", ["q", "ws", "wz"], ["w"], axis=0),
        node("Conv", ["c", "w"], ["y"], pads=[1] * 4),
    ]
    graph = helper.make_graph(
        nodes,
        "joined",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 8, 12, 12])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 8, 12, 12])],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in init.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)


def by_runtime(model):
    session = open_session(model, optimize=False)
    return session.run(None, {"x": X})[0]


@pytest.mark.parametrize("external", [False, True])
def test_openvino_computes_what_the_file_says(tmp_path, external):
    pytest.importorskip("openvino")
    model, path = joined(), tmp_path / "joined.onnx"
    expected = by_runtime(model)
    onnx.save(model, path, save_as_external_data=external, size_threshold=0, location="weights")
    with build_engine(path, "openvino", batch_size=2, precision="f32") as engine:
        found = engine.run({"x": X})["y"]
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())


def test_the_shift_changes_no_number():
    model = joined()
    before = by_runtime(model)
    assert joins_signed(model)
    to_unsigned(model)
    onnx.checker.check_model(model)
    assert not joins_signed(model)
    np.testing.assert_array_equal(by_runtime(model), before)
    points = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    seen = [points[n.input[2]] for n in model.graph.node if n.op_type == "QuantizeLinear"]
    assert [(int(p), p.dtype) for p in seen] == [(128, np.uint8), (125, np.uint8)]


def test_integers_that_other_nodes_read_stay_signed():
    model = joined()
    model.graph.node.append(helper.make_node("Cast", ["aq"], ["kept"], to=TensorProto.INT32))
    model.graph.output.append(helper.make_tensor_value_info("kept", TensorProto.INT32, None))
    to_unsigned(model)
    assert next(n.input[2] for n in model.graph.node if n.op_type == "QuantizeLinear") == "z"
