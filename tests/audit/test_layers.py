# Parsers of an engine's layers: recorded texts (see nvidia/README.md) and a real TensorRT-RTX build.

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import compress
from compress.audit.engine import EngineTensor, audit_listing, macs, operation
from compress.audit.files import parse_build_log, parse_inspector, read_engine_layers
from compress.errors import AuditError

RECORDED = Path(__file__).parent / "nvidia"
N = 16 * 14 * 14


def test_log_of_int8():
    listing = read_engine_layers(RECORDED / "rtx_1_7_int8.log")
    assert (listing.inputs, listing.outputs) == (("x",), ("y",))
    assert [operation(layer) for layer in listing.layers] == [
        "host",
        "pointwise",
        "conv",
        "pointwise",
        "conv",
        "pointwise",
    ]
    conv = listing.layers[2]
    assert conv.name == "conv0_myl0_2" and conv.kind == "correlation" and conv.tactic == ""
    assert conv.onnx_nodes == ("conv0", "DQ0", "WDQ0")
    assert [(t.dtype, t.shape) for t in conv.inputs] == [("int8", (-1, 16, 14, 14))]
    assert [(t.dtype, t.shape) for t in conv.outputs] == [("fp32", (-1, 16, 14, 14))]
    assert next((t.dtype, t.shape) for t in conv.constants) == ("int8", (16, 16, 3, 3))
    assert macs(conv) == N * 16 * 9
    total = listing.layers[-1]
    assert [t.dtype for t in total.inputs] == ["int8", "fp32"] and "add1" in total.onnx_nodes


def test_the_last_build_of_a_log_counts():
    first, second = ((RECORDED / f"rtx_1_7_{name}.log").read_text() for name in ("int8", "fp16"))
    stamped = second.replace("\nName: ", "\n[V] Name: ")  # a logger may put its mark before each line
    assert parse_build_log(first + stamped) == parse_build_log(second)


@pytest.mark.parametrize("text", ["", "Engine generation completed in 1 seconds.\n", "Layers:\n\nI/O Tensors:\n"])
def test_log_without_layers_is_refused(text):
    with pytest.raises(AuditError, match="verbose"):
        parse_build_log(text)


def test_inspector_of_10():
    listing = read_engine_layers(RECORDED / "inspector_10.json")
    assert "10.x" in listing.source and (listing.inputs, listing.outputs) == (("data",), ("out",))
    assert [operation(layer) for layer in listing.layers] == ["reformat", "reformat", "conv", "conv", "conv"]
    first = listing.layers[2]
    assert first.onnx_nodes == ("/conv1/Conv", "/relu/Relu")
    assert first.inputs[0].dtype == "int8" and first.inputs[0].elements() == 2 * 4 * 64  # 3 channels padded to 4
    assert macs(first) == 2 * 64 * 64 * 27
    assert [layer.sparse_weights for layer in listing.layers[2:]] == [False, True, True]
    audit = audit_listing(listing)
    assert audit.fixed_batch == 2
    assert [layer.sparse for layer in audit.weighted] == [False, True, False]
    assert audit.sparse_kernels() == "1 of 2 sparse"
    assert audit.layers[3].read_bytes == audit.layers[3].written_bytes == 64 * 64  # one tensor read for two purposes
    dense = next(f for f in audit.findings if f.kind == "dense tactic")
    assert dense.layers == ("/conv3/Conv",) and "1 of 2" in dense.text


def test_inspector_of_8():
    audit = audit_listing(read_engine_layers(RECORDED / "inspector_8.json"))
    assert audit.fixed_batch == 2 and audit.unknown_sizes == 0
    roles = ["quantize", "weighted", "weighted", "weighted", "requantize", "weighted", "reformat", "pool", "quantize"]
    assert [layer.role for layer in audit.layers] == [*roles, "weighted", "host"]
    stem, depthwise, point, joined, classifier = audit.weighted
    assert [layer.macs for layer in audit.weighted] == [64 * 32 * 27, 64 * 32 * 9, 64 * 8 * 32, 64 * 8 * 8, 10 * 8]
    assert stem.read_bytes == 4 * 256 and stem.written_bytes == depthwise.written_bytes == 32 * 64
    assert point.written_bytes == 2 * 32 * 64  # 8 channels padded to 32
    assert joined.input_types == ("int8", "fp16") and classifier.output_types == ("fp32",)
    assert {layer.precision for layer in audit.weighted} == {"int8"}
    assert next(f for f in audit.findings if f.kind == "requantize").layers == ("QuantizeLinear_17",)


