import warnings

import numpy as np
import onnx
import onnxruntime
import openvino
import pytest
import torch
from onnx import helper
from torch import nn

from compress import QuantSpec, Rule, audit_engine, audit_onnx, build_tensorrt, cast_onnx, quantize_onnx, to_pt2e
from compress.audit.onnx import audit_sparsity, sparse_nodes
from compress.cli.inspect_file import inspect_onnx
from compress.engines.tensorrt.options import TensorRTOptions
from compress.errors import AuditError
from compress.support.process import sums_bytes_in_16_bits
from tests.exact import exported, kinds_on_engine
from tests.onnx_models import onnx_model

FILE = """
<ir_version: 9, opset_import: ["": 19]>
audited (float[1,2,4,4] x, float[1,2,4,4] z) => (float[1,4,2,2] y)
<float s = {0.1}, int8 zero = {0}, int8[4,4,3,3] q = {QUANTS}, float[1,2,4,4] map = {MAP}> {
    x_q = QuantizeLinear(x, s, zero)
    x_d = DequantizeLinear(x_q, s, zero)
    z_q = QuantizeLinear(z, s, zero)
    z_d = DequantizeLinear(z_q, s, zero)
    w = DequantizeLinear(q, s, zero)
    pair = Concat <axis = 1> (PARTS)
    pooled = MaxPool <kernel_shape = [1, 1]> (pair)
    y = Conv(pooled, w)
}
""".replace("QUANTS", ", ".join(["1"] * 144)).replace("MAP", ", ".join(["0.5"] * 32))


def audited(text, folder, change=None):
    # The audit of a model that is given as text, and changed.
    model = onnx.parser.parse_model(text)
    if change is not None:
        change(model)
    onnx.save(model, folder / "m.onnx")
    return audit_onnx(folder / "m.onnx")


@pytest.mark.parametrize(
    ("parts", "int8"),
    [("x_d, z_d", True), ("x_d, z", False), ("z, x_d", False), ("x_d, map", False), ("x_d, x_d", True)],
)
def test_a_concat_is_quantized_if_all_of_its_inputs_are(parts, int8, tmp_path):
    audit = audited(FILE.replace("PARTS", parts), tmp_path)
    (row,) = audit.rows
    assert row.int8 is int8 and row.weight_type == "int8" and audit.int8_share == float(int8)
    assert row.reason == ("" if int8 else "its input is not quantized")


FOREIGN = """
<ir_version: 10, opset_import: ["": 21]>
foreign (float[1,8,8,8] x) => (float[1,8,8,8] y)
<float s = {0.05}, int8 zero = {0}, int8[8,8,1,1] q = {QUANTS}> {
    r = Relu(x)
    x_q = QuantizeLinear(r, s, zero)
    d = DequantizeLinear(x_q, s, zero)
    w = DequantizeLinear(q, s, zero)
    BODY
}
""".replace("QUANTS", ", ".join(["3"] * 64))
BETWEEN = "c_q = QuantizeLinear(c, s, zero) y = DequantizeLinear(c_q, s, zero)"


@pytest.mark.parametrize(
    "body",
    [
        f"c = Conv(d, w) {BETWEEN}",
        "y = Conv(d, w)",
        f"c = ConvTranspose(d, w) {BETWEEN}",
        f"h = Cast <to = 16> (d) f = Cast <to = 1> (h) c = Conv(f, w) {BETWEEN}",
        "h = Cast <to = 10> (d) v = Cast <to = 10> (w) c = Conv(h, v) y = Cast <to = 1> (c)",
    ],
)
def test_a_file_of_others_is_int8_where_the_engine_says_so(body, tmp_path):
    openvino = pytest.importorskip("openvino")
    (row,), path = audited(FOREIGN.replace("BODY", body), tmp_path).rows, tmp_path / "m.onnx"
    model = openvino.Core().compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"}).get_runtime_model()
    facts = [{key: str(value.astype(str)) for key, value in op.get_rt_info().items()} for op in model.get_ops()]
    (precision,) = {one["runtimePrecision"] for one in facts if one["layerType"] in ("Convolution", "Deconvolution")}
    of_processor = "to = 16" in body and sums_bytes_in_16_bits()  # a cast to bfloat16, which older processors lack
    assert of_processor or row.type_on("openvino") == ("INT8" if precision in {"u8", "i8"} else "FP32")
    assert row.type_on("onnxruntime") == ("INT8" if "QLinearConv" in kinds_on_engine(path) else "FP32")


