# Findings, bytes, advice and roofline of engines, against given layers and manual counts.

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from compress.audit.engine import EngineLayer, EngineListing, EngineTensor, audit_listing
from compress.audit.files import read_cuda_layers, read_engine_layers
from compress.audit.roofline import choices_text, engine_roofline, int8_choices
from compress.errors import EngineError, RooflineError
from compress.roofline_model import Device
from tests.engines.cuda.qdq import Builder

RECORDED = Path(__file__).parent / "nvidia"
BIG = (-1, 64, 8, 8)
N = 64 * 64
DEVICE = Device(
    name="toy",
    title="Toy",
    bandwidth_bytes_per_s=1e9,
    dense_flops_per_s={"fp32": 1e12, "fp16": 2e12, "int8": 4e12},
    source="made up",
)


def t(name, dtype, shape=BIG):
    return EngineTensor(name=name, dtype=dtype, shape=shape)


def conv(name, source, target, *extra, weight="int8", kernel=3, **more):
    return EngineLayer(
        name=name,
        kind="CaskConvolution",
        onnx_nodes=(f"/{name}/Conv",),
        inputs=(t(*source), *(t(*e) for e in extra)),
        outputs=(t(*target),),
        constants=(t("w", weight, (64, 64, kernel, kernel)),),
        **more,
    )


def audited(*layers):
    return audit_listing(EngineListing(source="test", layers=layers, inputs=("x",), outputs=("y",)))


def kernel(name, sources, target, nodes=(), kind="kgen"):
    return EngineLayer(
        name=name, kind=kind, onnx_nodes=tuple(nodes), inputs=tuple(t(*s) for s in sources), outputs=(t(*target),)
    )


def kinds(audit):
    return {finding.kind for finding in audit.findings}


def finding(audit, kind):
    return next(f for f in audit.findings if f.kind == kind)


def test_a_good_engine_has_nothing_to_report():
    audit = audited(
        kernel("q", [("x", "fp32")], ("x8", "int8")),
        conv("a", ("x8", "int8"), ("a8", "int8")),
        conv("b", ("a8", "int8"), ("b8", "int8"), ("x8", "int8")),
        conv("c", ("b8", "int8"), ("c8", "int8")),
    )
    assert audit.findings == () and audit.advice == ""
    assert audit.activation_bytes == N * (4 + 1 + 2 + 3 + 2)
    assert audit.fp16_bytes == N * (4 + 2 + 4 + 6 + 4)
    assert audit.share("int8") == 1.0 and audit.kernels == 4
    assert audit.weight_bytes == 3 * 64 * 64 * 9


def test_requantize_kernels_and_wide_outputs():
    audit = audited(
        kernel("q", [("x", "fp32")], ("x8", "int8")),
        conv("a", ("x8", "int8"), ("a32", "fp32")),
        kernel("r", [("a32", "fp32")], ("a8", "int8")),
        conv("b", ("a8", "int8"), ("b32", "fp32")),
        kernel("s", [("b32", "fp32"), ("x8", "int8")], ("y", "fp32"), ["/add/Add"]),
    )
    assert [layer.role for layer in audit.layers] == ["quantize", "weighted", "requantize", "weighted", "add"]
    assert finding(audit, "float output").layers == ("a", "b")
    assert finding(audit, "requantize").layers == ("r",) and finding(audit, "requantize").bytes == 5 * N
    assert "FP32" in finding(audit, "requantize").text
    assert finding(audit, "add").layers == ("s",) and finding(audit, "add").bytes == 9 * N
    assert finding(audit, "fp32").bytes == 4 * N * 4  # a32 and b32, each written once and read once; x and y are given
    assert audit.activation_bytes == N * (5 + 5 + 5 + 5 + 9)
    assert audit.fp16_bytes == N * (
        6 + 4 + 0 + 4 + 2 + 6
    )  # of the last: the residual, and the cast to the network's output
    assert "fp16" in audit.advice and "channel_scales" in audit.advice