def test_inspector_of_11():
    listing = read_engine_layers(RECORDED / "inspector_11.json")
    assert "11.x" in listing.source and (listing.inputs, listing.outputs) == (("data",), ("out",))
    conv = listing.layers[1]
    assert (conv.inputs[0].dtype, conv.outputs[0].dtype, conv.outputs[0].format) == (
        "int8",
        "fp16",
        "(NHWC) Channel major format",
    )
    assert macs(conv) == 32 * 64 * 16 * 9
    audit = audit_listing(listing)
    assert audit.fixed_batch is None and audit.activation_bytes == 64 * (16 * 4 + 16 + 16 + 32 * 2)


def test_types_that_10_does_not_tell_are_not_zero():
    document = json.loads((RECORDED / "inspector_10.json").read_text())
    for layer in document["Layers"]:
        for tensor in (*layer["Inputs"], *layer["Outputs"]):
            tensor["Format/Datatype"] = "N/A due to dynamic shapes"
            tensor["Dimensions"][0] = -1
    audit = audit_listing(parse_inspector(json.dumps(document)))
    assert audit.weighted[0].precision == "int8"  # of the weight, which it does report
    unknown_sizes = next(f for f in audit.findings if f.kind == "unknown")
    assert len(unknown_sizes.layers) == 5 and "not counted" in unknown_sizes.text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "no list"),
        ('{"Layers": []}', "no list"),
        ('{"Layers": ["conv1", "conv2"], "Bindings": ["data"]}', "names of 2 layers"),
        ('{"Layers": [{"LayerType": "Reformat"}]}', "has inputs or outputs"),
    ],
)
def test_other_json_is_refused(text, message):
    with pytest.raises(AuditError, match=message):
        parse_inspector(text)


def convolution(name="/conv/Conv", **more):
    wide = "Channel major FP16 format where channel % 8 == 0"
    source, target = (
        {"Name": n, "Location": "Device", "Dimensions": [1, c, 6, 6], "Format/Datatype": wide}
        for n, c in (("data", 8), ("a", 16))
    )
    return {
        "Name": name,
        "LayerType": "CaskConvolution",
        "Inputs": [source],
        "Outputs": [target],
        "ParameterType": "Convolution",
        "Kernel": [3, 3],
        "OutMaps": 16,
        "Weights": {"Type": "Half", "Count": 1152},
        "HasSparseWeights": 0,
        "TacticName": "sm80_xmma_fprop",
        "TacticValue": "0x28",
        "StreamId": 0,
        "Metadata": "[ONNX Layer: /conv/Conv]\x1e[ONNX Layer: /relu/Relu]",
        **more,
    }


def product(**more):
    shapes = {"a": [1, 576], "__mye1_dconst": [576, 10], "__mye2alpha": [1], "bias": [1, 10]}
    read = [{"Name": n, "Dimensions": d, "Format/Datatype": "Half"} for n, d in shapes.items()]
    return {
        "Name": "/fc/Gemm_myl0_1",
        "LayerType": "gemm",
        "Inputs": read,
        "Outputs": [{"Name": "out", "Dimensions": [1, 10], "Format/Datatype": "Half"}],
        "TacticName": "sm50_xmma_cublas_gemvx",
        "StreamId": 0,
        "Metadata": "[ONNX Layer: /fc/Gemm]\x1f[ONNX Layer: /relu_1/Relu]",
        **more,
    }


def parsed(*layers, **more):
    return parse_inspector(json.dumps({"Layers": layers, "Bindings": ["data", "out"], **more}))


def as_text(*layers):
    def written(value):
        if isinstance(value, list) and value and isinstance(value[0], dict):
            rows = (", ".join(f"{key}: {written(item)}" for key, item in row.items()) for row in value)
            return "[" + ",".join(f" {{ {row} }}" for row in rows) + "]"
        if isinstance(value, list):
            return "[" + ",".join(map(str, value)) + "]"
        return json.dumps(value) if isinstance(value, dict) else str(value).replace("\x1e", "").replace("\x1f", "")

    lines = (", ".join(f"{key}: {written(value)}" for key, value in layer.items()) for layer in layers)
    return "\n".join(["[01/01/2026-00:00:00] [V] [TRT] Layers:", *lines, "", "Bindings:", "data", "out", "[I] Built"])


def test_weights_among_the_inputs_of_a_product_of_10_are_no_activations():
    listing = parsed(convolution(), product())
    audit = audit_listing(listing)
    assert [t.name for t in listing.layers[1].inputs] == ["a"] and len(listing.layers[1].constants) == 3
    assert [layer.macs for layer in audit.weighted] == [36 * 1152, 576 * 10]
    assert audit.layers[1].read_bytes == 2 * 576 and audit.layers[1].weight_bytes == 2 * (5760 + 1 + 10)
    assert listing.layers[1].onnx_nodes == ("/fc/Gemm", "/relu_1/Relu")