PRODUCTS = """
<ir_version: 8, opset_import: ["" : 17]> g (float[6,8] x) => (float[N,M] y)
<float s = {0.05}, float[8] several = {SEVERAL}, uint8 zero = {128}, uint8[8] zeros = {ZEROS}, int8 none = {0},
 int8[8,8] k = {CODES}, int8[8,6] l = {LEFT}, int64[2] two = {2, 1}, int64[3] some = {0, 2, 1}, int64[2] parts =
 {2, 4}> {
    x_q = QuantizeLinear(x, s, zero) d = DequantizeLinear(x_q, s, zero) w = DequantizeLinear(k, s, none)
    BODY
}
"""


@pytest.mark.parametrize(
    "body",
    [
        "y = MatMul(d, w)",
        "r = Transpose(d) t = Transpose(r) y = MatMul(t, w)",
        "r = Gather(d, some) y = MatMul(r, w)",
        "r = Tile(d, two) y = Gemm(r, w)",
        "r = Flatten(d) y = MatMul(r, w)",
        "r, o = Split <axis = 0> (d, parts) y = Gemm(r, w)",
        "r = Concat <axis = 0> (d, d) y = MatMul(r, w)",
        "y = Gemm(d, w)",
        "v = DequantizeLinear(k, s) y = Gemm(d, v)",
        "v = DequantizeLinear(k, s) y = MatMul(d, v)",
        "i = QuantizeLinear(x, several, zeros) e = DequantizeLinear(i, several, zeros) y = Gemm(e, w)",  # axis 1
        "v = DequantizeLinear(l, s, none) y = MatMul(v, d)",
    ],
)
def test_a_product_of_others_is_int8_on_onnxruntime_where_it_says_so(body, tmp_path):
    filled = {"SEVERAL": ["0.05"] * 4 + ["0.06"] * 4, "ZEROS": ["128"] * 8, "CODES": ["3"] * 64, "LEFT": ["5"] * 48}
    text = PRODUCTS.replace("BODY", body)
    for name, values in filled.items():
        text = text.replace(name, ", ".join(values))
    (row,), path = audited(text, tmp_path).rows, tmp_path / "m.onnx"
    integer = {"QLinearMatMul", "MatMulIntegerToFloat", "QGemm"} & {*kinds_on_engine(path)}
    assert row.type_on("onnxruntime") == ("INT8" if integer else "FP32")


# Operator, attributes, shapes of input and weight, axes of their scales (None: one scale), what lies behind the pairs.
SCALES = {
    "conv": ("Conv", {}, (1, 8, 8, 8), (8, 8, 3, 3), None, 0, ""),
    "conv by input channel": ("Conv", {}, (1, 8, 8, 8), (8, 8, 3, 3), None, 1, ""),
    "conv of several": ("Conv", {}, (1, 8, 8, 8), (8, 8, 3, 3), 1, 0, ""),
    "conv of one in a vector": ("Conv", {}, (1, 8, 8, 8), (8, 8, 3, 3), (), 0, ""),
    "conv of joined parts": ("Conv", {}, (1, 8, 8, 8), (8, 8, 3, 3), None, 0, "join 1"),
    "depthwise": ("Conv", {"group": 8}, (1, 8, 8, 8), (8, 1, 5, 5), None, 0, ""),
    "grouped": ("Conv", {"group": 3}, (1, 9, 8, 8), (6, 3, 3, 3), None, 0, ""),
    "transposed": ("ConvTranspose", {"strides": [2, 2]}, (1, 8, 8, 8), (8, 8, 2, 2), None, 1, ""),
    "transposed, one scale": ("ConvTranspose", {"group": 2}, (1, 8, 8, 8), (8, 4, 3, 3), None, None, ""),
    "matmul": ("MatMul", {}, (2, 4, 16), (16, 8), None, 1, ""),
    "matmul by row": ("MatMul", {}, (2, 4, 16), (16, 8), None, 0, ""),
    "matmul, transposed": ("MatMul", {}, (4, 16), (8, 16), None, 0, "turn"),
    "matmul by row, transposed": ("MatMul", {}, (4, 16), (8, 16), None, 1, "turn"),
    "matmul of joined rows": ("MatMul", {}, (4, 16), (16, 8), None, 1, "join 0"),
    "matmul of joined columns": ("MatMul", {}, (4, 16), (16, 8), None, 1, "join 1"),
    "gemm": ("Gemm", {"transB": 1}, (4, 16), (8, 16), None, 0, ""),
    "gemm by column": ("Gemm", {"transB": 1}, (4, 16), (8, 16), None, 1, ""),
    "gemm, input transposed": ("Gemm", {"transA": 1}, (16, 4), (16, 8), 1, 1, ""),
    "gemm by row, input transposed": ("Gemm", {"transA": 1}, (16, 4), (16, 8), 0, 1, ""),
}


