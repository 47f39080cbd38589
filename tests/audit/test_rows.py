# Rows of flattened tensors, in real TensorRT-RTX builds with an open and a fixed batch, and in given layers.

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import helper
from torchvision.models import SwinTransformer, VisionTransformer
from typer.testing import CliRunner

import compress
from compress.audit.engine import (
    EngineLayer,
    EngineListing,
    EngineTensor,
    NodeOutput,
    audit_listing,
    onnx_shapes,
    with_rows,
)
from compress.audit.files import onnx_beside, read_engine_layers
from compress.cli.app import app
from compress.records.files import EngineRow
from tests.onnx_models import onnx_model


@pytest.fixture(scope="module", params=["INT8 ViT", "fp16 Swin"])
def engines(request, tmp_path_factory):
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


@pytest.mark.parametrize("name", ["test_Conv1d_pad1size1", "test_ConvTranspose2d"])
def test_a_generated_kernel_that_convolves_is_a_product(name, tmp_path):
    from compress.engines.tensorrt.options import TensorRTOptions

    # TensorRT-RTX names them by their steps: Corr in 8 bits, and Deco, in half precision although the file says INT8.
    path = Path(onnx.__file__).parent / "backend/test/data/pytorch-converted" / name / "model.onnx"
    (value,) = {i.name: i for i in onnx.load(path).graph.input if i.name == "0"}.values()
    x = np.random.default_rng(0).standard_normal([d.dim_value for d in value.type.tensor_type.shape.dim])
    file = compress.quantize_onnx(path, [x.astype(np.float32)], out=tmp_path / "q.onnx", precision="fp16")
    options = TensorRTOptions(sms=(89,))
    (found,) = compress.audit_engine(compress.build_tensorrt(file, options=options).path).weighted
    assert (found.operation, found.precision) == ("conv", "fp16" if "Transpose" in name else "int8")
    assert any(node.startswith("Conv") for node in found.onnx_nodes)


def test_an_attention_computes_in_the_type_of_its_operands_not_of_its_mask():
    read = (("mask", "fp32"), ("q", "fp16"), ("k", "fp16"), ("v", "fp16"))
    kernel = layer("_gemm_mha_v2_myl0_32", [(name, (2, 4, 16, 16)) for name, _ in read], [("y", (2, 4, 16, 16))])
    typed = (replace(tensor, dtype=kind) for tensor, (_, kind) in zip(kernel.inputs, read, strict=True))
    kernel = replace(kernel, inputs=tuple(typed))
    (found,) = audit_listing(listing(kernel)).weighted
    assert found.precision == "fp16"


def layer(name, sources, targets, nodes=(), kind="kgen"):
    inputs, outputs = ([EngineTensor(name=n, dtype="fp16", shape=s) for n, s in side] for side in (sources, targets))
    return EngineLayer(
        name=name, kind=kind, onnx_nodes=tuple(nodes), inputs=tuple(inputs), outputs=tuple(outputs), constants=()
    )


def listing(*layers, inputs=(), outputs=()):
    return EngineListing(source="test", layers=layers, inputs=inputs, outputs=outputs)


def of(*dims, users=("far",), result=False):
    return (NodeOutput(dims=dims, users=frozenset(users), result=result),)


def rows(listing, shapes=None):
    found = with_rows(listing, shapes)
    return {(t.name, t.shape): t.rows for x in found.layers for t in (*x.inputs, *x.outputs)}


def test_two_answers_are_no_answer():
    for nodes, expected in ((("all",), 17), (("one",), 1), (("all", "one"), None)):
        found = rows(listing(layer("k", [], [("t", (-1, 64))], nodes)), {"all": of(17, 64), "one": of(64)})
        assert found == {("t", (-1, 64)): expected}


def test_what_a_kernel_keeps_to_itself_does_not_count():
    shapes = {"split": of(17, 3, 2, 32, users=["gather"]), "gather": of(2, 17, 32, users=["matmul"])}
    found = rows(listing(layer("k", [], [("q", (-1, 17, 32))], ("split", "gather"))), shapes)
    assert found == {("q", (-1, 17, 32)): 2}