def test_layers_that_fell_to_floating_point():
    audit = audited(
        conv("a", ("x", "int8"), ("a8", "int8")),
        conv("b", ("a8", "int8"), ("b16", "fp16")),
        conv("c", ("b16", "fp16"), ("y", "fp16"), weight="fp16"),
    )
    assert finding(audit, "float layer").layers == ("c",) and "1 of 3" in finding(audit, "float layer").text
    assert audit.share("int8") == pytest.approx(2 / 3)


def test_fp32_engine_is_reported_of_fp16():
    audit = audited(conv("a", ("x", "fp32"), ("y", "fp32"), weight="fp32"))
    assert audit.findings == () and "computes in FP32" in audit.advice


@pytest.mark.parametrize(
    ("tactic", "known", "expected"),
    [
        ("sm80_xmma_fprop_sparse_conv_x", True, set()),
        ("sm80_xmma_gemm_sptensor16x8x64", True, set()),
        ("sm80_xmma_fprop_implicit_gemm", True, {"dense tactic"}),
        ("sm80_xmma_fprop_implicit_gemm", False, set()),
        ("", True, {"unknown"}),
    ],
)
def test_sparse_weights(tactic, known, expected):
    layer = conv("a", ("x", "int8"), ("y", "int8"), tactic=tactic, sparse_weights=known)
    assert kinds(audited(layer)) == expected
    silent = EngineListing(source="test", layers=(replace(layer, sparse_weights=None),), inputs=("x",), outputs=("y",))
    assert kinds(audit_listing(silent, sparse_nodes={"/a/Conv"} if known else ())) == expected


def test_reformats_and_batch():
    def fixed(layer, batch):
        def put(tensors):
            return tuple(replace(x, shape=(batch, *x.shape[1:])) for x in tensors)

        return replace(layer, inputs=put(layer.inputs), outputs=put(layer.outputs))

    layers = (
        kernel("move", [("x", "fp16")], ("m", "fp16"), kind="Reformat"),
        kernel("__myl_TranCast_myl0_1", [("m", "fp16")], ("n", "fp16")),
        conv("a", ("n", "fp16"), ("y", "fp16"), weight="fp16"),
    )
    one, four = (audited(*(fixed(layer, b) for layer in layers)) for b in (-1, 4))
    assert (one.fixed_batch, four.fixed_batch) == (None, 4)
    assert one.activation_bytes == four.activation_bytes == N * 12
    assert [layer.macs for layer in one.layers] == [layer.macs for layer in four.layers] == [0, 0, N * 64 * 9]
    assert finding(four, "reformat").layers == ("move", "__myl_TranCast_myl0_1")


def test_bytes_of_the_recorded_engines():
    n = 16 * 14 * 14
    int8, int8_fp16, fp16 = (
        audit_listing(read_engine_layers(RECORDED / f"rtx_1_7_{name}.log")) for name in ("int8", "int8_fp16", "fp16")
    )
    assert int8.activation_bytes == n * (5 + 5 + 5 + 5 + 9)
    assert int8_fp16.activation_bytes == n * (5 + 3 + 3 + 3 + 7)
    assert kinds(int8) == {"float output", "requantize", "add", "fp32"}
    assert "add" not in kinds(fp16) and fp16.advice == ""
    assert fp16.fp16_bytes == fp16.activation_bytes
    assert int8.fp16_bytes == int8_fp16.fp16_bytes == fp16.activation_bytes


def test_roofline_of_engine_layers():
    audit = audited(conv("a", ("x", "int8"), ("a32", "fp32")), kernel("r", [("a32", "fp32")], ("y", "int8")))
    bound = engine_roofline(audit, device=DEVICE, batch_size=2)
    first, second = bound.rows
    assert first.flops == 2 * 2 * N * 64 * 9
    moved = 2 * 5 * N + 64 * 64 * 9
    assert first.least_time_ms == pytest.approx(1e3 * max(first.flops / 4e12, moved / 1e9))
    assert second.least_time_ms == pytest.approx(1e3 * 2 * 5 * N / 1e9) and second.bound == "memory"
    assert bound.precision == "int8" and bound.least_time_ms == first.least_time_ms + second.least_time_ms