@pytest.mark.parametrize("form", SCALES)
def test_products_of_several_scales_are_int8_where_the_engine_says_so(form, tmp_path):
    # The log of TensorRT-RTX's build, without a GPU, is the oracle.
    pytest.importorskip("tensorrt_rtx")
    op, attributes, shape, kernel, axis, own, behind = SCALES[form]
    rng, values = np.random.default_rng(0), {}
    values["w_int"] = rng.integers(-99, 100, kernel).astype(np.int8)

    def pair(x, sides, along, name, scale=0.03):
        steps = {None: np.float32(scale), (): np.float32([scale])}
        values[f"{name}_s"] = (
            steps[along] if along in steps else np.linspace(scale, 2 * scale, sides[along], dtype=np.float32)
        )
        values[f"{name}_z"] = np.zeros(values[f"{name}_s"].shape, np.int8)
        more = {} if along in steps else {"axis": along}
        if x:
            nodes.append(helper.make_node("QuantizeLinear", [x, f"{name}_s", f"{name}_z"], [f"{name}_int"], **more))
        nodes.append(helper.make_node("DequantizeLinear", [f"{name}_int", f"{name}_s", f"{name}_z"], [name], **more))

    nodes, inputs = [], {"x": list(shape)}
    pair("x", shape, axis, "a")
    pair("", kernel, own, "w")
    data, weight = "a", "w"
    if behind.startswith("join"):
        at = int(behind[-1])
        inputs = {name: [size // (1 + (i == at)) for i, size in enumerate(shape)] for name in "xv"}
        pair("v", shape, None, "b", 0.05)
        nodes.append(helper.make_node("Concat", ["a", "b"], ["both"], axis=at))
        data = "both"
    elif behind == "turn":
        nodes.append(helper.make_node("Transpose", ["w"], ["turned"], perm=[1, 0]))
        weight = "turned"
    nodes.append(helper.make_node(op, [data, weight], ["y"], "op", **attributes))
    onnx.save(onnx_model(nodes, inputs, {"y": None}, values, opset=19), tmp_path / "m.onnx")
    (row,) = audit_onnx(tmp_path / "m.onnx").rows
    made = build_tensorrt(tmp_path / "m.onnx", options=TensorRTOptions(sms=(89,)))
    (layer,) = audit_engine(made.path).weighted
    assert row.type_on("tensorrt-rtx").lower() == layer.precision
    # What was found of TensorRT-RTX alone: TensorRT has INT8 transposed convolutions.
    own_to_rtx = op == "ConvTranspose" or axis == ()
    assert row.type_on("tensorrt") == ("INT8" if own_to_rtx else row.type_on("tensorrt-rtx"))
    reads_integers = "int8" in layer.input_types and "CastMul" not in layer.name
    assert (layer.precision == "int8") == reads_integers


@pytest.mark.parametrize(("op", "engine"), [("ConvTranspose", "TensorRT-RTX"), ("Conv", None)])
def test_a_product_that_tensorrt_rtx_computes_in_float_is_said(op, engine, tmp_path, capsys):
    audit = audited(FOREIGN.replace("BODY", f"c = {op}(d, w) {BETWEEN}"), tmp_path)
    assert audit.products_on("tensorrt") == {"INT8": 1}
    assert audit.products_on("tensorrt-rtx") == {"FP32" if engine else "INT8": 1}
    inspect_onnx(tmp_path / "m.onnx")
    assert ("float on TensorRT-RTX" in capsys.readouterr().out) == bool(engine)


def test_a_file_that_quantizes_its_own_weights_in_nodes_of_any_order_is_int8(tmp_path):
    own = FOREIGN.replace("int8[8,8,1,1] q =", "float[8,8,1,1] v =").replace(
        "w = Deq", "q = QuantizeLinear(v, s, zero) w = Deq"
    )

    def reverse(proto):
        proto.graph.node.reverse()
        proto.ir_version = 8

    text = own.replace("21", "17").replace("BODY", f"c = Conv(d, w) {BETWEEN}")
    assert audited(text, tmp_path, reverse).int8_share == 1.0
    assert "int8" in str({value.dtype for _, value in to_pt2e(tmp_path / "m.onnx").named_buffers()})


def test_a_scale_of_zero_is_refused_by_the_result_of_a_node_without_a_name(tmp_path):
    with pytest.raises(AuditError, match=r"^x_q: scale is 0\.0 in 1 of 1 places"):
        audited(FILE.replace("PARTS", "x_d, z_d").replace("{0.1}", "{0}"), tmp_path)


KINDS = (
    """
<ir_version: 10, opset_import: ["": 21], metadata_props: ["k": "v"]>
audited (float[1,2,4,4] x, float[2,4] a, float[4,3] b)
 => (float[1,2,2,2] y, float[2,3] plain, float[2,3] product, float[2,4] fc)
<float s = {0.1}, uint8 middle = {128}, int8 zero = {0}, int8[2,2,3,3] q = {CONV}, float[2] each = {0.1, 0.2},
 int8[2] zeros = {0, 0}, float[1] one = {0.5}, int8[1] none = {0}, int8[4,4] g = {GEMM}, float[4,3] w = {FLOAT}> {
    x_q = QuantizeLinear(x, s, middle)
    x_d = DequantizeLinear(x_q, s, middle)
    q_d = DequantizeLinear <axis = 0> (q, each, zeros)
    y = Conv(x_d, q_d)
    plain = MatMul(a, w)
    a_q = QuantizeLinear(a, s, zero)
    a_d = DequantizeLinear(a_q, s, zero)
    product = MatMul(a_d, b)
    g_d = DequantizeLinear <axis = 0> (g, one, none)
    fc = Gemm(a_d, g_d)
}
""".replace("CONV", ", ".join(["1"] * 36))
    .replace("GEMM", ", ".join(["1"] * 16))
    .replace("FLOAT", ", ".join(["1"] * 12))
)


def test_every_column_of_the_audit(tmp_path):
    audit = audited(KINDS, tmp_path)
    assert (audit.opset, audit.activation_pairs, audit.float_type, audit.metadata) == (21, 2, "float32", {"k": "v"})
    assert audit.ops == {"Conv": 1, "DequantizeLinear": 4, "Gemm": 1, "MatMul": 2, "QuantizeLinear": 2}
    columns = [
        (r.name, r.op_type, r.input_type, r.weight_type, r.per_channel, r.weight_elements, r.int8, r.reason)
        for r in audit.rows
    ]
    assert columns == [
        ("y", "Conv", "uint8", "int8", True, 36, True, ""),
        (
            "plain",
            "MatMul",
            "float",
            "float",
            False,
            12,
            False,
            "its input is not quantized; its weight is not quantized",
        ),
        ("product", "MatMul", "int8", "float", False, 0, False, "its weight is not quantized"),
        ("fc", "Gemm", "int8", "int8", False, 16, True, ""),
    ]
    assert audit.int8_share == pytest.approx(52 / 64)


def test_halves_make_a_file_of_float16_and_fp8_is_not_int8(tmp_path):
    text = KINDS.replace("float[4,3] w", "float16[4,3] w").replace("float[2,4] a", "float16[2,4] a")
    text = text.replace("float[2,3] plain", "float16[2,3] plain").replace("QuantizeLinear(a, s", "QuantizeLinear(x, s")
    audit = audited(text.replace("int8[4,4] g", "float8e4m3fn[4,4] g"), tmp_path)
    assert audit.float_type == "float16"
    assert audit.rows[-1].reason == "its weight is FP8, not INT8" and not audit.rows[-1].int8


@pytest.mark.parametrize(
    ("scale", "words"),
    [("-0.5", r"-0\.5 in 1 of 2"), ("inf", "inf in 1 of 2"), ("nan", "nan in 1 of 2")],
)
def test_scales_that_are_not_positive_and_finite_are_refused(tmp_path, scale, words):
    def change(model):
        (each,) = [tensor for tensor in model.graph.initializer if tensor.name == "each"]
        each.CopyFrom(onnx.numpy_helper.from_array(np.array([0.1, float(scale)], np.float32), "each"))
        model.graph.node[2].name = "weights"

    with pytest.raises(AuditError, match=rf"^weights: scale is {words} places"):
        audited(KINDS, tmp_path, change)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none.onnx", r"none\.onnx does not exist; give an ONNX file"),
        ("", "is a folder; give an ONNX file"),
        ("/dev/null", "is no regular file; give an ONNX file"),
        ("text.onnx", r"text\.onnx is not a valid ONNX file"),
    ],
)
def test_a_file_that_is_not_there_and_a_folder_are_named(name, message, tmp_path):
    (tmp_path / "text.onnx").write_text("no model")
    with pytest.raises(AuditError, match=message):
        audit_onnx(tmp_path / name)