def test_views_and_products_keep_rows_and_moves_keep_elements():
    layers = (
        layer("__myl_AddMul_myl0_0", [("x", (-1, 17, 64))], [("n", (-1, 17, 64))], ("norm",)),
        layer("fc", [("n", (-1, 64))], [("f", (-1, 192))], kind="gemm"),
        layer("__myl_ReshTran_myl0_2", [("f", (-1, 192))], [("h", (-1, 96))]),
        layer("__myl_ReshMean_myl0_3", [("h", (-1, 96))], [("m", (-1, 32))]),
        layer("k", [("z", (-1, 3, -1))], []),
    )
    found = rows(listing(*layers, inputs=("x",)), {"norm": of(17, 64, users=["fc"])})
    assert found["n", (-1, 64)] == found["f", (-1, 192)] == 17
    assert found["h", (-1, 96)] == 2 * 17
    assert found["m", (-1, 32)] is None and found["z", (-1, 3, -1)] is None


def test_a_part_of_a_tensor_has_its_rows_and_no_more_is_written_than_read():
    # Queries, cut out of (windows, tokens, 3 * 32): the node that the kernel names leaves all three.
    whole = layer("fc", [("x", (-1, 256, 8))], [("f", (-1, 96))], ("qkv",), kind="gemm")
    cut = layer("__myl_AddReshTranMaxr_myl0_1", [("f", (-1, 32))], [("q", (-1, 16, 16))], ("qkv",))
    for strides, part, queries in (((96, 1), 256, None), ((32, 1), 768, 96)):
        written, read = (replace(t, strides=s) for t, s in ((whole.outputs[0], (96, 1)), (cut.inputs[0], strides)))
        layers = (replace(whole, outputs=(written,)), replace(cut, inputs=(read,)))
        found = rows(listing(*layers, inputs=("x",)), {"qkv": of(16, 16, 96, users=["split"])})
        assert found["f", (-1, 96)] == 256 and found["f", (-1, 32)] == part
        assert found["q", (-1, 16, 16)] == queries


def test_reading_more_than_was_written_is_a_contradiction():
    layers = (
        layer("k", [], [("t", (-1, 8))], ("a",)),
        layer("p", [("t", (-1, 64)), ("x", (-1, 64))], [("y", (-1, 64))], kind="gemm"),
    )
    found = rows(listing(*layers, inputs=("x",)), {"a": of(8, users=["b"])})
    assert found["t", (-1, 8)] is None and found["t", (-1, 64)] is None and found["x", (-1, 64)] == 1


def test_a_kernel_that_repeats_may_write_more_than_it_reads():
    for step, expected in (("AddRepl", 16), ("AddMul", 4)):
        layers = (
            layer("fc", [], [("s", (-1, 8))], ("m",), kind="gemm"),
            layer(f"__myl_{step}_myl0_1", [("s", (-1, 8))], [("t", (-1, 8))], ("n",)),
        )
        assert rows(listing(*layers), {"n": of(16, 8), "m": of(4, 8, users=["n"])})["t", (-1, 8)] == expected


def test_shapes_of_a_file_with_a_reshape(tmp_path):
    nodes = [
        helper.make_node("Reshape", ["x", "flat"], ["rows"], name="reshape"),
        helper.make_node("MatMul", ["rows", "w"], ["y"], name="matmul"),
    ]
    held = {"flat": np.array([-1, 64]), "w": np.zeros((64, 32), np.float32)}
    path = tmp_path / "m.onnx"
    onnx.save(onnx_model(nodes, {"x": ["batch", 17, 64]}, {"y": None}, held), path)
    found = onnx_shapes(path)
    assert [out.dims for out in found["reshape"]] == [(17, 64)] and found["reshape"][0].users == {"matmul"}
    assert [(out.dims, out.result) for out in found["matmul"]] == [((17, 32), True)]
    path.write_bytes(b"no model")
    assert onnx_shapes(path) == {}


