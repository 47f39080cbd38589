"""Padding moves into convolutions without a change of the result, and stays where it cannot."""

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from onnx import helper
from onnx.reference import ReferenceEvaluator
from torch import nn

import compress
from compress.export.cleanup import pads_into_convolutions
from compress.quantization.spec import TARGETS
from tests.onnx_ptq.files import batches, export, model_of, weights

X = np.random.default_rng(0).standard_normal((2, 3, 8, 8)).astype(np.float32)


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
    before = ReferenceEvaluator(model).run(None, {"x": X})[0]
    assert pads_into_convolutions(model) == 1
    onnx.checker.check_model(model, full_check=True)
    assert "Pad" not in {node.op_type for node in model.graph.node}
    np.testing.assert_array_equal(ReferenceEvaluator(model).run(None, {"x": X})[0], before)


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
    before = model.SerializeToString()
    assert pads_into_convolutions(model) == 0
    assert model.SerializeToString() == before


class Same(nn.Module):
    """TensorFlow's padding of a convolution of stride 2."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, 2)

    def forward(self, x):
        return self.second(F.pad(F.relu(self.first(x)), (0, 1, 0, 1)))


@pytest.mark.parametrize("target", TARGETS)
def test_a_quantizer_is_placed_before_the_padding(tmp_path, target):
    """So that the convolution reads it directly, in exported models and in quantized files alike."""
    model, data = Same().eval(), batches()
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
    with torch.no_grad():
        results = [
            next(iter(compress.build_engine(path, "onnxruntime").run({name: data[0].numpy()}).values()))
            for path, name in zip(made, ("input", "picture"), strict=True)
        ]
    np.testing.assert_allclose(results[0], results[1], atol=np.abs(results[0]).max() / 50)