SPARSE = """
<ir_version: 9, opset_import: ["": 19]>
sparse (float[1,4,4,4] x, float[2,4] a)
 => (float[1,2,4,4] conv, float[2,3] gemm, float[2,3] turned, float[2,3] product, float[2,3] moved)
<float[2,4,1,1] c = {CONV}, float[3,4] rows = {ROWS}, float[4,3] columns = {COLUMNS},
 int8[3,4] q = {QUANTS}, float s = {0.1}, int8 zero = {0}> {
    conv = Conv(x, c)
    gemm = Gemm <transB = 1> (a, rows)
    turned = Gemm(a, columns)
    product = MatMul(a, columns)
    q_d = DequantizeLinear(q, s, zero)
    rows_t = Transpose <perm = [1, 0]> (q_d)
    moved = MatMul(a, rows_t)
}
"""


@pytest.mark.parametrize(("values", "violations"), [((1, 2, 0, 0), 0), ((1, 2, 3, 0), 3), ((0, 0, 0, 0), 0)])
def test_the_pattern_is_looked_for_along_the_inputs_of_each_kind(tmp_path, values, violations):
    # One group of four for each of the outputs.
    rows = [values] * 3
    texts = {
        "CONV": [*values, 5, 6, 0, 0],
        "ROWS": [v for row in rows for v in row],
        "QUANTS": [v for row in rows for v in row],
        "COLUMNS": [v for v in values for _ in rows],
    }
    text = SPARSE
    for key, numbers in texts.items():
        text = text.replace(key, ", ".join(map(str, numbers)))
    onnx.save(onnx.parser.parse_model(text), tmp_path / "m.onnx")
    found = {row.name: row for row in audit_sparsity(tmp_path / "m.onnx")}
    share = values.count(0) / 4
    assert found["conv"].violations == violations // 3 and found["conv"].zeros == pytest.approx((share + 0.5) / 2)
    for name in ("gemm", "turned", "product", "moved"):
        assert found[name].violations == violations
        assert found[name].dtype == ("int8" if name == "moved" else "float32")
        assert found[name].zeros == pytest.approx(share)
    assert sparse_nodes(tmp_path / "m.onnx") == (tuple(found) if violations == 0 else ())
    assert all(row.violations is None for row in audit_sparsity(tmp_path / "m.onnx", 2, 3))


