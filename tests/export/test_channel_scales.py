import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from torch import nn

import compress
from analysis.engine_check.run import ask
from compress.errors import ExportError
from compress.export.openvino import zero_points_into_biases
from compress.export.targets import pads_into_convolutions
from compress.export.tensorrt import scales_on_outputs
from compress.measure.parity import layer_parity
from compress.quantization import TARGETS
from tests.exact import WEIGHTS, compute, exported
from tests.further import further
from tests.networks import Net
from tests.onnx_models import onnx_model
from tests.onnx_ptq.files import batches, export, model_of, weights

FLOAT = onnx.TensorProto.FLOAT


def run(proto, x):
    return compute(proto, x, optimize=False)


def layer(op, weight, scales, bias, x_shape, axis, **attributes):
    held = {} if bias is None else {"b": bias}
    constants = {"q": weight, "s": scales, "z": np.zeros(scales.shape, np.int8), **held}
    nodes = [
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["w"], axis=axis),
        helper.make_node(op, ["x", "w", *held], ["y"], name="layer", **attributes),
    ]
    return onnx_model(nodes, {"x": x_shape}, {"y": [None] * len(x_shape)}, constants)


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
@settings(max_examples=8)
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
    assert_stays(
        scales_on_outputs, layer(op, weight, np.ones(shape[axis], np.float32), None, x_shape, axis, **attributes)
    )


def assert_stays(rewrite, proto):
    before = proto.SerializeToString()
    assert rewrite(proto) == 0
    assert proto.SerializeToString() == before


def test_export_option(tmp_path):
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
    # Weights and zero points stay FP8 though all other floats become float16; ONNX Runtime gets torch's numbers.
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


# Zero points move into the biases of convolutions without padding; the reference evaluator sees no difference.

GENERATOR = np.random.default_rng(0)
X = GENERATOR.standard_normal((2, 4, 6, 6)).astype(np.float32)


def quantized(*, groups=1, size=1, bias=True, zero_point=128, dtype=np.float32, axis=0, result=False, **attributes):
    q = GENERATOR.integers(-127, 128, (8, 4 // groups, size, size)).astype(np.int8)
    constants = {
        "scale": np.array(0.02, dtype),
        "zero": np.array(zero_point, np.uint8),
        "q": q,
        "steps": (0.01 * (1 + GENERATOR.random(8 if axis == 0 else ()))).astype(dtype),
        "none": np.zeros(8 if axis == 0 else (), np.int8),
        "b": GENERATOR.standard_normal(8).astype(dtype),
    }
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["integers"]),
        helper.make_node("DequantizeLinear", ["integers", "scale", "zero"], ["values"], name="pair"),
        helper.make_node("DequantizeLinear", ["q", "steps", "none"], ["w"], axis=0),
        helper.make_node("Conv", ["values", "w", *(["b"] if bias else [])], ["c"], group=groups, **attributes),
        helper.make_node("ReduceSum", ["c"], ["a"], keepdims=0),
        helper.make_node("ReduceSum", ["values" if result else "c"], ["s"], keepdims=0),
        helper.make_node("Add", ["a", "s"], ["y"]),
    ]
    model = model_of(nodes, {k: v for k, v in constants.items() if bias or k != "b"}, rank=0, opset=19)
    model.ir_version = 9
    model.graph.output.append(
        helper.make_tensor_value_info("c", helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), list("nchw"))
    )
    return model


MOVED = {
    "plain": {},
    "without a bias": {"bias": False},
    "groups, stride and window": {"groups": 2, "size": 3, "strides": [2, 2], "pads": [0, 0, 0, 0]},
    "one scale": {"axis": None, "auto_pad": "VALID"},
    "another zero point": {"zero_point": 77},
    "a sum beside it": {"result": True},
}
STAYS = {
    "padding": {"size": 3, "pads": [1, 1, 1, 1]},
    "automatic padding": {"size": 3, "auto_pad": "SAME_UPPER"},
    "no zero point": {"zero_point": 0},
    "half precision": {"dtype": np.float16},
}


