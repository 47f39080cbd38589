"""Files in a form that OpenVINO computes right: what ONNX Runtime computes of them, node by node, is the reference."""

import numpy as np
import onnx
import onnxruntime
import openvino
import pytest
import torch
import torch.nn.functional as F
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator
from torch import nn

import compress
from compress import ActivationSpec, QuantSpec, build_engine, export_onnx, quantize
from compress.export.onnxruntime import repeat_pairs
from compress.quantization.sensitivity.compare import sqnr
from tests.exact import WEIGHTS, open_session
from tests.networks import with_statistics
from tests.onnx_ptq.files import export, run

LAYERS = {"Convolution", "Deconvolution", "FullyConnected", "MatMul"}
"""OpenVINO's own names of layers."""
X = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))


class Branches(nn.Module):
    """Two branches and a convolution of both; `split`: of one part of the first, twice."""

    def __init__(self, *, split: bool):
        super().__init__()
        self.split = split
        self.a, self.b = nn.Conv2d(3, 24, 3, padding=1), nn.Conv2d(3, 24, 3, padding=1)
        self.c, self.d = nn.Conv2d(48, 48, 1), nn.Conv2d(48, 8, 1)

    def forward(self, x):
        y = torch.cat([self.a(x), self.b(x)], 1)
        if self.split:
            y = y.chunk(2, 1)[1]
            y = torch.cat([y, y], 1)
        return self.d(self.c(y))


class Scaled(nn.Module):
    """A convolution of a signed tensor, with an operation between it and the concat."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(6, 16, 3, padding=1)

    def forward(self, x):
        return self.conv(0.5 * torch.cat([x, x.sin()], 1))


class Products(nn.Module):
    """A matrix product along the last axis of a concat along another."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(16, 8)

    def forward(self, x):
        return self.fc(torch.cat([x, x.sin()], 1))


class Shared(nn.Module):
    """Convolutions without a bias, and with one of zeros, quantized for the next one and read as they are beside it."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 12, 3, padding=1, bias=False), nn.Conv2d(12, 12, 3, groups=3)
        self.c = nn.Conv2d(12, 12, 3, padding=1)
        nn.init.zeros_(self.b.bias)

    def forward(self, x):
        x = self.a(x)
        y = self.b(x) + x[..., 1:-1, 1:-1].sigmoid()
        y = self.b(y)
        return self.c(y) + y.sigmoid()


class Averages(nn.Module):
    """An average less its own input (PoolFormer), and one beside a branch in a concat that is scaled (DenseNet)."""

    def __init__(self):
        super().__init__()
        self.pool, self.halve = nn.AvgPool2d(3, 1, 1, count_include_pad=False), nn.AvgPool2d(2)
        self.a, self.b = nn.Conv2d(3, 12, 3), nn.Conv2d(12, 12, 1)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 24).view(1, -1, 1, 1))

    def forward(self, x):
        x = self.a(x)
        x = self.pool(x) - x
        return (torch.cat([self.halve(self.b(x)), x[..., ::2, ::2]], 1) * self.scale).relu()


class Pointwise(nn.Module):
    """A convolution with a bias before a quantizer, and states of ones for each picture of an open batch."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 1)
        nn.init.normal_(self.a.bias)

    def forward(self, x):
        return self.b(self.a(x).relu()).mean((2, 3)) + x.new_ones(len(x), 8).cumsum(1)


