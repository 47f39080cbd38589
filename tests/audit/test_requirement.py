import onnx
import pytest
import torch
from torch import nn

import compress
from analysis.engine_check.run import NETWORKS, TARGETS, TOKENS, ask
from compress.audit.engine import (
    EngineLayer,
    EngineListing,
    EngineTensor,
    audit_listing,
    folded_names,
    lost_in_runtime,
    unmet_by_audit,
    unmet_by_runtime,
)
from compress.engines.base import RuntimeLayer
from compress.support.process import sums_bytes_in_16_bits
from tests.exact import exported, optimized
from tests.further import further
from tests.networks import Net


def layer(name, dtype, nodes):
    def tensor(end, shape):
        return EngineTensor(name=f"{name}{end}", dtype=dtype, shape=shape)

    return EngineLayer(
        name=name,
        kind="correlation",
        onnx_nodes=nodes,
        inputs=(tensor("i", (-1, 4, 4, 4)),),
        outputs=(tensor("o", (-1, 4, 4, 4)),),
        constants=(tensor("w", (4, 4, 3, 3)),),
    )


def audit(*types, named=True):
    layers = tuple(layer(f"l{i}", dtype, (f"/{i}/Conv",) if named else ()) for i, dtype in enumerate(types))
    return audit_listing(EngineListing(source="test", layers=layers))


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize(
    ("types", "nodes", "words"),
    [
        (("int8", "int8"), ["/0/Conv", "/1/Conv"], ""),
        (("int8", "fp16"), ["/0/Conv"], ""),  # left float in the file already
        (("int8", "fp16"), ["/0/Conv", "/1/Conv"], "/1/Conv"),
        (("fp32", "fp32"), ["/0/Conv", "/1/Conv"], "2"),
        (("int8",), [], "no INT8 operation"),
        (("int8", "fp8"), ["/0/Conv"], ""),  # more than the file asks for
        (("tf32", "int8"), ["/1/Conv"], ""),
    ],
)
def test_int8(types, nodes, words, named):
    unmet = unmet_by_audit(audit(*types, named=named), "int8", nodes)
    assert bool(unmet) == bool(words)
    if unmet and named:
        assert words in unmet[0]


@pytest.mark.parametrize(
    ("types", "fits"),
    [(("tf32", "int8"), False), (("fp16", "int8"), True), (("fp16", "fp32"), False), (("bf16",), True)],
)
def test_fp16(types, fits):
    unmet = unmet_by_audit(audit(*types), "fp16", [])
    assert (not unmet) == fits
    assert fits or "1 of 2" in unmet[0]


SMALL = (
    "residual",
    "squeeze and excite",
    "concat",
    "pooled",
    "attention",
    "encoder",
    "shared by levels",
    "frozen norm",
)
# Blocks that TensorRT-RTX builds, each in seconds.
BUILT = {"residual", "encoder"}


CASES = [(n, t) for n in SMALL for t in TARGETS if t != "tensorrt" or n in BUILT]


@pytest.mark.parametrize(
    ("name", "target"), further(CASES, [c for c in CASES if c[0] in {"residual", "squeeze and excite", "attention"}])
)
def test_what_the_audit_calls_int8_the_engine_computes_in_8_bits(name, target, tmp_path):
    network, x = NETWORKS[name]()
    answer = ask(network.eval(), x, target, tmp_path)
    assert answer.int8 and answer.lost == ()


def moved():
    def run(net, x):
        a, b, c, d, e, f = net.convs
        x = c(b(a(x).roll(1, 3)).repeat(1, 2, 1, 1)).clamp(-0.5, 0.8)
        grid = torch.stack(torch.meshgrid(torch.linspace(-1, 1, 8), torch.linspace(-1, 1, 8), indexing="ij"))
        x = d(torch.cat([x, grid.expand(x.shape[0], -1, -1, -1)], 1)).clamp(0, 0.5)
        rows = e(x).flatten(2)
        weights = (rows.transpose(1, 2) @ rows).softmax(-1)
        return f((rows @ weights.transpose(1, 2)).reshape(x.shape))

    return Net(run, convs=nn.ModuleList(nn.Conv2d(n, 8, 1) for n in (3, 8, 16, 10, 8, 8)))


@pytest.mark.parametrize("target", ["openvino", "onnxruntime"])
def test_moved_and_clipped_tensors_are_int8_where_the_audit_says_so(target, tmp_path):
    answer = ask(moved().eval(), torch.randn(2, 3, 8, 8), target, tmp_path)
    assert len(answer.int8) >= 6 and answer.lost == ()


