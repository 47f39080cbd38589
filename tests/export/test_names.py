"""Names in exported files: what is written is found, in a file that torch's exporter and a real engine have named."""

import keyword
import string

import onnx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import compress
from compress.export import names
from compress.graph.ops import node_kind

part = st.text(string.ascii_lowercase + string.digits + "_", min_size=1, max_size=5).filter(
    lambda text: not keyword.iskeyword(text)
)
module = st.lists(part, min_size=1, max_size=4).map(".".join)


@given(module, st.sampled_from(["Conv", "Gemm", "DequantizeLinear"]), st.integers(0, 12))
def test_a_module_is_found_in_the_name_of_its_node(path, op_type, number):
    node = names.node_name(path, op_type, number)
    assert names.module_of(node) == path
    assert node.startswith(names.module_prefix(path))
    assert names.find_module(f"Convert_{node}_f16", [path]) == path
    assert names.is_node(node, node) and names.is_node(f"{node}/bias", node) and not names.is_node(f"{node}x", node)


def test_the_innermost_module_that_comes_first_is_found():
    known = ["block", "block.conv", "fc"]
    assert names.find_module("/block/conv/Conv", known) == "block.conv"
    assert names.find_module("/block/Add_/fc/Gemm", known) == "block"
    assert names.find_module("/other/Conv", known) is None
    assert names.module_of("/layer1/0/conv1/Conv") == "layer1.0.conv1"


def test_an_exported_file_has_these_names(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Sequential(nn.Conv2d(4, 4, 3)), nn.Flatten()).eval()
    x = torch.randn(2, 3, 8, 8)
    qmodel = compress.quantize(model, x, [x], spec=compress.QuantSpec(target="tensorrt"))
    graph = onnx.load(compress.export_onnx(qmodel, x, tmp_path / "m.onnx")).graph
    convolutions = [node.name for node in graph.node if node.op_type == "Conv"]
    assert convolutions == [names.node_name("0", "Conv"), names.node_name("2.0", "Conv")]
    written = {name for node in graph.node for name in node.output}
    quantizers = [str(node.target) for node in qmodel.graph.nodes if node_kind(node) == "quantizer"]
    assert quantizers and {names.quantized_tensor(quantizer) for quantizer in quantizers} <= written
    assert [value.name for value in graph.input] == names.input_names(1)
    assert names.logits_output([value.name for value in graph.output]) == "logits"


@pytest.mark.parametrize(
    ("keys", "taken", "expected"),
    [
        ([""], (), ["logits"]),
        (["out", "aux"], (), ["out", "aux"]),
        (["0", "1"], (), ["output_0", "output_1"]),
        (["input", "aux"], ("input",), ["output_0", "output_1"]),
    ],
)
def test_outputs_have_the_names_of_keys_or_are_numbered(keys, taken, expected):
    assert names.output_names(keys, taken=taken) == expected
    assert names.logits_output(expected) == (expected[0] if expected[0] in {"logits", "out", "output_0"} else None)


def test_sparse_variants_are_known_by_the_metadata():
    assert names.is_sparse({names.VARIANT_KEY: "sparse-qat"})
    assert not names.is_sparse({names.VARIANT_KEY: "qat"}) and not names.is_sparse({})