class Largest(nn.Module):
    """A product of the largest values of all places (PointNet), and a convolution of one of all channels (CBAM)."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 8, 1), nn.Conv2d(1, 4, 3), nn.Linear(8, 4)

    def forward(self, x):
        x = self.a(x)
        return self.c(x.amax((2, 3))) + self.b(x.amin(1, keepdim=True)).sum((2, 3))


@pytest.mark.parametrize(
    ("model", "precision", "target"),
    [
        pytest.param(lambda: Branches(split=False), "fp32", "openvino", id="concat"),
        pytest.param(lambda: Branches(split=True), "fp32", "openvino", id="concat of parts"),
        pytest.param(Scaled, "fp32", "openvino", id="after a concat"),
        pytest.param(
            lambda: nn.Sequential(nn.Conv2d(3, 8, 3, padding=(1, 2), padding_mode="circular")),
            "fp32",
            "openvino",
            id="circular padding",
        ),
        pytest.param(Products, "fp32", "openvino", id="matrix product of a concat"),
        pytest.param(Averages, "fp32", "openvino", id="averages"),
        pytest.param(Averages, "fp16", "openvino", id="averages, fp16"),
        pytest.param(Shared, "fp32", "openvino", id="no bias"),
        pytest.param(Shared, "fp16", "openvino", id="no bias, fp16"),
        pytest.param(Shared, "fp32", "tensorrt", id="no bias, for TensorRT"),
        pytest.param(Pointwise, "fp32", "openvino", id="states of an open batch"),
        pytest.param(Largest, "fp32", "openvino", id="largest and smallest values"),
        pytest.param(Largest, "fp32", "tensorrt", id="largest and smallest values, for TensorRT"),
    ],
)
def test_openvino_computes_what_the_file_says(model, precision, target, tmp_path):
    torch.manual_seed(0)
    qmodel = quantize(model().eval(), X, [X], spec=QuantSpec(target=target, weights=WEIGHTS))
    path = export_onnx(qmodel, X, tmp_path / "model.onnx", precision=precision)
    (expected,) = open_session(path, optimize=False).run(None, {"input": X.numpy()})
    with build_engine(path, "openvino", threads=1, precision="f32") as engine, torch.no_grad():
        (result,) = engine.run({"input": X.numpy()}).values()
        assert sqnr(torch.from_numpy(expected), torch.from_numpy(result)) > 40
        assert sqnr(qmodel(X), torch.from_numpy(result)) > 40


class Both(nn.Module):
    """Two operations that are rewritten for OpenVINO."""

    def __init__(self):
        super().__init__()
        self.shared, self.averages = Shared(), Averages()

    def forward(self, x):
        return self.shared(x), self.averages(x)


def test_onnxruntime_gets_no_bias_and_no_maximum(tmp_path):
    qmodel = quantize(Both().eval(), X, [X], spec=QuantSpec(target="onnxruntime"))
    nodes = onnx.load(export_onnx(qmodel, X, tmp_path / "m.onnx")).graph.node
    convs = [len(n.input) for n in nodes if n.op_type == "Conv" and n.name.startswith("/shared")]
    assert sorted(convs) == [2, 2, 2, 3]
    kinds = [n.op_type for n in nodes]
    assert kinds.count("AveragePool") == 2
    assert "Max" not in kinds


class Product(nn.Module):
    """A convolution, a product with a parameter, and a linear layer."""

    def __init__(self, product, *size):
        super().__init__()
        self.first, self.last, self.product = nn.Conv1d(3, 8, 3), nn.Linear(8, 4), product
        self.weight, self.bias = nn.Parameter(torch.randn(*size) / 4), nn.Parameter(torch.randn(8))

    def forward(self, x):
        return self.last(self.product(torch.relu(self.first(x)).transpose(1, 2), self.weight, self.bias))


def up(dimensions, **settings):
    size = f"{dimensions}d"
    layers = getattr(nn, f"Conv{size}")(3, 8, 3), nn.ReLU(), getattr(nn, f"ConvTranspose{size}")(8, 4, 3, 2, **settings)
    return nn.Sequential(*layers)


class Joined(nn.Module):
    """A convolution of what `join` makes of a tensor without a sign and one with it."""

    def __init__(self, join, channels, last=nn.Conv2d):
        super().__init__()
        self.join, self.grid = join, nn.Parameter(torch.randn(1, 2, 8, 8))
        self.a, self.b = (nn.Conv2d(3, 8, 3, padding=1) for _ in range(2))
        self.c = last(channels, 4, 3, padding=1)

    def forward(self, x):
        return self.c(self.join(self.a(x).relu(), self.b(x), self.grid))


class TwoReaders(nn.Module):
    """A tensor with a sign that a convolution and a transposed one read."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1), nn.ConvTranspose2d(8, 8, 3, padding=1)

    def forward(self, x):
        y = self.a(x)
        return self.b(y).relu() + self.c(y).sigmoid()


IN_INT8 = {
    "transposed 1d": (up(1, output_padding=1), 1, 2),
    "transposed 3d": (up(3), 3, 2),
    "transposed, signed": (
        nn.Sequential(nn.ConvTranspose2d(3, 8, 2, 2), nn.LeakyReLU(), nn.ConvTranspose2d(8, 4, 4, 2)),
        2,
        2,
    ),
    "transposed, of a concat": (Joined(lambda a, b, g: torch.cat([a, b], 1), 16, nn.ConvTranspose2d), 2, 3),
    "transposed, beside a convolution": (TwoReaders(), 2, 3),
    "function": (Product(lambda x, w, b: F.conv_transpose1d(x.mT, w).mT, 8, 8, 2), 1, 3),
    "transposed parameter": (Product(lambda x, w, b: x @ w.t() + b, 8, 8), 1, 3),
    "addmm": (Product(lambda x, w, b: torch.addmm(b, x.flatten(0, 1), w.T), 8, 8), 1, 3),
    "matrix": (Product(lambda x, w, b: x @ w, 8, 8), 1, 3),
    "three dimensions": (Product(lambda x, w, b: x @ w.expand(x.shape[0], 8, 8), 8, 8), 1, 2),
    "left": (Product(lambda x, w, b: w @ x, 7, 6), 1, 2),
}


