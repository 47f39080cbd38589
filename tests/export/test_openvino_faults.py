"""Files in a form that OpenVINO computes right: what ONNX Runtime computes of them, node by node, is the reference."""

import onnx
import openvino
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import compress
from compress import QuantSpec, build_engine, export_onnx, quantize
from compress.quantization.sensitivity.compare import sqnr
from tests.exact import WEIGHTS, open_session

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


IN_INT8 = {
    "transposed 1d": (up(1, output_padding=1), 1, 2),
    "transposed 3d": (up(3), 3, 2),
    "function": (Product(lambda x, w, b: F.conv_transpose1d(x.mT, w).mT, 8, 8, 2), 1, 3),
    "transposed parameter": (Product(lambda x, w, b: x @ w.t() + b, 8, 8), 1, 3),
    "addmm": (Product(lambda x, w, b: torch.addmm(b, x.flatten(0, 1), w.T), 8, 8), 1, 3),
    "matrix": (Product(lambda x, w, b: x @ w, 8, 8), 1, 2),
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
