# What files and torch models get where images show that it helps: zero points, scales in gates, biases.

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper
from torch import nn

import compress
from tests.networks import Net
from tests.onnx_ptq.files import batches, export, run, sqnr


def affine(depthwise: bool = False):
    # Factors and shifts around a hard-swish, as PP-OCR's recognizers have them.
    groups = 16 if depthwise else 1

    def run(net, x):
        x = nn.functional.hardswish(4 * net.first(x) - 4)
        return net.last(0.1 * x + 0.05)

    return Net(
        run,
        first=nn.Conv2d(3, 16, 3, padding=1),
        last=nn.Conv2d(16, 16, 5, stride=2, padding=(2, 1), dilation=(1, 2), groups=groups),
    )


class Excited(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.squeezed, self.last = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 1), nn.Conv2d(16, 8, 1)
        with torch.no_grad():
            self.last.weight[:, :2] /= 40
        self.register_buffer("wide", torch.ones(16, 1, 1))
        self.wide[:2] = 40

    def forward(self, x):
        x = nn.functional.hardswish(self.first(x)) * self.wide
        return self.last(x * self.squeezed(x.mean((2, 3), keepdim=True)).sigmoid())


def quantized(model, tmp_path, x, reader="file", **options):
    file = export(model.eval(), tmp_path / "float.onnx", x=x[:2])
    spec, path = compress.QuantSpec(**options), tmp_path / "int8.onnx"
    if reader == "file":
        compress.quantize_onnx(file, list(x.split(4)), spec=spec, out=path)
    else:
        qmodel = compress.quantize(model, x[:2], list(x.split(4)), spec=spec)
        compress.export_onnx(qmodel, x[:2], path, dynamic_batch=True)
        saved = compress.save(qmodel, tmp_path / "int8.safetensors")
        again = compress.load(saved, into=compress.insert_quantizers(model, x[:2], spec))
        assert torch.equal(again(x), qmodel(x))
    return run(file, x.numpy()), run(path, x.numpy()), path


@pytest.mark.parametrize(
    ("target", "reader"), [("openvino", "file"), ("onnxruntime", "file"), ("onnxruntime", "torch")]
)
def test_no_integers_for_values_that_images_do_not_have(tmp_path, target, reader):
    model, x = affine(), torch.cat(batches(4))
    wanted, plain, _ = quantized(model, tmp_path, x, reader, target=target, smooth=None, bias_correction=None)
    _, found, path = quantized(model, tmp_path, x, reader, target=target, bias_correction=None)
    assert sqnr(wanted, found) > sqnr(wanted, plain) + 0.5
    file = onnx.load(path)
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in file.graph.initializer}
    points = [constants[node.input[2]] for node in file.graph.node if node.op_type == "QuantizeLinear"]
    assert min(int(point) for point in points if point.dtype == np.uint8) < 100


def test_a_target_with_signed_integers_has_no_zero_points(tmp_path):
    _, _, path = quantized(affine(), tmp_path, torch.cat(batches(2)), target="tensorrt")
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(path).graph.initializer}
    assert not any(value.any() for name, value in constants.items() if name.endswith("zero_point"))


@pytest.mark.parametrize("depthwise", [False, True])
@pytest.mark.parametrize(
    ("target", "reader"), [("tensorrt", "file"), ("openvino", "file"), ("onnxruntime", "file"), ("openvino", "torch")]
)
def test_biases_make_up_for_the_mean_error(tmp_path, target, depthwise, reader):
    # With padding, a stride and a dilation, each channel's mean over more images than were looked at comes closer.
    model, x = affine(depthwise), torch.cat(batches(16))
    error = {}
    for chosen in ("auto", None):
        wanted, found, _ = quantized(model, tmp_path, x, reader, target=target, bias_correction=chosen)
        error[chosen] = np.abs((found - wanted).mean((0, 2, 3))).mean()
    assert error["auto"] < 0.5 * error[None]


def test_a_gate_takes_the_scale_of_its_channels(tmp_path):
    # ONNX Runtime's kernels take no factor between the product and the convolution; the gate has one value each.
    model, x = Excited(), torch.cat(batches(8))
    options = {"target": "onnxruntime", "bias_correction": None}
    wanted, plain, _ = quantized(model, tmp_path, x, smooth=None, **options)
    _, found, _ = quantized(model, tmp_path, x, **options)
    assert sqnr(wanted, found) > sqnr(wanted, plain) + 6


@pytest.mark.parametrize(("transposed", "shape"), [(0, (4, 4)), (0, (4, 1)), (1, (4,))])
def test_a_bias_of_each_row_and_a_transposed_input_stay(tmp_path, transposed, shape):
    # Means over images are not of one row; numpy's product is the oracle.
    draw = np.random.default_rng(0).standard_normal
    x, weight, bias = (draw(size).astype(np.float32) for size in ((4, 4), (4, 4), shape))
    values = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [4, 4]) for name in "xy"]
    node = helper.make_node("Gemm", ["x", "w", "b"], ["y"], transA=transposed)
    constants = [numpy_helper.from_array(weight, "w"), numpy_helper.from_array(bias, "b")]
    graph = helper.make_graph([node], "g", values[:1], values[1:], constants)
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=10), tmp_path / "float.onnx"
    )
    made = compress.quantize_onnx(tmp_path / "float.onnx", [x], spec=compress.QuantSpec(target="openvino"))
    assert sqnr((x.T if transposed else x) @ weight + bias, run(made, x)) > 30