PLAIN = """
<ir_version: 9, opset_import: ["": 19]>
plain (float[2,4] a, float[4,3] b)
 => (float[2,3] both, float[2,3] turned, float[2] row, float[2,3] free, float[2,3] direct)
<float s = {0.1}, int8[4,3] w = {1, 2, 3, 0, 0, 0, 0, 0, 0, 4, 5, 6}, float[4] v = {1, 2, 0, 0}> {
    a_q = QuantizeLinear(a, s)
    a_d = DequantizeLinear(a_q, s)
    both = MatMul(a_d, b)
    w_d = DequantizeLinear(w, s)
    w_t = Transpose <perm = [1, 0]> (w_d)
    turned = Gemm <transB = 1> (a, w_t)
    row = MatMul(a, v)
    free = MatMul(a, b)
    direct = MatMul(a, w_d)
}
"""


def test_without_a_zero_point_integers_have_no_sign_and_only_matrices_have_a_pattern(tmp_path):
    # As ONNX says of QuantizeLinear; a weight that is turned twice has its inputs on the first axis.
    types = {row.name: (row.input_type, row.weight_type) for row in audited(PLAIN, tmp_path).rows}
    assert types["both"] == ("uint8", "float") and types["free"] == ("float", "float")
    assert [(r.name, r.violations, r.zeros) for r in audit_sparsity(tmp_path / "m.onnx")] == [
        ("turned", 0, 0.5),
        ("direct", 0, 0.5),
    ]
    assert sparse_nodes(tmp_path / "m.onnx") == ("turned", "direct")
    assert [row.violations for row in audit_sparsity(tmp_path / "m.onnx", 1, 4)] == [3, 3]
    assert [row.violations for row in audit_sparsity(tmp_path / "m.onnx", 1, 2)] == [0, 0]