def test_the_networks_own_tensors_have_one_row_for_each_image():
    first = layer("k", [("x", (-1, 17, 64)), ("z", (-1, 3, -1)), ("w", (3, -1)), ("e", (-1, 0))], [("f", (2, 3))])
    second = layer("k", [("x", (-1, 64)), ("x", (-1, 5)), ("e", (-1, 2, 0))], [("y", (-1, 9, 4))])
    assert rows(listing(first, second, inputs=("x", "z", "w", "e"), outputs=("y",))) == {
        ("x", (-1, 17, 64)): 1,
        ("x", (-1, 64)): 17,
        ("x", (-1, 5)): None,  # no whole number of rows
        ("z", (-1, 3, -1)): None,  # two open dimensions
        ("w", (3, -1)): None,  # the batch is the first
        ("e", (-1, 0)): None,
        ("e", (-1, 2, 0)): None,
        ("f", (2, 3)): 1,  # not open
        ("y", (-1, 9, 4)): 1,
    }


@pytest.mark.parametrize(("view", "expected"), [((4, -1, 4), 4), ((-1, 4, 2), 2)])
def test_a_view_with_the_strides_but_another_open_dimension_is_no_part(view, expected):
    written, read = layer("k", [], [("t", (-1, 4, 8))], ("n",)), layer("k", [("t", view)], [])
    written = replace(written, outputs=tuple(replace(t, strides=(32, 8, 1)) for t in written.outputs))
    read = replace(read, inputs=tuple(replace(t, strides=(32, 8, 1)) for t in read.inputs))
    assert rows(listing(written, read), {"n": of(2, 4, 8)}) == {("t", (-1, 4, 8)): 2, ("t", view): expected}


@pytest.mark.parametrize(
    ("step", "read", "written", "expected"),
    [
        ("ReshTran", [(-1, 64)], [(-1, 4, 8)], 34),
        ("ReshTran", [(-1, 64)], [(-1, 4, 48)], None),  # no whole number of rows
        ("ReshTran", [(-1, 64), (-1, 32)], [(-1, 4, 8)], None),
        ("ReshTran", [(-1, 64)], [(-1, 4, 8), (-1, 4, 4, 4)], None),
        ("ReshMean", [(-1, 64)], [(-1, 4, 8)], None),
        ("AddMul", [(-1, 64)], [(-1, 48)], 17),  # steps that mix nothing keep the rows ...
        ("AddMul", [(-1, 64)], [(32, -1)], 34),  # ... of one dimension, and all of them the elements
        ("MeanConc", [(-1, 64)], [(-1, 32)], 17),
        ("ReplConc", [(-1, 64)], [(-1, 32)], 17),
        ("ReplMean", [(-1, 64)], [(-1, 32)], None),
        ("ReplGathConc", [(-1, 64)], [(-1, 32)], None),
    ],
)
def test_rows_through_kernels(step, read, written, expected):
    first = layer("k", [], [("s0", (-1, 64))], ("n",))
    sources, targets = (
        [(f"{name}{i}", shape) for i, shape in enumerate(side)] for name, side in (("s", read), ("t", written))
    )
    found = rows(listing(first, layer(f"__myl_{step}_myl0_1", sources, targets)), {"n": of(17, 64)})
    assert found["s0", (-1, 64)] == 17 and found["t0", written[0]] == expected