def test_the_log_of_10_is_read_as_its_json():
    listing, text = parsed(convolution(), product()), parse_build_log(as_text(convolution(), product()))
    assert text.layers == listing.layers and (text.inputs, text.outputs) == (("data",), ("out",))


def test_further_keys_are_kept():
    audit = audit_listing(parsed(convolution(SomethingNew={"Of": "12.x"}), product(), AlsoNew=1))
    assert audit.layers[0].more == {"Kernel": [3, 3], "TacticValue": "0x28", "SomethingNew": {"Of": "12.x"}}


def test_what_is_missing_is_unknown_and_said():
    nameless, kindless, silent = convolution(), product(), product(Name="/z")
    del nameless["Name"], kindless["LayerType"], silent["Inputs"], silent["Outputs"]
    del nameless["Inputs"][0]["Dimensions"], nameless["Outputs"][0]["Format/Datatype"]
    listing = parsed(nameless, kindless, silent)
    assert listing.layers[0].name == "?" and listing.layers[1].kind == "?"
    assert len(listing.notes) == 4 and all("1 of 3 layers are listed without" in note for note in listing.notes)
    audit = audit_listing(listing)
    assert audit.layers[0].unknown_sizes == 2 and audit.layers[0].activation_bytes == 0
    assert audit.layers[1].macs is None
    assert {f.text for f in audit.findings if not f.layers} == set(listing.notes)


def test_the_first_of_several_profiles():
    listing = parsed(convolution(), product(), convolution("/conv/Conv [profile 1]"))
    assert len(listing.layers) == 2 and "1 layers of the later ones are left out" in listing.notes[0]


def test_a_fused_product_of_10():
    for more, expected in (({"Name": "__myl_FcCastAddErf"}, "product"), ({"TacticName": ""}, "pointwise")):
        more = {"LayerType": "fusion", "Name": "__myl_AddRelu", "Inputs": product()["Inputs"][:1]} | more
        assert operation(parsed(convolution(), product(**more)).layers[1]) == expected


@pytest.mark.parametrize(
    ("layout", "elements"),
    [
        ("Row major linear FP32", 2 * 5 * 6),
        ("Channel major FP16 format where channel % 8 == 0", 2 * 8 * 6),
        ("Two wide channel vectorized row major FP16 format", 2 * 6 * 6),
        ("Thirty-two wide channel vectorized row major Int8 format", 2 * 32 * 6),
    ],
)
def test_channels_padded_in_memory(layout, elements):
    assert EngineTensor(name="t", dtype="int8", shape=(2, 5, 2, 3), format=layout).elements() == elements


def test_files_beside_an_engine(tmp_path):
    engine = tmp_path / "ptq.engine"
    with pytest.raises(AuditError, match="does not exist"):
        read_engine_layers(engine)
    engine.write_bytes(b"plan")
    with pytest.raises(AuditError, match=r"ptq\.engine\.layers\.json"):
        read_engine_layers(engine)
    (tmp_path / "ptq.engine.log").write_text((RECORDED / "rtx_1_7_int8.log").read_text())
    assert "log" in read_engine_layers(engine).source
    (tmp_path / "ptq.engine.layers.json").write_text((RECORDED / "inspector_11.json").read_text())
    assert "11.x" in read_engine_layers(engine).source


def test_a_real_build(tmp_path):
    # Shapes, types and macs of a network that TensorRT-RTX builds here: what the log says is what was exported.
    from compress.engines.tensorrt.build import build_tensorrt
    from compress.engines.tensorrt.options import TensorRTOptions

    model = nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 16, 1), nn.ReLU()).eval()
    x = torch.randn(2, 16, 12, 12)
    qmodel, found = compress.quantize(model, x, [x]), {}
    for scales in ("weight", "output"):
        path = compress.export_onnx(qmodel, x, tmp_path / f"{scales}.onnx", precision="fp16", channel_scales=scales)
        built = build_tensorrt(path, "tensorrt-rtx", options=TensorRTOptions(sms=(89,)))
        found[scales] = audit_listing(read_engine_layers(built.path))
    for audit in found.values():
        assert [layer.precision for layer in audit.weighted] == ["int8", "int8"]
        assert sum(layer.macs for layer in audit.weighted) == 144 * (32 * 16 * 9 + 16 * 32)
        assert {"/0/Conv", "/2/Conv"} <= {node for layer in audit.weighted for node in layer.onnx_nodes}
    assert found["output"].activation_bytes < found["weight"].activation_bytes
    assert {t for layer in found["output"].weighted for t in layer.output_types} <= {"fp16", "int8"}