def test_types_that_the_checker_lets_pass_are_refused(tmp_path):
    def change(model):
        (scale,) = [tensor for tensor in model.graph.initializer if tensor.name == "s"]
        scale.data_type = 99

    with pytest.raises(AuditError, match="is not a valid ONNX file"):
        audited(PLAIN, tmp_path, change)


def test_the_weights_of_recurrent_operations_count_as_float(tmp_path):
    # A GRU of 4 inputs and 8 states: 3 * 8 * (4 + 8) weights.
    node = helper.make_node("GRU", ["x", "w", "r"], ["y"], hidden_size=8)
    weights = {name: np.ones((1, 24, n), np.float32) for n, name in ((4, "w"), (8, "r"))}
    path = tmp_path / "gru.onnx"
    onnx.save(onnx_model([node], {"x": [3, 1, 4]}, {"y": [3, 1, 1, 8]}, weights, opset=17, ir_version=8), path)
    audit = audit_onnx(path)
    assert [(row.op_type, row.weight_elements, row.int8) for row in audit.rows] == [("GRU", 288, False)]
    assert audit.int8_share == 0


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_scales_of_half_precision_are_float_on_onnxruntime(precision, tmp_path):
    # The engine's own graph is the oracle.
    model, x = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4)).eval(), torch.randn(4, 16)
    _, path = exported(model, x, tmp_path / "m.onnx", into={"precision": precision}, target="onnxruntime")
    products = kinds_on_engine(path).count("QGemm")
    assert sum(row.int8 for row in audit_onnx(path).rows) == products == (2 if precision == "fp32" else 0)


def test_an_engine_loads_an_audited_file_once(tmp_path, monkeypatch, capsys):
    node = helper.make_node("DeformConv", ["x", "w", "o"], ["y"])  # which OpenVINO's own target does not load
    constants = {"w": np.ones((4, 4, 1, 1), np.float32), "o": np.zeros((2, 2, 4, 4), np.float32)}
    model = onnx_model([node], {"x": [2, 4, 4, 4]}, {"y": [2, 4, 4, 4]}, constants, opset=19)
    model.metadata_props.add(key="compress.target", value="openvino")
    onnx.save(model, tmp_path / "m.onnx")
    loaded = []
    for owner, name in ((onnxruntime, "InferenceSession"), (openvino.Core, "read_model")):
        load = getattr(owner, name)
        found = lambda *given, load=load, name=name, **more: loaded.append(name) or load(*given, **more)  # noqa: E731
        monkeypatch.setattr(owner, name, found)
    inspect_onnx(tmp_path / "m.onnx")
    assert sorted(loaded) == ["InferenceSession", "read_model"]
    shown = capsys.readouterr().out
    assert "1 of 1 products not computed: OpenVINO does not load" in " ".join(shown.replace("\u2502", " ").split())