@pytest.mark.parametrize(
    "network",
    [
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1)),
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU6()),
        nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.Upsample(scale_factor=2), nn.Conv2d(8, 2, 1)
        ),
    ],
)
def test_a_convolution_whose_result_is_not_rounded_is_float_on_onnx_runtime(network, tmp_path):
    x = torch.randn(2, 3, 16, 16)
    _, path = exported(network, x, tmp_path / "x.onnx", target="onnxruntime", head="quantize")
    float_rows = {row.name: row.reason for row in compress.audit_onnx(path).rows if not row.int8}
    with compress.build_engine(path, "onnxruntime", profile="yes") as engine:
        kinds = {layer.original_names[0]: layer.kind for layer in engine.runtime_layers()}
    assert float_rows.keys() == {name for name, kind in kinds.items() if kind in ("Conv", "FusedConv", "NhwcFusedConv")}
    assert float_rows and all("result is not quantized" in reason for reason in float_rows.values())


def test_a_layer_that_the_engine_runs_in_float_is_named(tmp_path):
    # In a file for OpenVINO the last convolution's result is not rounded; ONNX Runtime's own graph is the oracle.
    network, x = NETWORKS["chain"]()
    _, path = exported(network, x, tmp_path / "x.onnx", target="openvino")
    nodes = [row.name for row in compress.audit_onnx(path).rows if row.int8]
    with compress.build_engine(path, "onnxruntime", profile="yes") as engine:
        lost = lost_in_runtime(engine.runtime_layers(), nodes, folded_names(path))
    own = [node for node in onnx.load(optimized(path)).graph.node if node.op_type == "Conv"]
    assert len(nodes) == 3 and lost == tuple(node.name for node in own) == ("/4/Conv",)


def test_names_beyond_the_first_are_counted():
    (message,) = unmet_by_audit(audit(*["fp16"] * 14), "int8", [f"/{i}/Conv" for i in range(14)])
    names, _, more = message.rpartition(": ")[2].partition(" and ")
    assert len(names.split(", ")) + int(more.removesuffix(" more")) == 14


def runtime(kind, precision, *names):
    return RuntimeLayer(name="layer", kind=kind, precision=precision, original_names=names)


def test_a_runtime_layer_counts_if_it_multiplies_in_8_bits():
    nodes = ["/0/Conv", "/1/Gemm"]
    both = [runtime("Convolution", "u8", "/0/Conv", "/0/Relu"), runtime("FullyConnected", "i8", "/1/Gemm")]
    assert unmet_by_runtime(both, nodes) == ()
    for other in (runtime("FullyConnected", "f32", "/1/Gemm"), runtime("Reorder", "i8", "/1/Gemm")):
        (text,) = unmet_by_runtime([both[0], other], nodes)
        assert text == "1 of 2 INT8 operations of the ONNX file are not INT8 here: /1/Gemm"


def test_a_layer_with_an_invented_name_stands_for_one_node():
    nodes = ["/0/Gemm", "/1/Gemm"]
    named, invented = runtime("FullyConnected", "i8", "/0/Gemm"), runtime("FullyConnected", "u8", "Multiply_7")
    assert unmet_by_runtime([named, invented], nodes) == ()
    assert "2 of 2" in unmet_by_runtime([invented], nodes)[0]
    assert "no INT8" in unmet_by_runtime([named], [])[0]
    assert "/1/Gemm" in unmet_by_runtime([named, runtime("FullyConnected", "f32", "Multiply_7")], nodes)[0]
    assert unmet_by_runtime([named, runtime("Subgraph", "i8", "/1/Mul/Fused")], nodes, {"/1/Gemm": ["/1/Mul"]}) == ()
    assert unmet_by_runtime([named, runtime("Subgraph", "f32", "/1/Mul/Fused")], nodes, {"/1/Gemm": ["/1/Mul"]})


def test_a_few_names_are_all_shown():
    (text,) = unmet_by_audit(audit(*["fp16"] * 3), "int8", [f"/{i}/Conv" for i in range(3)])
    assert text.endswith(": /0/Conv, /1/Conv, /2/Conv")
    (text,) = unmet_by_audit(audit("int8", "fp16", named=False), "int8", ["a", "b"])
    assert text == "1 layers compute in 8 bits, and the ONNX file asks for 2"


def test_no_product_is_lost_whose_name_the_engine_does_not_keep(tmp_path):
    # OpenVINO calls a product of attention by the last of the scales after it, which the file computes from sizes.
    model, x = TOKENS["attention"]().eval(), torch.randn(2, 8, 32)
    torch.onnx.export(model, (x,), str(tmp_path / "float.onnx"), dynamo=False, opset_version=17)
    path = compress.quantize_onnx(tmp_path / "float.onnx", [x], spec=compress.QuantSpec(target="openvino"))
    nodes = [row.name for row in compress.audit_onnx(path).rows if row.int8]
    with compress.build_engine(path, "openvino", precision="f32") as engine:
        layers = engine.runtime_layers()
    assert not [one for one in layers if one.kind in ("FullyConnected", "MatMul") and one.precision == "f32"]
    assert nodes and lost_in_runtime(layers, nodes, folded_names(path)) == ()
    assert sums_bytes_in_16_bits() or lost_in_runtime(layers, nodes) != ()  # without VNNI it fuses otherwise