@pytest.mark.parametrize("case", [*MOVED, *STAYS])
def test_zero_points(case):
    model = quantized(**MOVED.get(case, STAYS.get(case)))
    x = X.astype(np.float16 if case == "half precision" else np.float32)
    if case in STAYS:
        assert_stays(zero_points_into_biases, model)
        return
    before = ReferenceEvaluator(model).run(["c", "y"], {"x": x})
    assert zero_points_into_biases(model)
    onnx.checker.check_model(model)
    for a, b in zip(ReferenceEvaluator(model).run(["c", "y"], {"x": x}), before, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    pairs = [node for node in model.graph.node if node.op_type == "DequantizeLinear" and node.input[0] == "integers"]
    assert [node.name for node in pairs] == (
        ["pair", "pair_shifted"] if case == "a sum beside it" else ["pair_shifted"]
    )


def bottlenecks():
    # Signed tensors that a convolution without padding reads: alone, beside a sum, and beside a concat.
    def run(net, x):
        x = net.stem(x)
        x = net.narrow(net.wide(x).clamp(0, 6)) + x
        return net.last(torch.cat([x, x], 1)).mean((2, 3)) + net.beside(x).mean((2, 3))

    return Net(
        run,
        stem=nn.Conv2d(4, 8, 3, padding=1),
        wide=nn.Conv2d(8, 16, 1),
        narrow=nn.Conv2d(16, 8, 1),
        last=nn.Conv2d(16, 8, 3, padding=1),
        beside=nn.Conv2d(8, 8, 2, stride=2, bias=False),
    )


def reparametrized(stride):
    # Two branches with a stride on one signed tensor, as a MobileOne or FastViT begins: one pads, one does not.
    def run(net, x):
        x = net.stem(x)
        return net.last(nn.functional.gelu(net.scale(x) + net.wide(x)))

    return Net(
        run,
        stem=nn.Conv2d(4, 8, 3, 1, 1),
        last=nn.Conv2d(16, 8, 1),
        scale=nn.Conv2d(8, 16, 1, stride),
        wide=nn.Conv2d(8, 16, 3, stride, 1),
    )


@pytest.mark.parametrize("stride", [1, 2])
def test_openvino_computes_both_branches_in_8_bits(tmp_path, stride):
    answer = ask(reparametrized(stride).eval(), torch.randn(2, 4, 32, 32), "openvino", tmp_path)
    assert len(answer.int8) == 4 and answer.lost == ()


def test_engines_and_parity_follow(tmp_path):
    x = torch.randn(8, 4, 16, 16)
    qmodel, path = exported(bottlenecks(), x, tmp_path / "m.onnx", target="openvino", weights=WEIGHTS)
    kinds = [node.name for node in onnx.load(path).graph.node if node.name.endswith("_shifted")]
    assert len(kinds) == 2 and compress.audit_onnx(path).int8_share == 1
    for engine, precision in (("onnxruntime", None), ("openvino", "f32")):
        found = layer_parity(qmodel, path, x, engine=engine, precision=precision)
        assert found.first is None and found.missing == () and found.logits.sqnr_db > 30, found.verdict


# Padding moves into convolutions without a change of the result, and stays where it cannot.

PADDING_X = np.random.default_rng(0).standard_normal((2, 3, 8, 8)).astype(np.float32)


def padded(amounts, consumers=("Conv",), filling=0.0, **attributes):
    nodes = [helper.make_node("Pad", ["x", "pads", "value"], ["p"], **attributes)]
    for i, op in enumerate(consumers):
        inputs = ["p", "w"] if op == "Conv" else ["p"]
        options = {"pads": [1, 0, 0, 2], "strides": [2, 2]} if op == "Conv" else {}
        nodes.append(helper.make_node(op, inputs, [f"c{i}"], **options))
    nodes.append(helper.make_node("Identity", ["c0"], ["y"]))
    channels = 3 + amounts[1] + amounts[5]
    constants = {
        "pads": np.array(amounts, np.int64),
        "value": np.float32(filling).reshape(()),
        "w": weights(4, channels, 3, 3),
    }
    return model_of(nodes, constants)


@pytest.mark.parametrize("consumers", [("Conv",), ("Conv", "Conv")])
def test_convolutions_pad_themselves(consumers):
    model = padded([0, 0, 0, 1, 0, 0, 1, 2], consumers)
    before = ReferenceEvaluator(model).run(None, {"x": PADDING_X})[0]
    assert pads_into_convolutions(model) == 1
    onnx.checker.check_model(model, full_check=True)
    assert "Pad" not in {node.op_type for node in model.graph.node}
    np.testing.assert_array_equal(ReferenceEvaluator(model).run(None, {"x": PADDING_X})[0], before)


@pytest.mark.parametrize(
    "model",
    [
        padded([0, 0, 0, 1, 0, 0, 1, 0], filling=1.0),
        padded([0, 1, 0, 0, 0, 0, 0, 0]),
        padded([0, 0, 0, -1, 0, 0, 0, 0]),
        padded([0, 0, 0, 1, 0, 0, 1, 0], mode="reflect"),
        padded([0, 0, 0, 1, 0, 0, 1, 0], ("Conv", "Relu")),
    ],
    ids=["ones", "channels", "crop", "reflect", "another consumer"],
)
def test_other_padding_stays(model):
    assert_stays(pads_into_convolutions, model)


@pytest.mark.parametrize("target", further(TARGETS, ["tensorrt", "openvino", "onnxruntime", "litert"]))
def test_a_quantizer_is_placed_before_the_padding(tmp_path, target):
    # So that the convolution reads it directly, in exported models and in quantized files alike.
    first, second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, 2)  # TensorFlow's padding of a convolution of stride 2
    model = Net(lambda net, x: net.second(F.pad(F.relu(net.first(x)), (0, 1, 0, 1))), first=first, second=second).eval()
    data = batches()
    spec = compress.QuantSpec(target=target)
    qmodel = compress.quantize(model, data[0], data, spec=spec)
    made = [
        compress.export_onnx(qmodel, data[0], tmp_path / "torch.onnx"),
        compress.quantize_onnx(export(model, tmp_path / "float.onnx"), data, spec=spec),
    ]
    for path in made:
        nodes = onnx.load(path).graph.node
        makers = {name: node.op_type for node in nodes for name in node.output}
        assert "Pad" not in makers.values()
        assert [makers[node.input[0]] for node in nodes if node.op_type == "Conv"] == ["DequantizeLinear"] * 2
    results = [compute(path, data[0].numpy()) for path in made]
    np.testing.assert_allclose(*results, atol=np.abs(results[0]).max() / 50)
