"""ONNX operators against ONNX's own reference evaluator."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from compress.graph.ops import ONNX_KINDS
from compress.graph.traits import TRAITS

ATTRIBUTES = {"DepthToSpace": {"blocksize": 2}, "SpaceToDepth": {"blocksize": 2}, "LRN": {"size": 3}}
ATTRIBUTES |= {"MaxPool": {"kernel_shape": [2, 2]}, "AveragePool": {"kernel_shape": [2, 2]}, "Cast": {"to": 1}}
NEED_MORE = {"Split", "Resize", "Concat", "Shape", "Clip", "Einsum"}
ALONE = [name for name in ONNX_KINDS if onnx.defs.get_schema(name).min_input == 1 and name not in NEED_MORE]
"""Operators that need one tensor and nothing else."""


def run(name, x):
    result = helper.make_tensor_value_info("y", TensorProto.UNDEFINED, None)
    node = helper.make_node(name, ["x"], ["y"], **ATTRIBUTES.get(name, {}))
    graph = helper.make_graph(
        [node], "one", [helper.make_tensor_value_info("x", TensorProto.FLOAT, list(x.shape))], [result]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)])
    return ReferenceEvaluator(model).run(None, {"x": x})[0]


def test_every_operator_exists_and_has_a_row():
    assert all(onnx.defs.has(name) and kind in TRAITS for name, kind in ONNX_KINDS.items())


@pytest.mark.parametrize("name", ALONE)
def test_the_claims_of_the_row_hold(name):
    traits = TRAITS[ONNX_KINDS[name]]
    x = np.random.default_rng(0).integers(-40, 41, (2, 4, 4, 4)).astype(np.float32) / 16
    x = np.abs(x) + 1 / 16 if name in {"Sqrt", "Log"} else x
    y = run(name, x)
    if traits.scales_linearly:
        np.testing.assert_allclose(run(name, 3 * x), 3 * y, rtol=1e-5)
    if traits.keeps_zero:
        assert not run(name, np.zeros_like(x)).any()
    if traits.non_negative == "always":
        assert (y >= 0).all()
    if traits.non_negative == "if inputs are":
        assert (run(name, np.abs(x) + 1 / 16) >= 0).all()
    if traits.moves_elements:
        assert np.isin(y, x).all()
    if traits.commutes_with_quantization:
        np.testing.assert_array_equal(run(name, np.round(x * 4) / 4), np.round(y * 4) / 4)
