"""Q/DQ pairs after concats, splits and flattenings: the values stay, and ONNX Runtime computes in integers there."""

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator
from torch import nn

import compress
from compress import QuantSpec
from compress.export.onnxruntime import repeat_pairs
from compress.quantization.sensitivity.compare import sqnr
from tests.networks import with_statistics
from tests.onnx_ptq.files import export, run


class Branches(nn.Module):
    """Two branches that a concat joins, a pool, a layer over both, and a flattened end."""

    def __init__(self):
        super().__init__()
        self.stem, self.left, self.right = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 4, 1), nn.Conv2d(8, 4, 3, 1, 1)
        self.joined, self.fc = nn.Conv2d(8, 6, 3, 1, 1), nn.Linear(6 * 4 * 4, 5)

    def forward(self, x):
        x = torch.relu(self.stem(x))
        x = torch.max_pool2d(torch.cat([torch.relu(self.left(x)), torch.relu(self.right(x))], 1), 2)
        return self.fc(torch.relu(self.joined(x)).flatten(1))


class Shuffled(nn.Module):
    """Three blocks of a ShuffleNetV2: each joins a part of the block before with a branch of the other part."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Conv2d(3, 4, 3, 2, 1), nn.Conv2d(3, 4, 3, 2, 1)
        self.branches = nn.ModuleList(nn.Conv2d(4, 4, 3, 1, 1) for _ in range(3))
        self.last, self.fc = nn.Conv2d(8, 6, 1), nn.Linear(6 * 8 * 8, 5)

    def forward(self, x):
        left, right = torch.relu(self.left(x)), torch.relu(self.right(x))
        for branch in self.branches:
            x = torch.cat([left, torch.relu(branch(right))], 1)
            left, right = x.unflatten(1, (2, 4)).transpose(1, 2).flatten(1, 2).chunk(2, 1)
        return self.fc(torch.relu(self.last(torch.cat([left, right], 1))).flatten(1))


class Padded(nn.Module):
    """Convolutions that pad by reflection and repetition, with groups and a stride."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 2, 1, padding_mode="reflect")
        self.middle = nn.Conv2d(8, 8, 5, padding="same", padding_mode="replicate", groups=2)
        self.last, self.fc = nn.Conv2d(8, 6, 3, 2, 1, padding_mode="reflect"), nn.Linear(6 * 4 * 4, 5)

    def forward(self, x):
        return self.fc(torch.relu(self.last(torch.relu(self.middle(torch.relu(self.stem(x)))))).flatten(1))


class Resized(nn.Module):
    """A convolution whose result is also read for its shape, as sizes of an open batch are computed."""

    def __init__(self):
        super().__init__()
        self.stem, self.low, self.last = nn.Conv2d(3, 8, 3, 1, 1), nn.Conv2d(8, 8, 3, 2, 1), nn.Conv2d(16, 6, 3, 4)
        self.fc = nn.Linear(6 * 4 * 4, 5)

    def forward(self, x):
        x = torch.relu(self.stem(x))
        up = nn.functional.interpolate(self.low(x), size=x.shape[-2:])
        return self.fc(torch.relu(self.last(torch.cat([up, x], 1))).flatten(1))


def kinds_on_engine(path, folder):
    """Operators of the graph that ONNX Runtime runs."""
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    options.log_severity_level = 3
    onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return [node.op_type for node in onnx.load(folder / "optimized.onnx").graph.node]


@pytest.mark.parametrize("way", ["file", "torch"])
@pytest.mark.parametrize(("network", "concats"), [(Branches, 1), (Shuffled, 4), (Padded, 0), (Resized, 0)])
def test_every_layer_computes_in_integers(tmp_path, network, concats, way):
    torch.manual_seed(0)
    model, x, spec = with_statistics(network()), torch.randn(4, 3, 16, 16), QuantSpec(target="onnxruntime")
    file, out = export(model, tmp_path / "float.onnx"), tmp_path / "int8.onnx"
    if way == "file":
        compress.quantize_onnx(file, [x], spec=spec, out=out)
    else:
        compress.export_onnx(compress.quantize(model, x, [x], spec=spec), x, out)
    kinds = kinds_on_engine(out, tmp_path)
    assert {"Conv", "FusedConv", "Gemm", "MatMul"}.isdisjoint(kinds)
    assert kinds.count("QLinearConcat") == concats
    assert sqnr(*(torch.from_numpy(run(path, x.numpy())) for path in (file, out))) > 25


def quantized(tensor, scale, zero_point="z"):
    return [
        helper.make_node("QuantizeLinear", [tensor, scale, zero_point], [f"{tensor}_q"]),
        helper.make_node("DequantizeLinear", [f"{tensor}_q", scale, zero_point], [f"{tensor}_d"]),
    ]


def joined(other_scale):
    """Two tensors, quantized, joined, split, one part of which is a result; the parts are added."""
    nodes = [
        helper.make_node("Relu", ["x"], ["r"]),
        *quantized("x", "s"), *quantized("r", other_scale),
        helper.make_node("Concat", ["x_d", "r_d"], ["c"], axis=1),
        helper.make_node("Split", ["c"], ["a", "b"], axis=1, num_outputs=2),
        helper.make_node("Add", ["a", "b"], ["y"]),
    ]  # fmt: skip
    constants = {"s": np.float32(0.02), "same": np.float32(0.02), "wide": np.float32(0.03), "z": np.uint8(128)}
    tensors = [onnx.numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 4]) for name in ("y", "a")]
    graph = helper.make_graph(
        nodes, "joined", [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 4])], outputs, tensors
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)


@pytest.mark.parametrize(("other_scale", "pairs"), [("s", 3), ("same", 3), ("wide", 0)])
def test_values_stay_to_the_bit_and_unequal_scales_get_no_pair(other_scale, pairs):
    model, x = joined(other_scale), np.random.default_rng(0).standard_normal((2, 4)).astype(np.float32)
    expected = ReferenceEvaluator(model).run(None, {"x": x})
    assert repeat_pairs(model) == pairs
    onnx.checker.check_model(model, full_check=True)
    for before, after in zip(expected, ReferenceEvaluator(model).run(None, {"x": x}), strict=True):
        np.testing.assert_array_equal(before, after)
    assert model.graph.output[1].name == "a"
