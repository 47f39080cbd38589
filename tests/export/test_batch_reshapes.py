"""A Reshape that keeps the batch does not compute its size; ONNX Runtime says that the results stay the same."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from compress.export.openvino import batches_kept
from tests.exact import open_session


def model(nodes, inputs, constants):
    """A model of open batches, of which every input has the name of its own batch."""
    values = [helper.make_tensor_value_info(k, TensorProto.FLOAT, [*shape]) for k, shape in inputs.items()]
    results = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    tensors = [numpy_helper.from_array(np.asarray(v), k) for k, v in constants.items()]
    graph = helper.make_graph(nodes, "g", values, results, tensors)
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return proto


def computed(proto, **feeds):
    return open_session(proto).run(None, feeds)[0]


CONSTANTS = {"zero": np.int64(0), "axes": np.array([0]), "rest": np.array([-1]), "w": np.ones((4, 3, 3, 3), np.float32)}
ASKED = [
    helper.make_node("Shape", ["x"], ["s"]),
    helper.make_node("Gather", ["s", "zero"], ["n"]),
    helper.make_node("Unsqueeze", ["n", "axes"], ["n1"]),
]
CONV = helper.make_node("Conv", ["x", "w"], ["c"], strides=[2, 2])


@pytest.mark.parametrize("batch", ["batch", None])
@pytest.mark.parametrize("asked", [ASKED, [helper.make_node("Shape", ["x"], ["n1"], start=0, end=1)]])
def test_a_reshape_that_keeps_the_batch_computes_nothing(asked, batch):
    nodes = [*asked, CONV, helper.make_node("Concat", ["n1", "rest"], ["shape"], axis=0)]
    proto = model([*nodes, helper.make_node("Reshape", ["c", "shape"], ["y"])], {"x": (batch, 3, 9, 9)}, CONSTANTS)
    before = onnx.ModelProto.FromString(proto.SerializeToString())
    assert batches_kept(proto) == 1
    assert [node.op_type for node in proto.graph.node] == ["Conv", "Reshape"]
    for images in (1, 2, 5):
        x = np.random.default_rng(images).normal(size=(images, 3, 9, 9)).astype(np.float32)
        np.testing.assert_array_equal(computed(proto, x=x), computed(before, x=x))


def test_a_size_that_is_another_ones_stays_computed():
    nodes = [*ASKED, helper.make_node("Concat", ["n1", "rest"], ["shape"], axis=0)]
    reshape = helper.make_node("Reshape", ["other", "shape"], ["y"])
    proto = model([*nodes, reshape], {"x": ("batch", 3, 9, 9), "other": ("rows", 6)}, CONSTANTS)
    assert batches_kept(proto) == 0
    assert computed(proto, x=np.ones((4, 3, 9, 9), np.float32), other=np.ones((2, 6), np.float32)).shape == (4, 3)


def test_sizes_that_are_read_elsewhere_stay():
    nodes = [*ASKED, CONV, helper.make_node("Concat", ["n1", "rest"], ["shape"], axis=0)]
    nodes += [helper.make_node("Reshape", ["c", "shape"], ["flat"]), helper.make_node("Cast", ["n"], ["number"], to=1)]
    nodes += [helper.make_node("Mul", ["flat", "number"], ["y"])]
    proto = model(nodes, {"x": ("batch", 3, 9, 9)}, CONSTANTS)
    before = onnx.ModelProto.FromString(proto.SerializeToString())
    assert batches_kept(proto) == 1
    x = np.random.default_rng(0).normal(size=(3, 3, 9, 9)).astype(np.float32)
    np.testing.assert_array_equal(computed(proto, x=x), computed(before, x=x))


def test_a_second_computed_size_stays():
    nodes = [*ASKED, CONV, helper.make_node("Concat", ["rest", "n1"], ["shape"], axis=0)]
    reshape = helper.make_node("Reshape", ["c", "shape"], ["y"])
    assert batches_kept(model([*nodes, reshape], {"x": ("batch", 3, 9, 9)}, CONSTANTS)) == 0
