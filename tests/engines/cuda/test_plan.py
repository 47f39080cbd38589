import warnings
from functools import partial
from unittest.mock import patch

import numpy as np
import onnx
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.lib.stride_tricks import sliding_window_view
from onnx import helper, numpy_helper
from onnx.backend.test.case import base
from onnx.backend.test.loader import load_model_tests
from onnx.reference.ops import op_pool_common

from compress.engines.cuda.onnx_ops import OPERATIONS, apply
from compress.engines.cuda.plan.activation import RELU
from compress.engines.cuda.plan.graph import _attribute, _on_meta
from compress.engines.cuda.plan.layout import lay_out
from compress.engines.cuda.plan.lower import make_plan
from compress.engines.cuda.plan.steps import Attention, Convolution, LayerNorm, Linear
from compress.errors import EngineError
from tests.engines.cuda.qdq import Builder, convnext, windows
from tests.engines.cuda.running import compare_steps, kinds, run
from tests.onnx_models import onnx_model


def products(path):
    return [step for step in make_plan(path, batch_size=2).steps if isinstance(step, (Convolution, Linear))]


def check(path, x, *, share=1e-3):
    # Codes and values are those of ONNX Runtime, but for a share of ties.
    compared, codes, differ, worst = compare_steps(path, x)
    assert compared
    assert differ <= max(3, share * codes)
    assert worst < 1e-4


def residual_block(b, rounded):
    x = b.quantize("input")
    y = b.quantize(b.op("Relu", b.conv(x, 8)))
    y = b.conv(y, 8)
    shortcut = b.quantize(b.conv(x, 8, taps=1, padding=0))
    y = b.quantize(y) if rounded else y
    return b.quantize(b.op("Relu", b.op("Add", y, shortcut)))


@pytest.mark.parametrize("unsigned", [False, True])
@pytest.mark.parametrize("rounded", [False, True])
def test_a_residual_block_is_three_convolutions(tmp_path, rounded, unsigned):
    b = Builder((2, 3, 7, 6), unsigned=unsigned)
    path = b.save(tmp_path / "m.onnx", residual_block(b, rounded))
    steps = products(path)
    assert kinds(path)[1:-1] == ["Convolution"] * 3  # before: the input's quantizer; after: a Dequantize for the output
    last = next(step for step in steps if step.epilogue.residual.name)
    assert last.epilogue.second == RELU or last.epilogue.out.grid.low == last.epilogue.out.grid.zero
    assert last.epilogue.residual.grid is not None
    assert (last.epilogue.middle is not None) == rounded
    check(path, b.x)