@pytest.mark.parametrize("case", IN_INT8)
def test_openvino_computes_in_int8_what_has_pairs_and_nothing_else_has(case, tmp_path):
    """Layers whose parameter is used in another way than by a module, and transposed convolutions of all ranks."""
    model, dimensions, count = IN_INT8[case]
    x = torch.randn(2, 3, *[8] * dimensions)
    qmodel = compress.quantize(model.eval(), x, [x], spec=QuantSpec(target="openvino"))
    path = compress.export_onnx(qmodel, x, tmp_path / "int8.onnx")
    compiled = openvino.Core().compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    infos = [op.get_rt_info() for op in compiled.get_runtime_model().get_ops()]
    types = [i["runtimePrecision"].astype(str) for i in infos if i["layerType"].astype(str) in LAYERS]
    assert sum(t in {"u8", "i8"} for t in types) == count
    audit = compress.audit_onnx(path)
    assert [sum(row.int8 for row in audit.rows), audit.activation_pairs] == [count, count]


ROWS = {
    "factor": lambda y: y * 2,
    "negated": lambda y: -y,
    "quotient and sum": lambda y: y / 3 + 1,
    "factor for each channel": lambda y: y * torch.linspace(0.5, 1.5, 16),
    "factor, activation": lambda y: (y * 2).relu(),
    "activation": lambda y: y.relu(),
}