def test_where_int8_pays():
    audit = audited(
        kernel("q", [("x", "fp32")], ("x8", "int8")),
        conv("a", ("x8", "int8"), ("a32", "fp32")),
        kernel("r", [("a32", "fp32")], ("y8", "int8")),
    )
    devices = (replace(DEVICE, bandwidth_bytes_per_s=speed) for speed in (1e9, 1e15))
    (memory,), (compute,) = (int8_choices(audit, device=device, batch_size=2) for device in devices)
    assert not memory.int8_pays and compute.int8_pays
    assert memory.int8_bytes == 10 * N and memory.fp16_bytes == 4 * N
    assert compute.fp16_ms == pytest.approx(2 * compute.int8_ms, rel=1e-2)
    assert "0 of 1" in choices_text((memory,), device="toy", batch_size=2)
    assert "no 8-bit layer" in choices_text((), device="toy", batch_size=2)


def test_unknown_device():
    with pytest.raises(RooflineError, match="rtx4090"):
        engine_roofline(audited(conv("a", ("x", "int8"), ("y", "int8"))), device="rtx4091")


# The audit of what our own engine makes of a file: types, bytes and products against hand counts.


def test_a_residual_block_moves_one_byte_an_element(tmp_path):
    b = Builder((1, 16, 8, 8))
    x = b.quantize("input")
    y = b.quantize(b.op("Relu", b.conv(x, 32, stride=2)))
    y = b.quantize(b.op("Relu", b.op("Add", b.conv(y, 32), y)))
    path = b.save(tmp_path / "m.onnx", b.linear(b.op("Flatten", b.op("GlobalAveragePool", y)), 10))
    audit = audit_listing(read_cuda_layers(path), onnx=path)
    first, second = (layer for layer in audit.layers if layer.operation == "conv")
    assert (first.precision, first.input_types, first.output_types) == ("int8", ("int8",), ("int8",))
    assert (first.read_bytes, first.written_bytes) == (16 * 8 * 8, 32 * 4 * 4)
    assert (first.macs, second.macs) == (32 * 16 * 9 * 16, 32 * 32 * 9 * 16)
    assert second.read_bytes == 32 * 4 * 4  # its input is its residual too
    assert second.weight_bytes == 32 * 32 * 9
    assert audit.share("int8") > 0.99


@pytest.mark.parametrize(("scores", "precision"), [("codes", "int8"), ("values", "fp16")])
def test_attention_counts_both_of_its_products(tmp_path, scores, precision):
    b = Builder((1, 2, 6, 8))
    q, k, v = (b.quantize("input") for _ in range(3))
    if scores == "values":
        q, k = (b.op("Sqrt", b.op("Abs", "input")) for _ in range(2))
    scores = b.op("MatMul", q, b.op("Transpose", k, perm=[0, 1, 3, 2]))
    y = b.op("MatMul", b.quantize(b.op("Softmax", scores, axis=-1), clip=1.0), v)
    audit = audit_listing(read_cuda_layers(b.save(tmp_path / "m.onnx", b.quantize(y))))
    (layer,) = [layer for layer in audit.layers if layer.kind == "Attention"]
    assert layer.macs == 2 * 6 * 6 * (8 + 8)
    assert layer.precision == precision


def test_a_file_that_the_engine_cannot_run_is_refused(tmp_path):
    b = Builder((1, 3, 4, 4))
    y = b.op("Cast", b.op("QuantizeLinear", "input", b.constant(np.float32(0.1)), b.constant(np.int8(0))), to=1)
    with pytest.raises(EngineError, match="only DequantizeLinear may read them"):
        read_cuda_layers(b.save(tmp_path / "m.onnx", y))