ACTIVATIONS = {
    "relu": lambda b, x: b.op("Relu", x),
    "relu6": lambda b, x: b.op("Clip", x, b.constant(np.float32(0)), b.constant(np.float32(6))),
    "silu": lambda b, x: b.op("Mul", x, b.op("Sigmoid", x)),
    "hard_swish": lambda b, x: b.op("HardSwish", x),
    "hard_swish of parts": lambda b, x: b.op(
        "Mul",
        x,
        b.op(
            "Div",
            b.op(
                "Clip", b.op("Add", x, b.constant(np.float32(3))), b.constant(np.float32(0)), b.constant(np.float32(6))
            ),
            b.constant(np.float32(6)),
        ),
    ),
    "gelu": lambda b, x: b.op(
        "Mul",
        x,
        b.op(
            "Mul",
            b.constant(np.float32(0.5)),
            b.op("Add", b.constant(np.float32(1)), b.op("Erf", b.op("Div", x, b.constant(np.float32(np.sqrt(2)))))),
        ),
    ),
    "leaky_relu": lambda b, x: b.op("LeakyRelu", x, alpha=0.1),
    "sigmoid": lambda b, x: b.op("Sigmoid", x),
    "hard_sigmoid": lambda b, x: b.op("HardSigmoid", x, alpha=1 / 6, beta=0.5),
    "tanh": lambda b, x: b.op("Tanh", x),
    "elu": lambda b, x: b.op("Elu", x),
    "mish": lambda b, x: b.op("Mul", x, b.op("Tanh", b.op("Softplus", x))),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_is_part_of_the_convolution(tmp_path, name):
    b = Builder((2, 4, 6, 6))
    y = b.quantize(ACTIVATIONS[name](b, b.conv(b.quantize("input"), 16)))
    path = b.save(tmp_path / "m.onnx", y)
    (step,) = products(path)
    kind = {"relu": "none", "relu6": "clip"}.get(name, name.removesuffix(" of parts"))  # ReLU: the grid begins at 0
    assert step.epilogue.first.kind == kind
    assert len(kinds(path)) == 3
    check(path, b.x)


def test_what_no_epilogue_computes_stays_apart(tmp_path):
    # A tensor that two operations read is written; a sum of a tensor with itself is no residual.
    b = Builder((2, 4, 6, 6))
    y = b.conv(b.quantize("input"), 8)
    y = b.quantize(b.op("Add", y, y))
    path = b.save(tmp_path / "m.onnx", y)
    assert not products(path)[0].epilogue.residual.name
    check(path, b.x)


def test_factors_and_biases_of_channels_fold(tmp_path):
    b = Builder((2, 4, 6, 6))
    y = b.conv(b.quantize("input"), 8, bias=False)
    y = b.op("Mul", y, b.constant(b.rng.standard_normal((1, 8, 1, 1)).astype(np.float32)))
    y = b.op("Sub", b.constant(b.rng.standard_normal((8, 1, 1)).astype(np.float32)), y)
    path = b.save(tmp_path / "m.onnx", b.quantize(b.op("Relu", y)))
    assert kinds(path)[1] == "Convolution"
    assert len(kinds(path)) == 3
    check(path, b.x)


@pytest.mark.parametrize("ceil", [0, 1])
def test_pools_concatenations_and_splits(tmp_path, ceil):
    b = Builder((2, 3, 9, 9))
    x = b.quantize(b.op("Relu", b.conv(b.quantize("input"), 16)))
    pooled = b.op("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    window = {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1], "count_include_pad": 0}
    averaged = b.op("AveragePool", x, ceil_mode=ceil, **window)
    left = b.op("Relu", b.conv(pooled, 16, taps=1, padding=0))
    right = b.op("Relu", b.conv(b.quantize(averaged), 32, taps=1, padding=0))
    joined = b.quantize(b.op("Concat", left, right, axis=1))
    first, _ = b.op("Split", joined, b.constant(np.array([32, 16])), outputs=2, axis=1)
    y = b.op("GlobalAveragePool", b.quantize(b.conv(first, 8)))
    y = b.op("Flatten", b.quantize(y))
    path = b.save(tmp_path / "m.onnx", b.linear(y, 5))
    assert not [kind for kind in kinds(path) if kind.startswith(("FloatOperation", "Copy"))]
    check(path, b.x)


def test_depthwise_grouped_dilated_and_padded_convolutions(tmp_path):
    b = Builder((2, 8, 11, 9))
    x = b.quantize(b.op("Relu", b.conv(b.quantize("input"), 8, groups=8)))
    x = b.quantize(b.conv(x, 16, groups=4))
    x = b.quantize(b.conv(x, 8, dilation=2, padding=2))
    x = b.op("Pad", x, b.constant(np.array([0, 0, 0, 1, 0, 0, 1, 2])))
    path = b.save(tmp_path / "m.onnx", b.quantize(b.conv(b.quantize(x), 8, stride=2, padding=(0, 1, 1, 0))))
    assert "Move Pad" not in kinds(path)
    check(path, b.x)


def test_attention_is_one_step_and_query_key_and_value_one_product(tmp_path):
    b = Builder((2, 3, 5, 16))
    x = b.quantize(b.op("Reshape", "input", b.constant(np.array([0, 15, 16]))))
    qkv = b.op("Reshape", b.linear(x, 48), b.constant(np.array([0, 15, 3, 2, 8])))
    turned = b.op("Transpose", qkv, perm=[2, 0, 3, 1, 4])
    q, k, v = (b.op("Gather", turned, b.constant(np.array(i)), axis=0) for i in range(3))
    q = b.quantize(b.op("Mul", q, b.constant(np.float32(8**-0.5))))
    k = b.op("Transpose", b.quantize(k), perm=[0, 1, 3, 2])
    mask = b.constant(np.where(b.rng.random((1, 1, 15, 15)) < 0.2, -100, 0).astype(np.float32))
    p = b.quantize(b.op("Softmax", b.op("Add", b.op("MatMul", q, k), mask), axis=-1))
    y = b.quantize(b.op("MatMul", p, b.quantize(v)))
    y = b.op("Reshape", b.op("Transpose", y, perm=[0, 2, 1, 3]), b.constant(np.array([0, 15, 16])))
    y = b.op("Add", b.linear(y, 16), b.op("Reshape", "input", b.constant(np.array([0, 15, 16]))))
    norm = [b.constant(b.rng.standard_normal(16).astype(np.float32)) for _ in range(2)]
    y = b.linear(b.quantize(b.op("LayerNormalization", y, *norm, axis=-1)), 4)
    path = b.save(tmp_path / "m.onnx", y)
    steps = [kind for kind in kinds(path) if kind != "Move Reshape"]
    assert steps == ["Elementwise", "Linear", "Attention", "Linear", "LayerNorm", "Linear"]
    check(path, b.x, share=3e-3)


def test_attention_of_shifted_windows_is_one_step(tmp_path):
    # A bias for each head, then a mask for each window, for which windows and images are apart for a moment.
    b = Builder((2, 4, 5, 16))
    path = b.save(tmp_path / "m.onnx", windows(b, b.quantize("input"), (4, 5, 2, 8)))
    steps = [kind for kind in kinds(path) if kind != "Move Reshape"]
    assert steps == ["Elementwise", "Linear", "Linear", "Linear", "Attention", "Elementwise"]
    (step,) = [step for step in lay_out(make_plan(path, batch_size=2)).steps if isinstance(step, Attention)]
    assert step.mask.shape == (4, 2, 5, 5)
    check(path, b.x, share=3e-3)


def test_a_block_of_convnext_ends_in_one_product(tmp_path):
    # Scale, residual and quantizer of the next block are part of the second product, across the change of layout.
    b = Builder((2, 12, 5, 4))
    path = b.save(tmp_path / "m.onnx", convnext(b))
    steps = [kind for kind in kinds(path) if not kind.startswith("Move")]
    assert steps == ["Elementwise", *["Convolution", "LayerNorm", "Linear", "Linear"] * 2]
    last = [step for step in products(path) if isinstance(step, Linear)][1::2]
    assert [step.axis for step in last] == [1, 1]
    assert all(step.epilogue.residual.name for step in last)
    assert (bool(last[0].epilogue.out.codes), bool(last[0].epilogue.out.value)) == (True, True)
    check(path, b.x, share=3e-3)


def test_a_normalization_before_an_image_writes_channels_last(tmp_path):
    b = Builder((2, 5, 4, 16))
    norm = [b.constant(b.rng.standard_normal(16).astype(np.float32)) for _ in range(2)]
    y = b.op("Transpose", b.op("LayerNormalization", "input", *norm, axis=-1), perm=[0, 3, 1, 2])
    path = b.save(tmp_path / "m.onnx", b.conv(b.quantize(y), 8, 2, 2, 0))
    layout = lay_out(make_plan(path, batch_size=2))
    step = next(step for step in layout.steps if isinstance(step, LayerNorm))
    assert layout.places[step.out.codes].meta().is_contiguous()
    check(path, b.x, share=3e-3)


def test_a_transposed_product_of_tokens_keeps_its_layout(tmp_path):
    # Tokens whose channels move, but not to where an image has them, are no image.
    b = Builder((2, 3, 5, 16))
    y = b.op("Transpose", b.linear(b.quantize("input"), 8), perm=[0, 3, 2, 1])
    path = b.save(tmp_path / "m.onnx", b.op("Relu", y))
    assert [step.axis for step in products(path)] == [-1]
    check(path, b.x)


def test_a_float_file_is_computed_in_floating_point(tmp_path):
    b = Builder((2, 3, 7, 7))
    weight = b.constant(b.rng.standard_normal((8, 3, 3, 3)).astype(np.float32))
    y = b.op("Relu", b.op("Conv", "input", weight, pads=[1, 1, 1, 1]))
    path = b.save(tmp_path / "m.onnx", y)
    np.testing.assert_allclose(run(path, b.x)[y], b.values[y], rtol=1e-4, atol=1e-5)


def whole(b, *numbers):
    return b.constant(np.array(numbers, np.int64))


def resized(b, x, **options):
    return b.op(
        "Resize", x, b.constant(np.zeros(0, np.float32)), b.constant(np.array([1, 1, 2, 3], np.float32)), **options
    )


MOVES = (
    lambda b, x: resized(b, x, mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor"),
    lambda b, x: resized(b, x, mode="nearest"),
    lambda b, x: b.op("Tile", x, whole(b, 1, 2, 1, 2)),
    lambda b, x: b.op("Slice", x, whole(b, -1), whole(b, -99), whole(b, 2), whole(b, -1)),
    lambda b, x: b.op("Slice", x, whole(b, 0), whole(b, 99), whole(b, 3), whole(b, 2)),
    lambda b, x: b.op("Transpose", x, perm=[0, 1, 3, 2]),
    lambda b, x: b.op("Pad", x, whole(b, 0, 0, 1, 2, 0, 0, 0, 1)),
    lambda b, x: b.op("Expand", b.op("GlobalMaxPool", x), whole(b, 1, 1, 4, 2)),
    lambda b, x: b.op("Gather", x, whole(b, 0, 0), axis=1),
)


@st.composite
def networks(draw):
    b = Builder(
        tuple(draw(st.integers(1, 2) if i == 0 else st.sampled_from([1, 3, 5, 8, 9])) for i in range(4)),
        seed=draw(st.integers(0, 99)),
        unsigned=draw(st.booleans()),
    )
    x = b.quantize("input")
    earlier = [x]
    for _ in range(draw(st.integers(1, 4))):
        channels, height, width = b.values[x].shape[1:]
        kind = draw(st.sampled_from(["conv", "depthwise", "grouped", "max", "average", "concat", "add", "mul", "move"]))
        y = None
        if kind in {"conv", "depthwise", "grouped"}:
            taps = draw(st.sampled_from([1, 3, 5]))
            groups = {"conv": 1, "depthwise": channels, "grouped": 2 if channels % 2 == 0 else 1}[kind]
            outputs = channels if kind == "depthwise" else draw(st.sampled_from([2, 4, 10, 16, 18]))
            y = b.conv(x, outputs, taps, draw(st.integers(1, 2)), taps // 2, groups, bias=draw(st.booleans()))
            y = draw(st.sampled_from([*ACTIVATIONS.values(), lambda b, x: x]))(b, y)
            same = [e for e in earlier if b.values[e].shape == b.values[y].shape]
            if same and draw(st.booleans()):
                y = b.op("Add", b.quantize(y) if draw(st.booleans()) else y, draw(st.sampled_from(same)))
                y = b.op("Relu", y) if draw(st.booleans()) else y
        elif kind in {"max", "average"} and min(height, width) > 2:
            pool = {"max": "MaxPool", "average": "AveragePool"}[kind]
            padding = draw(st.integers(0, 1))
            y = b.op(pool, x, kernel_shape=[3, 3], strides=[draw(st.integers(1, 2))] * 2, pads=[padding] * 4)
        elif kind == "concat":
            y = b.op("Concat", x, b.op("Relu", b.conv(x, draw(st.sampled_from([3, 16])), 1, padding=0)), axis=1)
        elif kind == "add":
            same = [e for e in earlier if b.values[e].shape == b.values[x].shape]
            y = b.op("Add", x, draw(st.sampled_from(same)))
        elif kind == "mul":
            pooled = b.op("Sigmoid", b.conv(b.quantize(b.op("GlobalAveragePool", x)), channels, 1, padding=0))
            y = b.op("Mul", x, pooled)
        elif kind == "move":
            y = draw(st.sampled_from(MOVES))(b, x)
        if y is None:
            continue
        x = b.quantize(y)
        earlier.append(x)
    return b, x


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(networks())
def test_random_networks_compute_what_onnx_runtime_does(tmp_path_factory, network):
    b, y = network
    check(b.save(tmp_path_factory.mktemp("net") / "m.onnx", y), b.x, share=5e-3)


@pytest.mark.parametrize("per_channel", [False, True])
def test_weights_that_the_file_quantizes_itself_are_integers(tmp_path, per_channel):
    # As pytorch-quantization and ModelOpt write them: values, a QuantizeLinear and a DequantizeLinear.
    b = Builder((2, 5, 7, 7))
    x = b.quantize("input")
    weight = b.rng.standard_normal((8, 5, 3, 3)).astype(np.float32)
    scale = b.constant((np.abs(weight).max((1, 2, 3)) / 100 if per_channel else np.array(0.02)).astype(np.float32))
    names = (scale, b.constant(np.zeros(8 if per_channel else (), np.int8)))
    q = b.op("QuantizeLinear", b.constant(weight), *names, axis=0)
    y = b.op("Conv", x, b.op("DequantizeLinear", q, *names, axis=0), pads=[1, 1, 1, 1])
    path = b.save(tmp_path / "m.onnx", b.quantize(b.op("Relu", y)))
    assert [step.weight.dtype for step in products(path)] == [torch.int8]
    check(path, b.x)


def test_nodes_in_any_order_and_of_one_name(tmp_path):
    b = Builder((2, 3, 7, 6))
    path = b.save(tmp_path / "m.onnx", residual_block(b, rounded=False))
    model = onnx.load(path)
    nodes = [onnx.NodeProto.FromString(node.SerializeToString()) for node in reversed(model.graph.node)]
    for node in nodes:
        node.name = "n"
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    onnx.save(model, path)
    assert kinds(path)[1:-1] == ["Convolution"] * 3


# Refusals -------------------------------------------------------------------------------------------------------------


def test_other_types_of_quantization_are_refused(tmp_path):
    b = Builder((1, 3, 4, 4))
    names = [b.constant(np.float32(0.1)), b.constant(np.int16(0))]
    q = helper.make_node("QuantizeLinear", ["input", *names], ["q"], name="wide")
    d = helper.make_node("DequantizeLinear", ["q", *names], ["d"])
    ends = {"input": [1, 3, 4, 4]}, {"d": [1, 3, 4, 4]}
    onnx.save(onnx_model([q, d], *ends, b.constants, opset=21, ir_version=10), tmp_path / "m.onnx")
    with pytest.raises(EngineError, match="wide: it quantizes to int16.*INT8"):
        make_plan(tmp_path / "m.onnx")


@pytest.mark.parametrize(
    ("change", "match"),
    [("type", "weights cannot be read"), ("shape", "weights cannot be read"), ("string", "'input' is of type")],
)
def test_broken_tensors_and_strings_are_refused(tmp_path, change, match):
    value = [helper.make_tensor_value_info(n, 8 if change == "string" else 1, [4]) for n in ("input", "y")]
    constant = numpy_helper.from_array(np.ones(4, np.float32), "c")
    if change != "string":
        constant.MergeFrom(onnx.TensorProto(data_type=77) if change == "type" else onnx.TensorProto(dims=[3]))
    graph = helper.make_graph([helper.make_node("Add", ["input", "c"], ["y"])], "g", value[:1], value[1:], [constant])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), tmp_path / "m.onnx")
    with pytest.raises(EngineError, match=match):
        make_plan(tmp_path / "m.onnx")


@pytest.mark.parametrize("constant", [False, True])
def test_quantizers_of_four_bits_are_refused(tmp_path, constant):
    constants = {"x": np.ones((1, 4), np.float32), "s": np.float32(0.1), "z": helper.make_tensor("z", 22, [], [0])}
    nodes = [
        helper.make_node("QuantizeLinear", ["x" if constant else "input", "s", "z"], ["q"], name="narrow"),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["d"]),
        helper.make_node("Add", ["d", "input"], ["y"]),
    ]
    ends = {"input": [1, 4]}, {"y": [1, 4]}
    onnx.save(onnx_model(nodes, *ends, constants, opset=21, ir_version=10), tmp_path / "m.onnx")
    with pytest.raises(EngineError, match="narrow: it quantizes to int4: the cuda engine computes in INT8"):
        make_plan(tmp_path / "m.onnx")


def test_a_quantizer_without_a_zero_point_has_the_type_that_it_names(tmp_path):
    b = Builder((2, 8))
    scale = b.constant(np.float32(0.05))
    nodes = [
        helper.make_node("QuantizeLinear", ["input", scale], ["q"], output_dtype=3),
        helper.make_node("DequantizeLinear", ["q", scale], ["y"]),
    ]
    ends, path = ({"input": [2, 8]}, {"y": [2, 8]}), tmp_path / "m.onnx"
    onnx.save(onnx_model(nodes, *ends, {scale: np.float32(0.05)}, opset=21, ir_version=10), path)
    expected = (b.x / np.float32(0.05)).round().clip(-128, 127) * np.float32(0.05)
    assert expected.min() < -0.1
    np.testing.assert_allclose(run(path, b.x)["y"], expected, atol=1e-6)


@pytest.mark.parametrize("scale", [0.0, -1.0, np.nan, np.inf])
def test_scales_that_are_none_are_refused(tmp_path, scale):
    b = Builder((1, 3, 4, 4))
    names = [b.constant(np.float32(0.1), "scale"), b.constant(np.int8(0))]
    y = b.op("DequantizeLinear", b.op("QuantizeLinear", "input", *names), *names)
    b.constants["scale"] = np.float32(scale)
    with pytest.raises(EngineError, match="not positive and finite"):
        make_plan(b.save(tmp_path / "m.onnx", y))


def test_open_shapes_and_unknown_inputs_are_refused(tmp_path):
    b = Builder((1, 3, 4, 4))
    path = b.save(tmp_path / "m.onnx", b.op("Relu", "input"))
    with pytest.raises(EngineError, match="there is no input 'x'"):
        make_plan(path, {"x": (1, 3, 4, 4)})
    with pytest.raises(EngineError, match="must be a number"):
        make_plan(path, {"input": (1, 3, -1, 4)})


def test_codes_that_something_else_reads_are_refused(tmp_path):
    b = Builder((1, 3, 4, 4))
    q = b.op("QuantizeLinear", "input", b.constant(np.float32(0.1)), b.constant(np.int8(0)))
    with pytest.raises(EngineError, match="only DequantizeLinear may read them"):
        make_plan(b.save(tmp_path / "m.onnx", b.op("Cast", q, to=1)))


def test_control_flow_and_foreign_operators_are_refused(tmp_path):
    b = Builder((1, 3, 4, 4))
    model = b.model(b.op("Relu", "input"))
    model.graph.node[0].domain = "vendor"
    onnx.save(model, str(tmp_path / "m.onnx"))
    with pytest.raises(EngineError, match="operator of the domain 'vendor'"):
        make_plan(tmp_path / "m.onnx")


def test_dtype_of_the_float_part(tmp_path):
    b = Builder((2, 4, 6, 6))
    y = b.op("Softmax", b.op("Exp", b.conv(b.quantize("input"), 8)), axis=1)
    plan = make_plan(b.save(tmp_path / "m.onnx", y), dtype=torch.bfloat16)
    inner = [t.dtype for name, t in plan.tensors.items() if name not in {"input", y}]
    assert set(inner) == {torch.int8, torch.bfloat16}
    assert plan.tensors[y].dtype == torch.float32


# Every operation of the table against ONNX's own backend tests, and without data for its shapes.

UNUSUAL = {"uint16", "uint32", "uint64", "bfloat16", "float8_e4m3fn", "float4_e2m1fn", "int4", "uint4", "int2", "uint2"}
loop_over_windows = op_pool_common.pool
EMPTY = {"test_reduce_max_empty_set", "test_reduce_max_empty_set_bool", "test_reduce_min_empty_set"}


def plain(arrays):
    return all(isinstance(a, np.ndarray) and a.dtype.kind in "fiub" and a.dtype.name not in UNUSUAL for a in arrays)


def pool(padded, shape, kernel, strides, out, kind, *pads, **options):
    # ONNX's own goes through windows in Python, for seconds where they have three dimensions.
    if len(kernel) < 3 or pads or options.keys() - {"p"}:
        return loop_over_windows(padded, shape, kernel, strides, out, kind, *pads, **options)
    windows = sliding_window_view(padded, kernel, axis=(2, 3, 4))
    windows = windows[:, :, :: strides[0], :: strides[1], :: strides[2]].reshape(*padded.shape[:2], *out, -1)
    return {"AVG": np.mean, "MAX": np.max, "LPPOOL": partial(np.linalg.norm, ord=options.get("p"))}[kind](
        windows, axis=-1
    )


def cases():
    with warnings.catch_warnings(), patch.object(op_pool_common, "pool", pool), patch.object(base, "process_snippet"):
        warnings.simplefilter("ignore")
        tests = load_model_tests(kind="node")
    for case in tests:
        if case.model is None or len(case.model.graph.node) != 1 or case.name in EMPTY:
            continue
        node = case.model.graph.node[0]
        if node.op_type in OPERATIONS and not node.domain:
            for inputs, outputs in case.data_sets:
                if plain([*inputs, *outputs]):
                    yield node.op_type, case.name, node, inputs, outputs


@pytest.fixture(scope="module")
def by_kind():
    # Here and not when tests are collected: ONNX computes every case anew, which takes seconds in each process.
    found = {}
    for kind, *case in cases():
        found.setdefault(kind, []).append(case)
    return found


def onnx_ops_given(node, inputs):
    attributes = {a.name: _attribute(a, node, "case") for a in node.attribute}
    attributes.setdefault("outputs", len(node.output))
    arrays = iter(inputs)
    return attributes, [torch.from_numpy(np.array(next(arrays))) if name else None for name in node.input]


def agreed_and_refused(kind, found):
    agreed = refused = 0
    for name, node, inputs, outputs in found:
        attributes, tensors = onnx_ops_given(node, inputs)
        try:
            results = apply(kind, attributes, tensors)
        except EngineError:
            refused += 1
            continue
        for result, expected in zip(results, outputs, strict=False):
            assert tuple(result.shape) == expected.shape, name
            np.testing.assert_allclose(
                result.double().numpy(), expected.astype(float), rtol=1e-3, atol=1e-5, err_msg=name
            )
        without_data = apply(kind, attributes, _on_meta(kind, tensors))
        assert [r.shape for r in without_data] == [r.shape for r in results], name
        agreed += 1
    return agreed, refused


def test_operations_compute_what_onnx_says_or_refuse(by_kind):
    assert sum(map(len, by_kind.values())) > 500
    assert len(by_kind) > 90
    for kind, found in by_kind.items():
        agreed, refused = agreed_and_refused(kind, found)
        assert agreed, kind
        assert agreed >= refused or kind in {"Resize", "AveragePool"}, kind


@pytest.mark.parametrize(
    ("kind", "inputs", "words"),
    [
        ("Rellu", [torch.ones(1)], "Rellu is not supported, did you mean 'Relu'"),
        ("Reshape", [torch.ones(4), torch.empty(2, dtype=torch.int64, device="meta")], "from the network's input"),
    ],
)
def test_unknown_operators_and_shapes_that_depend_on_data_are_refused(kind, inputs, words):
    with pytest.raises(EngineError, match=words):
        apply(kind, {}, inputs)
