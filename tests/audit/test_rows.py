"""Rows of flattened tensors, in real TensorRT-RTX builds with an open and a fixed batch, and in given layers."""

from dataclasses import replace

import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torchvision.models import SwinTransformer, VisionTransformer
from typer.testing import CliRunner

import compress
from compress.audit.engine import audit_listing
from compress.audit.files import onnx_beside, read_engine_layers
from compress.audit.layers import EngineLayer, EngineListing, EngineTensor
from compress.audit.onnx_shapes import NodeOutput, onnx_shapes
from compress.audit.rows import with_rows
from compress.cli.app import app
from compress.records import EngineRow


@pytest.fixture(scope="module", params=["INT8 ViT", "fp16 Swin"])
def engines(request, tmp_path_factory):
    """A small network: its ONNX file, its engine for 1 to 8 images, and its engine for 8 alone."""
    from compress.engines.tensorrt.build import build_tensorrt
    from compress.engines.tensorrt.options import TensorRTOptions

    folder = tmp_path_factory.mktemp("vit")
    torch.manual_seed(0)
    x = torch.randn(2, 3, 64, 64)
    if request.param == "fp16 Swin":
        model = SwinTransformer([4, 4], 32, [1, 1], [2, 4], [4, 4], num_classes=10).eval()
    else:
        vit = VisionTransformer(
            image_size=64, patch_size=16, num_layers=1, num_heads=2, hidden_dim=64, mlp_dim=128, num_classes=10
        )
        model = compress.quantize(vit.eval(), x, [x])
    path = compress.export_onnx(model, x, folder / "network.onnx", precision="fp16")
    built = [
        build_tensorrt(path, "tensorrt-rtx", options=TensorRTOptions(sms=(89,), batch=batch)).path
        for batch in ((1, 8, 8), (8, 8, 8))
    ]
    return path, *built


def test_bytes_of_an_open_batch_are_those_of_a_fixed_one(engines):
    path, dynamic, fixed = engines
    complete, oracle = audit_listing(read_engine_layers(dynamic), onnx=path), audit_listing(read_engine_layers(fixed))
    assert complete.fixed_batch is None and oracle.fixed_batch == 8
    assert complete.kernels == oracle.kernels and complete.unknown_sizes == 0
    assert complete.activation_bytes == oracle.activation_bytes
    assert [layer.macs for layer in complete.weighted] == [layer.macs for layer in oracle.weighted]
    # tokens x tokens that each sees x width, once for the scores and once for the values
    tokens = {"int8": [17 * 17 * 64], "fp16": [16 * 16 * 16 * 32, 8 * 8 * 16 * 64]}
    found = [layer for layer in complete.weighted if "mha" in layer.name]
    assert [layer.macs for layer in found] == [2 * count for count in tokens[found[0].precision]]


def test_without_the_file_the_rest_is_said_to_be_unknown(engines):
    path, dynamic, _ = engines
    silent, complete = (audit_listing(read_engine_layers(dynamic), onnx=onnx) for onnx in (None, path))
    assert silent.unknown_sizes > 0 and silent.activation_bytes < complete.activation_bytes
    assert any(finding.kind == "unknown" and "size" in finding.text for finding in silent.findings)
    assert any(layer.macs is None for layer in silent.weighted)
    assert EngineRow.of(silent, variant="ptq", engine="rtx").unknown_sizes == silent.unknown_sizes


def test_the_command_finds_the_file_beside_the_engine(engines, tmp_path):
    path, dynamic, _ = engines
    assert onnx_beside(dynamic) == path and onnx_beside(dynamic.with_name(dynamic.name + ".log")) == path
    assert "unknown size" not in CliRunner().invoke(app, ["inspect", "engine", str(dynamic)]).output
    alone = tmp_path / "alone.log"
    alone.write_text(dynamic.with_name(dynamic.name + ".log").read_text(encoding="utf-8"), encoding="utf-8")
    assert onnx_beside(alone) is None
    assert "unknown size" in " ".join(CliRunner().invoke(app, ["inspect", "engine", str(alone)]).output.split())


def layer(name, sources, targets, nodes=(), kind="kgen"):
    inputs, outputs = ([EngineTensor(name=n, dtype="fp16", shape=s) for n, s in side] for side in (sources, targets))
    return EngineLayer(
        name=name, kind=kind, onnx_nodes=tuple(nodes), inputs=tuple(inputs), outputs=tuple(outputs), constants=()
    )


def rows(listing, shapes=None):
    found = with_rows(listing, shapes)
    return {(t.name, t.shape): t.rows for x in found.layers for t in (*x.inputs, *x.outputs)}


def test_two_answers_are_no_answer():
    shapes = {
        "all": (NodeOutput(dims=(17, 64), users=frozenset({"far"}), result=False),),
        "one": (NodeOutput(dims=(64,), users=frozenset({"far"}), result=False),),
    }
    for nodes, expected in ((("all",), 17), (("one",), 1), (("all", "one"), None)):
        listing = EngineListing(source="test", layers=(layer("k", [], [("t", (-1, 64))], nodes),))
        assert rows(listing, shapes) == {("t", (-1, 64)): expected}