@pytest.mark.parametrize("way", ["file", "torch"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("case", ROWS)
def test_openvino_computes_linear_layers_of_rows_apart_and_right(case, bias, way, tmp_path):
    """Two linear layers and what stands between them: no kernel of both, which returns noise."""

    class Rows(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(32, 16, bias=bias), nn.Linear(16, 8, bias=bias)

        def forward(self, x):
            return self.b(ROWS[case](self.a(x)))

    model, x, spec, out = Rows().eval(), torch.randn(4, 32), QuantSpec(target="openvino"), tmp_path / "int8.onnx"
    if way == "file":
        compress.quantize_onnx(export(model, tmp_path / "float.onnx", x=x), [x], spec=spec, out=out)
    else:
        export_onnx(quantize(model, x, [x], spec=spec), x, out)
    session = open_session(out, optimize=False)
    (expected,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    read = openvino.Core().read_model(out)
    read.reshape(list(x.shape))
    compiled = openvino.Core().compile_model(read, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    assert sqnr(*map(torch.from_numpy, (expected, compiled(x.numpy())[0]))) > 40
    infos = [op.get_rt_info() for op in compiled.get_runtime_model().get_ops()]
    types = [i["runtimePrecision"].astype(str) for i in infos if i["layerType"].astype(str) in LAYERS]
    assert len(types) == 2 and set(types) <= {"u8", "i8"}


# Gathers by tables of indices: OpenVINO takes them after an INT8 layer, and computes what fake quantization does.

GATHERS_X = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))


class Windows(nn.Module):
    """Overlapping windows of a convolution's result, as in HaloNet; no bias, so that its scales move on."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.fc = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.Linear(8, 4)

    def forward(self, x):
        windows = F.pad(self.conv(x), [1, 1, 1, 1]).unfold(2, 6, 4).unfold(3, 6, 4)
        return self.fc(windows.amax((4, 5)).flatten(2).transpose(1, 2))


@pytest.mark.parametrize("dynamic", [True, False])
def test_windows_behind_an_int8_convolution_run_on_openvino(dynamic, tmp_path):
    spec = QuantSpec(target="openvino", activations=ActivationSpec(calibrator="max"), weights=WEIGHTS)
    qmodel = quantize(Windows().eval(), GATHERS_X, [GATHERS_X], spec=spec)
    path = export_onnx(qmodel, GATHERS_X, tmp_path / "model.onnx", dynamic_batch=dynamic)
    nodes = onnx.load(path).graph.node
    assert [node.op_type for node in nodes].count("Gather") == 2 and len({node.name for node in nodes}) == len(nodes)
    with build_engine(path, "openvino", threads=1, precision="f32") as engine, torch.no_grad():
        (result,) = engine.run({"input": GATHERS_X.numpy()}).values()
        assert sqnr(qmodel(GATHERS_X), torch.from_numpy(result)) > 40


# Q/DQ pairs after concats, splits and flattenings: the values stay, and ONNX Runtime computes in integers there.


class RepeatedPairsBranches(nn.Module):
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


class Clipped(nn.Module):
    """Linear layers and a product of two tensors, whose results are clipped and read by what has no form in 8 bits."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm, self.fc = nn.Linear(768, 32), nn.LayerNorm(32), nn.Linear(32, 32, bias=False)
        self.rows, self.last = nn.Linear(4, 4), nn.Linear(32, 5)

    def forward(self, x):
        x = torch.relu(self.fc(self.norm(F.relu6(self.stem(x.flatten(1))))))
        x = self.rows((x * x.sigmoid()).reshape(-1, 8, 4))
        return self.last((torch.relu(x @ x.transpose(1, 2)).softmax(-1) @ x).flatten(1))


def kinds_on_engine(path, folder):
    """Operators of the graph that ONNX Runtime runs."""
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    options.log_severity_level = 3
    onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return [node.op_type for node in onnx.load(folder / "optimized.onnx").graph.node]


@pytest.mark.parametrize("way", ["file", "torch"])
@pytest.mark.parametrize(
    ("network", "concats"), [(RepeatedPairsBranches, 1), (Shuffled, 4), (Padded, 0), (Resized, 0), (Clipped, 0)]
)
def test_every_layer_computes_in_integers(tmp_path, network, concats, way):
    torch.manual_seed(0)
    model, x, spec = with_statistics(network()), torch.randn(4, 3, 16, 16), QuantSpec(target="onnxruntime")
    file, out = export(model, tmp_path / "float.onnx"), tmp_path / "int8.onnx"
    if way == "file":
        compress.quantize_onnx(file, [x], spec=spec, out=out)
    else:
        compress.export_onnx(compress.quantize(model, x, [x], spec=spec), x, out)
    kinds = kinds_on_engine(out, tmp_path)
    assert {"Conv", "FusedConv", "Gemm", "FusedGemm", "MatMul"}.isdisjoint(kinds)
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


# ONNX Runtime's integer softmax wraps around where a probability is above the calibrated range; our files saturate.


@pytest.mark.parametrize("target", ["tensorrt", "openvino", "onnxruntime"])
def test_probabilities_above_the_range_saturate_in_onnxruntime(target, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Softmax2d(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(72, 5)).eval()
    nn.init.zeros_(model[0].bias)
    x = torch.randn(4, 3, 8, 8)
    spec = QuantSpec(target=target, activations=ActivationSpec(calibrator="max"))
    path = export_onnx(quantize(model, x, [0.2 * x], spec=spec), x, tmp_path / "m.onnx")  # calibrated with less
    (expected,) = ReferenceEvaluator(str(path)).run(None, {"input": x.numpy()})
    (got,) = open_session(path).run(None, {"input": x.numpy()})
    assert sqnr(torch.from_numpy(expected), torch.from_numpy(got)) > 30
    bounds = [node.op_type for node in onnx.load(path).graph.node].count("Min")
    assert bounds == (1 if target == "onnxruntime" else 0)


JOINED = {
    "part of a concat": Joined(lambda a, b, g: torch.cat([a, b], 1)[:, ::2], 8),
    "crop of a concat": Joined(lambda a, b, g: torch.cat([a, b], 1)[..., 1:-1, 1:], 16),
    "concat of rows": Joined(lambda a, b, g: torch.cat([a, b], 2), 8),
    "constant in a concat": Joined(lambda a, b, g: torch.cat([a, b, g.expand(len(b), 2, 8, 8)], 1), 18),
    "channels by a list": Joined(lambda a, b, g: (a * b)[:, [3, 1, -1]], 3),
    "channels by a tensor": Joined(lambda a, b, g: (a + b)[:, torch.tensor([3, 1, 0])], 3),
}


@pytest.mark.parametrize("case", JOINED)
def test_openvino_carries_integers_through_joins_and_selections(case, tmp_path):
    x = torch.randn(2, 3, 8, 8)
    qmodel = compress.quantize(JOINED[case].eval(), x, [x], spec=QuantSpec(target="openvino"))
    path = compress.export_onnx(qmodel, x, tmp_path / "int8.onnx")
    compiled = openvino.Core().compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    infos = [op.get_rt_info() for op in compiled.get_runtime_model().get_ops()]
    types = [i["runtimePrecision"].astype(str) for i in infos if i["layerType"].astype(str) in LAYERS]
    assert len(types) == 3 and set(types) <= {"u8", "i8"}
    assert [row.int8 for row in compress.audit_onnx(path).rows] == [True] * 3