def test_types_on_engines_and_the_command_that_mends_a_file(tmp_path):
    # Of a float file, its halves, and one with a quantized and a float product.
    rng = np.random.default_rng(0)
    nodes = [helper.make_node("Conv", [a, "w"], [b], name=b) for a, b in (("x", "a"), ("a", "y"))]
    constants = {"w": rng.standard_normal((4, 4, 1, 1)).astype(np.float32)}
    path, x = tmp_path / "float.onnx", rng.standard_normal((2, 4, 4, 4)).astype(np.float32)
    ends = {"x": [2, 4, 4, 4]}, {"y": [2, 4, 4, 4]}
    onnx.save(onnx_model(nodes, *ends, constants, producer_name="me"), path)
    spec = QuantSpec(target="tensorrt", rules=(Rule(match="y", enable=False),))
    files = {
        "float": path,
        "fp16": cast_onnx(path, tmp_path / "h.onnx").path,
        "bf16": cast_onnx(path, tmp_path / "b.onnx", precision="bf16").path,
        "int8": quantize_onnx(path, [x], spec=spec, out=tmp_path / "q.onnx"),
        "both": quantize_onnx(path, [x], spec=spec, out=tmp_path / "qh.onnx", precision="fp16"),
    }
    audits = {name: audit_onnx(file) for name, file in files.items()}
    on = {name: [audit.products_on(e) for e in ("tensorrt", "openvino")] for name, audit in audits.items()}
    assert on["float"] == [{"FP32": 2}] * 2
    assert on["fp16"] == [{"FP16": 2}, {"FP32": 2}]
    assert on["bf16"] == [{"BF16": 2}, {"FP32": 2}]
    assert on["int8"] == [{"FP32": 1, "INT8": 1}] * 2
    assert on["both"] == [{"FP16": 1, "INT8": 1}, {"FP32": 1, "INT8": 1}]
    assert audits["bf16"].products_on("onnxruntime") == {"not computed": 2}
    assert (
        "find an implementation" in audits["bf16"].refusals["onnxruntime"] and not audits["bf16"].refusals["openvino"]
    )
    words = {name: audit.mending[1].split()[3:4] for name, audit in audits.items()}
    assert words == {"float": ["ptq"], "fp16": ["ptq"], "bf16": ["ptq"], "int8": ["cast"], "both": []}
    assert audits["float"].producer == "me" and "--precision fp16" in audits["float"].mending[1]
    path.unlink()
    assert audits["float"].products_on("openvino") == {"FP32": 2}


REFUSED = """
<ir_version: 10, opset_import: ["": 21, "own": 1]>
refused (float[1,4,8,8] x) => (float[1,4,N,M] y)
<float[4,4,1,1] w = {WEIGHT}, float[8] roi = {0, 0, 0, 0, 1, 1, 0.5, 0.5}, int64[4] size = {1, 4, 4, 4}> {
    a = Conv(x, w)
    BODY
}
""".replace("WEIGHT", ", ".join(["0.25"] * 16))


@pytest.mark.parametrize(
    ("word", "body"),
    [
        ("own.Own", "y = own.Own(a)"),
        ("Resize", 'y = Resize <coordinate_transformation_mode = "tf_crop_and_resize"> (a, roi, , size)'),
        ("DeformConv", "o, p = Split <axis = 1, num_outputs = 2> (a) y = DeformConv(a, w, o)"),
        ("", "y = Relu(a)"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_file_that_openvino_does_not_load_is_not_called_int8(word, body, tmp_path):
    openvino = pytest.importorskip("openvino")
    onnx.save(onnx.parser.parse_model(REFUSED.replace("BODY", body)), tmp_path / "m.onnx")
    x = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        path = quantize_onnx(tmp_path / "m.onnx", [x], spec=QuantSpec(target="openvino"), out=tmp_path / "q.onnx")
    found = audit_onnx(path)
    if word:
        with pytest.raises(Exception, match=word.split(".")[-1]):
            openvino.Core().read_model(path)
        assert word in found.refused and any(word in str(one.message) for one in seen)
    else:
        openvino.Core().read_model(path)
    assert found.int8_share == (0.0 if word else 1.0) and bool(found.refused) is bool(word)
