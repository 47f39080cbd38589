"""Channel scales after the layer: the same numbers, by ONNX Runtime without any optimization."""

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper, numpy_helper
from torch import nn

import compress
from compress.errors import ExportError
from compress.export.tensorrt import scales_on_outputs
from tests.exact import open_session

FLOAT = onnx.TensorProto.FLOAT


def run(proto, x):
    session = open_session(proto, optimize=False)
    return session.run(None, {session.get_inputs()[0].name: x})[0]


def layer(op, weight, scales, bias, x_shape, axis, **attributes):
    constants = {"q": weight, "s": scales, "z": np.zeros(scales.shape, np.int8)}
    inputs = ["x", "w"]
    if bias is not None:
        constants["b"] = bias
        inputs.append("b")
    nodes = [
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["w"], axis=axis),
        helper.make_node(op, inputs, ["y"], name="layer", **attributes),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", FLOAT, x_shape)],
        [helper.make_tensor_value_info("y", FLOAT, [None] * len(x_shape))],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)


CASES = {
    "Conv": ((6, 4, 3, 3), 0, {"pads": [1, 1, 1, 1]}, (2, 4, 5, 5), 6),
    "grouped Conv": ((6, 2, 3, 3), 0, {"group": 2, "pads": [1, 1, 1, 1]}, (2, 4, 5, 5), 6),
    "Conv 1d": ((6, 4, 3), 0, {}, (2, 4, 9), 6),
    "ConvTranspose": ((4, 6, 2, 2), 1, {"strides": [2, 2]}, (2, 4, 5, 5), 6),
    "Gemm": ((6, 4), 0, {"transB": 1}, (3, 4), 6),
    "MatMul": ((4, 6), 1, {}, (2, 3, 4), 6),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("with_bias", [True, False])
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**31), spread=st.floats(0, 4))
def test_computes_the_same(name, with_bias, seed, spread):
    shape, axis, attributes, x_shape, channels = CASES[name]
    op = name.split()[-2] if name == "Conv 1d" else name.split()[-1]
    rng = np.random.default_rng(seed)
    scales = (10.0 ** rng.uniform(-spread, 0, channels) * 0.01).astype(np.float32)
    weight = rng.integers(-127, 128, shape).astype(np.int8)
    bias = rng.normal(size=channels).astype(np.float32) if with_bias and op != "MatMul" else None
    proto = layer(op, weight, scales, bias, x_shape, axis, **attributes)
    x = rng.normal(size=x_shape).astype(np.float32)
    before = run(proto, x)
    assert scales_on_outputs(proto) == 1
    onnx.checker.check_model(proto, full_check=True)
    assert np.allclose(run(proto, x), before, rtol=1e-5, atol=1e-5 * np.abs(before).max())
    dequantize = next(node for node in proto.graph.node if node.op_type == "DequantizeLinear")
    constants = {t.name: numpy_helper.to_array(t) for t in proto.graph.initializer}
    assert constants[dequantize.input[1]].shape == () == constants[dequantize.input[2]].shape
    assert constants[dequantize.input[1]] == scales.max()


@pytest.mark.parametrize(
    ("op", "shape", "axis", "attributes", "x_shape"),
    [
        ("Conv", (6, 4, 3, 3), 1, {}, (2, 4, 5, 5)),  # scales of the input channels
        ("Gemm", (4, 4), 0, {"transB": 0}, (3, 4)),
        ("Gemm", (4, 4), 0, {"transB": 1, "alpha": 0.5}, (3, 4)),
        ("ConvTranspose", (4, 3, 2, 2), 1, {"group": 2}, (2, 4, 5, 5)),
    ],
)
def test_what_cannot_be_moved_stays(op, shape, axis, attributes, x_shape):
    weight = np.ones(shape, np.int8)
    proto = layer(op, weight, np.ones(shape[axis], np.float32), None, x_shape, axis, **attributes)
    before = proto.SerializeToString()
    assert scales_on_outputs(proto) == 0
    assert proto.SerializeToString() == before


def test_export_option(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3, bias=False)).eval()
    x = torch.randn(4, 3, 9, 9)
    qmodel = compress.quantize(model, x, [x], spec=compress.QuantSpec())
    files = {
        place: compress.export_onnx(qmodel, x, tmp_path / f"{place}.onnx", channel_scales=place)
        for place in ("weight", "output")
    }
    protos = {place: onnx.load(path) for place, path in files.items()}
    kinds = [node.op_type for node in protos["output"].graph.node]
    assert kinds.count("Mul") == 2 and kinds.count("Add") == 1
    assert "Mul" not in {node.op_type for node in protos["weight"].graph.node}
    results = [run(proto, x.numpy()) for proto in protos.values()]
    assert np.allclose(*results, atol=0.02 * np.abs(results[0]).max())  # a rounding may fall to the other step
    assert all(row.int8 for row in compress.audit_onnx(files["output"]).rows)


def test_another_place_is_refused(tmp_path):
    with pytest.raises(ExportError, match="channel_scales is 'both' .*weight, output"):
        compress.export_onnx(nn.Conv2d(3, 4, 3), torch.zeros(1, 3, 8, 8), tmp_path / "x.onnx", channel_scales="both")


@pytest.mark.parametrize("place", ["weight", "output"])
def test_fp8_in_a_half_precision_file(tmp_path, place):
    """Weights and zero points stay FP8 though all other floats become float16; ONNX Runtime gets torch's numbers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()
    x = torch.randn(4, 3, 9, 9)
    spec = compress.QuantSpec(
        weights=compress.WeightSpec(kind="e4m3"), activations=compress.ActivationSpec(kind="e4m3", calibrator="max")
    )
    qmodel = compress.quantize(model, x, [x], spec=spec)
    proto = onnx.load(compress.export_onnx(qmodel, x, tmp_path / "x.onnx", precision="fp16", channel_scales=place))
    types = {tensor.data_type for tensor in proto.graph.initializer}
    assert types <= {onnx.TensorProto.FLOAT8E4M3FN, onnx.TensorProto.FLOAT16, onnx.TensorProto.INT64}
    expected = qmodel(x).detach().numpy()
    assert np.abs(run(proto, x.numpy()) - expected).max() < 0.1 * np.abs(expected).max()