@pytest.mark.parametrize(
    ("kind", "name", "shapes", "expected"),
    [
        ("kgen", "k", [(-1, 9, 8), (-1, 9, 8)], 3),
        ("kgen", "k", [(-1, 9, 8), (-1, 9, 1)], 3),  # a mean over the last dimension
        ("kgen", "k", [(-1, 9, 8), (-1, 7, 1)], None),
        ("kgen", "k", [(-1, 9, 8), (-1, 9, 4)], None),
        ("kgen", "k", [(-1, 9, 8), (-1, 8)], None),
        ("kgen", "k", [(-1, 9, 8), (9, -1, 1)], None),
        ("kgen", "gemm_k", [(-1, 9, 8), (-1, 9, 4)], 3),
        ("correlation", "k", [(-1, 9, 8), (-1, 5, 4)], 3),
        ("gemm", "k", [(-1, 9, 8), (-1, 9, 4)], 3),
        ("CaskPooling", "k", [(-1, 9, 8), (-1, 9, 4)], 3),
    ],
)
def test_rows_of_other_tensors_of_a_layer(kind, name, shapes, expected):
    source, target = shapes
    first = layer("first", [], [("s", source)], ("n",))
    found = rows(listing(first, layer(name, [("s", source)], [("t", target)], kind=kind)), {"n": of(3, 9, 8)})
    assert found["s", source] == 3 and found["t", target] == expected


def test_a_layer_that_reads_different_rows_says_nothing_of_its_result():
    first = layer("first", [], [("a", (-1, 9, 8))], ("n",))
    second = layer("second", [], [("b", (-1, 9, 8))], ("m",))
    both = layer("conv", [("a", (-1, 9, 8)), ("b", (-1, 9, 8))], [("t", (-1, 9, 8))], kind="correlation")
    for dims, expected in (((2, 9, 8), None), ((3, 9, 8), 3)):
        found = rows(listing(first, second, both), {"n": of(3, 9, 8), "m": of(*dims)})
        assert found["t", (-1, 9, 8)] == expected


@pytest.mark.parametrize(
    ("users", "result", "expected"), [(("k",), False, None), (("k",), True, 17), (("k", "far"), False, 17)]
)
def test_a_result_leaves_its_layer_where_another_reads_it_or_the_network_returns_it(users, result, expected):
    found = rows(listing(layer("l", [], [("t", (-1, 64))], ("k",))), {"k": of(17, 64, users=users, result=result)})
    assert found == {("t", (-1, 64)): expected}


@pytest.mark.parametrize(
    ("shape", "dims", "expected"),
    [
        ((-1, 64), (17, 64), 17),
        ((-1, 1, 64), (17, 64), 17),
        ((-1, 64), (2, 64, 3, 1), 6),
        ((-1, 32), (17, 64), None),
        ((-1, 64, 64), (17, 64), None),
        ((-1, 1), (17, 1), None),  # nothing but ones says nothing
        ((-1, 64, 1), (17, 64, 1), 17),
        ((-1, 32, 1), (17, 32, 64), None),  # a dimension of one is no view of a longer one
        ((-1, 32, 1), (17, 32, 1), 17),
        ((-1, 32, 1), (17, 64), None),
    ],
)
def test_rows_are_what_is_left_of_a_results_dimensions(shape, dims, expected):
    found = rows(listing(layer("l", [], [("t", shape)], ("k",))), {"k": of(*dims)})
    assert found == {("t", shape): expected}


@pytest.mark.parametrize(
    ("kind", "name", "more", "expected"),
    [
        ("kgen", "__myl_MeanAdd_myl0_1", [], None),  # it would write more than it reads
        ("kgen", "__myl_MeanAdd_myl0_1", [("u", (-1, 8))], 16),  # of what it reads, not all is known
        ("kgen", "__myl_IotaAdd_myl0_1", [], 16),
        ("fusion", "__myl_FcAdd_myl0_1", [], 16),  # a product may
        ("kgen", "k", [], 16),
    ],
)
def test_the_most_that_a_layer_can_write(kind, name, more, expected):
    first = layer("fc", [], [("s", (-1, 8))], ("m",), kind="gemm")
    second = layer(name, [("s", (-1, 8)), *more], [("t", (-1, 4, 8))], ("n",), kind=kind)
    found = rows(listing(first, second), {"m": of(4, 8), "n": of(16, 4, 8)})
    assert found["s", (-1, 8)] == 4 and found["t", (-1, 4, 8)] == expected