def test_what_a_kernel_keeps_to_itself_does_not_count():
    shapes = {
        "split": (NodeOutput(dims=(17, 3, 2, 32), users=frozenset({"gather"}), result=False),),
        "gather": (NodeOutput(dims=(2, 17, 32), users=frozenset({"matmul"}), result=False),),
    }
    listing = EngineListing(source="test", layers=(layer("k", [], [("q", (-1, 17, 32))], ("split", "gather")),))
    assert rows(listing, shapes) == {("q", (-1, 17, 32)): 2}


def test_views_and_products_keep_rows_and_moves_keep_elements():
    shapes = {"norm": (NodeOutput(dims=(17, 64), users=frozenset({"fc"}), result=False),)}
    listing = EngineListing(
        source="test",
        inputs=("x",),
        layers=(
            layer("__myl_AddMul_myl0_0", [("x", (-1, 17, 64))], [("n", (-1, 17, 64))], ("norm",)),
            layer("fc", [("n", (-1, 64))], [("f", (-1, 192))], kind="gemm"),
            layer("__myl_ReshTran_myl0_2", [("f", (-1, 192))], [("h", (-1, 96))]),
            layer("__myl_ReshMean_myl0_3", [("h", (-1, 96))], [("m", (-1, 32))]),
            layer("k", [("z", (-1, 3, -1))], []),
        ),
    )
    found = rows(listing, shapes)
    assert found["n", (-1, 64)] == found["f", (-1, 192)] == 17
    assert found["h", (-1, 96)] == 2 * 17
    assert found["m", (-1, 32)] is None and found["z", (-1, 3, -1)] is None


def test_a_part_of_a_tensor_has_its_rows_and_no_more_is_written_than_read():
    """Queries, cut out of (windows, tokens, 3 * 32): the node that the kernel names leaves all three."""
    shapes = {"qkv": (NodeOutput(dims=(16, 16, 96), users=frozenset({"split"}), result=False),)}
    whole = layer("fc", [("x", (-1, 256, 8))], [("f", (-1, 96))], ("qkv",), kind="gemm")
    cut = layer("__myl_AddReshTranMaxr_myl0_1", [("f", (-1, 32))], [("q", (-1, 16, 16))], ("qkv",))
    for strides, part, queries in (((96, 1), 256, None), ((32, 1), 768, 96)):
        written, read = (replace(t, strides=s) for t, s in ((whole.outputs[0], (96, 1)), (cut.inputs[0], strides)))
        listing = EngineListing(
            source="test",
            inputs=("x",),
            layers=(replace(whole, outputs=(written,)), replace(cut, inputs=(read,))),
        )
        found = rows(listing, shapes)
        assert found["f", (-1, 96)] == 256 and found["f", (-1, 32)] == part
        assert found["q", (-1, 16, 16)] == queries


def test_reading_more_than_was_written_is_a_contradiction():
    shapes = {"a": (NodeOutput(dims=(8,), users=frozenset({"b"}), result=False),)}
    layers = (
        layer("k", [], [("t", (-1, 8))], ("a",)),
        layer("p", [("t", (-1, 64)), ("x", (-1, 64))], [("y", (-1, 64))], kind="gemm"),
    )
    found = rows(EngineListing(source="test", layers=layers, inputs=("x",)), shapes)
    assert found["t", (-1, 8)] is None and found["t", (-1, 64)] is None and found["x", (-1, 64)] == 1


@pytest.mark.parametrize(("dims", "expected"), [((17, 32, 64), None), ((17, 32, 1), 17), ((17, 64), None)])
def test_a_dimension_of_one_is_no_view_of_a_longer_one(dims, expected):
    shapes = {"n": (NodeOutput(dims=dims, users=frozenset({"far"}), result=False),)}
    listing = EngineListing(source="test", layers=(layer("k", [], [("t", (-1, 32, 1))], ("n",)),))
    assert rows(listing, shapes) == {("t", (-1, 32, 1)): expected}


def test_a_kernel_that_repeats_may_write_more_than_it_reads():
    shapes = {
        "n": (NodeOutput(dims=(16, 8), users=frozenset({"far"}), result=False),),
        "m": (NodeOutput(dims=(4, 8), users=frozenset({"n"}), result=False),),
    }
    for step, expected in (("AddRepl", 16), ("AddMul", 4)):
        layers = (
            layer("fc", [], [("s", (-1, 8))], ("m",), kind="gemm"),
            layer(f"__myl_{step}_myl0_1", [("s", (-1, 8))], [("t", (-1, 8))], ("n",)),
        )
        assert rows(EngineListing(source="test", layers=layers), shapes)["t", (-1, 8)] == expected


def test_shapes_of_a_file_with_a_reshape(tmp_path):
    graph = helper.make_graph(
        [
            helper.make_node("Reshape", ["x", "flat"], ["rows"], name="reshape"),
            helper.make_node("MatMul", ["rows", "w"], ["y"], name="matmul"),
        ],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 17, 64])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [
            helper.make_tensor("flat", TensorProto.INT64, [2], [-1, 64]),
            helper.make_tensor("w", TensorProto.FLOAT, [64, 32], bytes(64 * 32 * 4), raw=True),
        ],
    )
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph), path)
    found = onnx_shapes(path)
    assert [out.dims for out in found["reshape"]] == [(17, 64)] and found["reshape"][0].users == {"matmul"}
    assert [(out.dims, out.result) for out in found["matmul"]] == [((17, 32), True)]
    path.write_bytes(b"no model")
    assert onnx_shapes(path) == {}
