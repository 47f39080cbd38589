# Files in a form that OpenVINO computes right: what ONNX Runtime computes of them, node by node, is the reference.

import numpy as np
import onnx
import openvino
import pytest
import torch
import torch.nn.functional as F
from onnx import helper
from onnx.reference import ReferenceEvaluator
from torch import nn

import compress
from compress.export.onnxruntime import repeat_pairs
from compress.graph.inputs import flat_tensors
from compress.quantization.sensitivity import sqnr
from tests.exact import WEIGHTS, compute, exported, kinds_on_engine, on_engine
from tests.further import further
from tests.networks import Net, with_statistics
from tests.onnx_models import onnx_model
from tests.onnx_ptq.files import quantized_file, run

LAYERS = {"Convolution", "Deconvolution", "FullyConnected", "MatMul"}
X = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def branches(*, split: bool):
    def run(net, x):
        y = torch.cat([net.a(x), net.b(x)], 1)
        if net.split:
            y = y.chunk(2, 1)[1]
            y = torch.cat([y, y], 1)
        return net.d(net.c(y))

    return Net(
        run,
        split=split,
        a=nn.Conv2d(3, 24, 3, padding=1),
        b=nn.Conv2d(3, 24, 3, padding=1),
        c=nn.Conv2d(48, 48, 1),
        d=nn.Conv2d(48, 8, 1),
    )


def scaled():
    return Net(lambda net, x: net.conv(0.5 * torch.cat([x, x.sin()], 1)), conv=nn.Conv2d(6, 16, 3, padding=1))


def products():
    return Net(lambda net, x: net.fc(torch.cat([x, x.sin()], 1)), fc=nn.Linear(16, 8))


def shared():
    # Convolutions without a bias, and with one of zeros, quantized for the next one and read as they are beside it.
    def run(net, x):
        x = net.a(x)
        y = net.b(x) + x[..., 1:-1, 1:-1].sigmoid()
        y = net.b(y)
        return net.c(y) + y.sigmoid()

    net = Net(
        run,
        a=nn.Conv2d(3, 12, 3, padding=1, bias=False),
        b=nn.Conv2d(12, 12, 3, groups=3),
        c=nn.Conv2d(12, 12, 3, padding=1),
    )
    nn.init.zeros_(net.b.bias)
    return net


def averages():
    # An average less its own input (PoolFormer), and one beside a branch in a concat that is scaled (DenseNet).
    def run(net, x):
        x = net.a(x)
        x = net.pool(x) - x
        return (torch.cat([net.halve(net.b(x)), x[..., ::2, ::2]], 1) * net.scale).relu()

    return Net(
        run,
        pool=nn.AvgPool2d(3, 1, 1, count_include_pad=False),
        halve=nn.AvgPool2d(2),
        a=nn.Conv2d(3, 12, 3),
        b=nn.Conv2d(12, 12, 1),
        scale=nn.Parameter(torch.linspace(0.5, 1.5, 24).view(1, -1, 1, 1)),
    )


def pointwise():
    # A convolution with a bias before a quantizer, and states of ones for each picture of an open batch.
    net = Net(
        lambda net, x: net.b(net.a(x).relu()).mean((2, 3)) + x.new_ones(len(x), 8).cumsum(1),
        a=nn.Conv2d(3, 8, 3),
        b=nn.Conv2d(8, 8, 1),
    )
    nn.init.normal_(net.a.bias)
    return net


def largest():
    # A product of the largest values of all places (PointNet), and a convolution of one of all channels (CBAM).
    def run(net, x):
        x = net.a(x)
        return net.c(x.amax((2, 3))) + net.b(x.amin(1, keepdim=True)).sum((2, 3))

    return Net(run, a=nn.Conv2d(3, 8, 1), b=nn.Conv2d(1, 4, 3), c=nn.Linear(8, 4))


def ordered(order):
    # The order's inverse is another one, but where it is a swap.
    return Net(lambda net, x: net.b(net.a(x).relu()[:, order]), a=nn.Conv2d(3, 8, 3), b=nn.Conv2d(8, 4, 3))


def rows_of(order):
    # Rows of tokens, of which there are more than indices.
    return Net(lambda net, x: net.b(net.a(x).relu().flatten(2).mT[:, order]), a=nn.Conv2d(3, 8, 3), b=nn.Linear(8, 4))


@pytest.mark.parametrize(
    ("model", "precision", "target"),
    [
        *(
            pytest.param(lambda o=order: rows_of(o), "fp32", "openvino", id=f"rows {order}")
            for order in ([0, 3, 6, 9, 12], [-1, -3, -2, -4], [1, -3, 0])
        ),
        *(
            pytest.param(
                lambda o=order: ordered(o),
                "fp32",
                target,
                marks=[] if (order[0] < 0) == (target == "tensorrt") else pytest.mark.release,
                id=f"channels in order {order[:3]}, {target}",
            )
            for order in ([3, 0, 7, 1, 5, 2, 6, 4], [-7, 2, 3, 4, 5, 6, 7, 0], [7, 6, 5, 4, 3, 2, 1, 0])
            for target in ("openvino", "tensorrt")
        ),
        pytest.param(lambda: branches(split=False), "fp32", "openvino", id="concat"),
        pytest.param(lambda: branches(split=True), "fp32", "openvino", id="concat of parts"),
        pytest.param(scaled, "fp32", "openvino", id="after a concat"),
        pytest.param(
            lambda: nn.Sequential(nn.Conv2d(3, 8, 3, padding=(1, 2), padding_mode="circular")),
            "fp32",
            "openvino",
            id="circular padding",
        ),
        pytest.param(products, "fp32", "openvino", id="matrix product of a concat"),
        pytest.param(averages, "fp32", "openvino", id="averages"),
        pytest.param(averages, "fp16", "openvino", marks=pytest.mark.release, id="averages, fp16"),
        pytest.param(shared, "fp32", "openvino", id="no bias"),
        pytest.param(shared, "fp16", "openvino", id="no bias, fp16"),
        pytest.param(shared, "fp32", "tensorrt", marks=pytest.mark.release, id="no bias, for TensorRT"),
        pytest.param(pointwise, "fp32", "openvino", id="states of an open batch"),
        pytest.param(largest, "fp32", "openvino", id="largest and smallest values"),
        pytest.param(
            largest, "fp32", "tensorrt", marks=pytest.mark.release, id="largest and smallest values, for TensorRT"
        ),
    ],
)
def test_openvino_computes_what_the_file_says(model, precision, target, tmp_path):
    into = {"precision": precision}
    qmodel, path = exported(model(), X, tmp_path / "model.onnx", into=into, target=target, weights=WEIGHTS)
    result = on_engine(path, "openvino", X, threads=1, precision="f32")
    assert sqnr(torch.from_numpy(compute(path, X.numpy(), optimize=False)), result) > 40
    assert sqnr(qmodel(X), result) > 40


def times_signs(net, x):
    return x * net.signs


SIGNS = torch.linspace(-1.5, 1.5, 8).view(-1, 1, 1)
NEGATIVE = {
    "scale": (SIGNS, times_signs),
    "scale and shortcut": (SIGNS, lambda net, x: times_signs(net, net.same(times_signs(net, x)) + x)),
    "ReLU": (SIGNS, lambda net, x: times_signs(net, x).relu()),
    "padding": (SIGNS, lambda net, x: F.pad(times_signs(net, x), (1, 1, 1, 1), mode="reflect")),
    "parts": (SIGNS.repeat(2, 1, 1), lambda net, x: times_signs(net, torch.cat([x, x], 1)).chunk(2, 1)[1]),
    "number": (SIGNS, lambda net, x: times_signs(net, x) - 0.5),
    "negative number": (SIGNS.abs(), lambda net, x: times_signs(net, x) * -0.7),
    "negation": (SIGNS.abs(), lambda net, x: -times_signs(net, x)),
    "BatchNorm": (SIGNS.flatten(), lambda net, x: F.batch_norm(x, net.zeros, net.ones, net.signs, net.zeros)),
}


@pytest.mark.parametrize("way", ["torch", "onnx"])
@pytest.mark.parametrize("case", NEGATIVE)
def test_openvino_keeps_the_ends_of_channels_with_a_negative_factor(case, way, tmp_path):
    # With an open batch it cut such channels at the wrong ends (-2 dB).
    signs, run = NEGATIVE[case]
    layers = {"same": nn.Conv2d(8, 8, 3, padding=1, bias=False), "last": nn.Conv2d(8, 8, 3, bias=False)}
    fixed = {"signs": nn.Parameter(signs), "zeros": torch.zeros(8), "ones": torch.ones(8)}
    net = Net(lambda net, x: net.last(run(net, x)), **layers, **fixed).eval()
    x = 3 * torch.randn(4, 8, 16, 16, generator=torch.Generator().manual_seed(1))
    spec = compress.QuantSpec(target="openvino", weights=WEIGHTS)
    model = net if way == "onnx" else compress.quantize(net, x, [x], spec=spec)
    path = compress.export_onnx(model, x[:1], tmp_path / "m.onnx")
    if way == "onnx":
        path = compress.quantize_onnx(path, [x], spec=spec, out=tmp_path / "int8.onnx")
    found = torch.from_numpy(compiled_by_openvino(path)(x.numpy())[0])
    assert sqnr(torch.from_numpy(compute(path, x.numpy(), optimize=False)), found) > 60
    assert sqnr(net(x), found) > 30


def shortcut(x, net):
    return net.c(torch.relu(net.b(torch.relu(net.a(x))) + net.shortcut(x)))


@pytest.mark.parametrize("target", ["openvino", "tensorrt"])
def test_threads_do_not_disturb_each_other_in_a_shortcut(target, tmp_path):
    # As in RegNet: 24 channels, of which a 1 x 1 convolution keeps every second place. Wrong without AVX-512.
    a, b, pointwise = nn.Conv2d(24, 24, 3, 2, 1), nn.Conv2d(24, 24, 3, padding=1), nn.Conv2d(24, 24, 1, 2)
    model = Net(lambda net, x: shortcut(torch.relu(x), net), a=a, b=b, shortcut=pointwise, c=nn.Conv2d(24, 8, 1))
    x = torch.rand(8, 24, 16, 16)
    _, path = exported(model, x, tmp_path / "model.onnx", target=target, weights=WEIGHTS)
    expected = torch.from_numpy(compute(path, x.numpy(), optimize=False))
    with compress.build_engine(path, "openvino", threads=2, precision="f32") as engine:
        for _ in range(10):
            (result,) = engine.run({"input": x.numpy()}).values()
            assert sqnr(expected, torch.from_numpy(result)) > 35


def test_onnxruntime_gets_no_bias_and_no_maximum(tmp_path):
    model = Net(lambda net, x: (net.shared(x), net.averages(x)), shared=shared(), averages=averages())
    nodes = onnx.load(exported(model, X, tmp_path / "m.onnx", target="onnxruntime")[1]).graph.node
    convs = [len(n.input) for n in nodes if n.op_type == "Conv" and n.name.startswith("/shared")]
    assert sorted(convs) == [2, 2, 2, 3]
    kinds = [n.op_type for n in nodes]
    assert kinds.count("AveragePool") == 2
    assert "Max" not in kinds


def product(function, *size):
    return Net(
        lambda net, x: net.last(function(torch.relu(net.first(x)).transpose(1, 2), net.weight, net.bias)),
        first=nn.Conv1d(3, 8, 3),
        last=nn.Linear(8, 4),
        weight=nn.Parameter(torch.randn(*size) / 4),
        bias=nn.Parameter(torch.randn(8)),
    )


def up(dimensions, **settings):
    convolution, transposed = (getattr(nn, f"{kind}{dimensions}d") for kind in ("Conv", "ConvTranspose"))
    return nn.Sequential(convolution(3, 8, 3), nn.ReLU(), transposed(8, 4, 3, 2, **settings))


def joined_net(join, channels, last=nn.Conv2d):
    # A convolution of what `join` makes of a tensor without a sign and one with it.
    return Net(
        lambda net, x: net.c(join(net.a(x).relu(), net.b(x), net.grid)),
        grid=nn.Parameter(torch.randn(1, 2, 8, 8)),
        a=nn.Conv2d(3, 8, 3, padding=1),
        b=nn.Conv2d(3, 8, 3, padding=1),
        c=last(channels, 4, 3, padding=1),
    )


def compiled_by_openvino(model):
    return openvino.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})


def layer_types(compiled):
    infos = [op.get_rt_info() for op in compiled.get_runtime_model().get_ops()]
    return [i["runtimePrecision"].astype(str) for i in infos if i["layerType"].astype(str) in LAYERS]


def two_readers(between=lambda y: y):
    def run(net, x):
        y = net.a(x)
        return net.b(y).relu(), net.c(between(y)).sigmoid()

    return Net(run, a=nn.Conv2d(3, 8, 1), b=nn.Conv2d(8, 8, 1), c=nn.ConvTranspose2d(8, 8, 3, padding=1))


IN_INT8 = {
    "transposed 1d": (up(1, output_padding=1), 1, 2),
    "transposed 3d": (up(3), 3, 2),
    "transposed, signed": (
        nn.Sequential(nn.ConvTranspose2d(3, 8, 2, 2), nn.LeakyReLU(), nn.ConvTranspose2d(8, 4, 4, 2)),
        2,
        2,
    ),
    "transposed, of a concat": (joined_net(lambda a, b, g: torch.cat([a, b], 1), 16, nn.ConvTranspose2d), 2, 3),
    "transposed, beside a convolution": (two_readers(), 2, 3),
    "transposed, of a concat beside a convolution": (
        two_readers(lambda y: torch.cat([y[:, :4].tanh(), y[:, 4:]], 1)),
        2,
        3,
    ),
    "transposed, of a pooled one": (two_readers(lambda y: F.max_pool2d(y, 2)), 2, 3),
    "transposed, rolled": (two_readers(lambda y: y.roll(1, 2)), 2, 3),
    "function": (product(lambda x, w, b: F.conv_transpose1d(x.mT, w).mT, 8, 8, 2), 1, 3),
    "transposed parameter": (product(lambda x, w, b: x @ w.t() + b, 8, 8), 1, 3),
    "addmm": (product(lambda x, w, b: torch.addmm(b, x.flatten(0, 1), w.T), 8, 8), 1, 3),
    "matrix": (product(lambda x, w, b: x @ w, 8, 8), 1, 3),
    "addmm by keywords": (product(lambda x, w, b: torch.addmm(mat1=x.flatten(0, 1), mat2=w, input=b), 8, 8), 1, 3),
    "parts of a parameter": (
        Net(lambda net, x: net.part(x), part=product(lambda x, w, b: F.linear(F.linear(x, w[0], b), w[1]), 2, 8, 8)),
        1,
        4,
    ),
    "three dimensions": (product(lambda x, w, b: x @ w.expand(x.shape[0], 8, 8), 8, 8), 1, 2),
    "left": (product(lambda x, w, b: w @ x, 7, 6), 1, 2),
    "dilated pool": (nn.Sequential(nn.Conv2d(3, 8, 3), nn.MaxPool2d(2, 1, dilation=2), nn.Conv2d(8, 4, 3)), 2, 2),
    "unshuffled": (nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.PixelUnshuffle(2), nn.Conv2d(32, 4, 3)), 2, 2),
}


@pytest.mark.parametrize("case", IN_INT8)
def test_openvino_computes_in_int8_what_has_pairs_and_nothing_else_has(case, tmp_path):
    # Layers whose parameter is used in another way than by a module, and transposed convolutions of all ranks.
    model, dimensions, count = IN_INT8[case]
    x = torch.randn(2, 3, *[8] * dimensions)
    qmodel, path = exported(model, x, tmp_path / "int8.onnx", target="openvino", weights=WEIGHTS)
    compiled = compiled_by_openvino(path)
    assert sum(t in {"u8", "i8"} for t in layer_types(compiled)) == count
    audit = compress.audit_onnx(path)
    # One for a concat, and a second one after a pool that none passes.
    pairs = {"transposed, of a concat": 2, "dilated pool": 3}.get(case, count)
    assert [sum(row.int8 for row in audit.rows), audit.activation_pairs] == [count, pairs]
    for own, found in zip(flat_tensors(qmodel(x)), compiled(x.numpy()).values(), strict=True):
        assert sqnr(own, torch.from_numpy(found)) > 40


@pytest.mark.parametrize("way", ["torch", "onnx"])
def test_a_product_of_what_a_convolution_reads_too_is_in_int8(way, tmp_path):
    # As in the attention of YOLO 11 and 12. On a processor without VNNI sums of two bytes overflow: few dB.
    layers = {"a": nn.Conv2d(3, 8, 1), "b": nn.Conv2d(3, 8, 1), "c": nn.Conv2d(8, 8, 3, groups=8)}
    net = Net(lambda net, x: ((y := net.a(x)).flatten(2) @ net.b(x).flatten(2).mT, net.c(y)), **layers).eval()
    x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    spec = compress.QuantSpec(target="openvino", weights=WEIGHTS)
    model = net if way == "onnx" else compress.quantize(net, x, [x], spec=spec)
    path = compress.export_onnx(model, x, tmp_path / "m.onnx")
    if way == "onnx":
        path = compress.quantize_onnx(path, [x], spec=spec, out=tmp_path / "int8.onnx")
    compiled = compiled_by_openvino(path)
    assert compress.audit_onnx(path).products_on("openvino") == {"INT8": 4}
    assert [kind in {"u8", "i8"} for kind in layer_types(compiled)] == [True] * 4
    for own, found in zip(net(x), compiled(x.numpy()).values(), strict=True):
        assert sqnr(own, torch.from_numpy(found)) > 20


def test_a_pool_whose_indices_are_read_passes_no_pair(tmp_path):
    parts = {"a": nn.Conv2d(3, 8, 3), "b": nn.Conv2d(8, 8, 3, padding=1), "c": nn.Conv2d(8, 4, 3)}

    def places(net, x):
        y, indices = F.max_pool2d(net.a(x).relu(), 2, return_indices=True)
        return net.c(net.b(y) + indices / 100)

    model, x, path = Net(places, **parts).eval(), torch.randn(2, 3, 10, 10), tmp_path / "m.onnx"
    quantized_file("file", model, x, compress.QuantSpec(target="openvino", weights=WEIGHTS), path)
    types = layer_types(compiled_by_openvino(path))
    assert types.count("u8") + types.count("i8") == compress.audit_onnx(path).products_on("openvino")["INT8"] == 3


ROWS = {
    "factor": lambda y: y * 2,
    "negated": lambda y: -y,
    "quotient and sum": lambda y: y / 3 + 1,
    "factor for each channel": lambda y: y * torch.linspace(0.5, 1.5, 16),
    "factor, activation": lambda y: (y * 2).relu(),
    "activation": lambda y: y.relu(),
}


@pytest.mark.parametrize("way", ["file", "torch"])
@pytest.mark.parametrize("bias", further([True, False], [True]))
@pytest.mark.parametrize("case", ROWS)
def test_openvino_computes_linear_layers_of_rows_apart_and_right(case, bias, way, tmp_path):
    # Two linear layers and what stands between them: no kernel of both, which returns noise.
    a, b = nn.Linear(32, 16, bias=bias), nn.Linear(16, 8, bias=bias)
    model, x, out = Net(lambda net, x: net.b(ROWS[case](net.a(x))), a=a, b=b), torch.randn(4, 32), tmp_path / "m.onnx"
    quantized_file(way, model.eval(), x, compress.QuantSpec(target="openvino", weights=WEIGHTS), out)
    expected = compute(out, x.numpy(), optimize=False)
    read = openvino.Core().read_model(out)
    read.reshape(list(x.shape))
    compiled = compiled_by_openvino(read)
    assert sqnr(*map(torch.from_numpy, (expected, compiled(x.numpy())[0]))) > 40
    types = layer_types(compiled)
    assert len(types) == 2 and set(types) <= {"u8", "i8"}


# Gathers by tables of indices: OpenVINO takes them after an INT8 layer, and computes what fake quantization does.

GATHERS_X = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def windows_net():
    # Overlapping windows of a convolution's result, as in HaloNet; no bias, so that its scales move on.
    def run(net, x):
        windows = F.pad(net.conv(x), [1, 1, 1, 1]).unfold(2, 6, 4).unfold(3, 6, 4)
        return net.fc(windows.amax((4, 5)).flatten(2).transpose(1, 2))

    return Net(run, conv=nn.Conv2d(3, 8, 3, padding=1, bias=False), fc=nn.Linear(8, 4))


@pytest.mark.parametrize("dynamic", [True, False])
def test_windows_behind_an_int8_convolution_run_on_openvino(dynamic, tmp_path):
    spec = {"target": "openvino", "activations": compress.ActivationSpec(calibrator="max"), "weights": WEIGHTS}
    into = {"dynamic_batch": dynamic}
    qmodel, path = exported(windows_net(), GATHERS_X, tmp_path / "model.onnx", into=into, **spec)
    nodes = onnx.load(path).graph.node
    assert [node.op_type for node in nodes].count("Gather") == 2 and len({node.name for node in nodes}) == len(nodes)
    assert sqnr(qmodel(GATHERS_X), on_engine(path, "openvino", GATHERS_X, threads=1, precision="f32")) > 40


# Q/DQ pairs after concats, splits and flattenings: the values stay, and ONNX Runtime computes in integers there.


def repeated_pairs_branches():
    def run(net, x):
        x = torch.relu(net.stem(x))
        x = torch.max_pool2d(torch.cat([torch.relu(net.left(x)), torch.relu(net.right(x))], 1), 2)
        return net.fc(torch.relu(net.joined(x)).flatten(1))

    return Net(
        run,
        stem=nn.Conv2d(3, 8, 3, 2, 1),
        left=nn.Conv2d(8, 4, 1),
        right=nn.Conv2d(8, 4, 3, 1, 1),
        joined=nn.Conv2d(8, 6, 3, 1, 1),
        fc=nn.Linear(6 * 4 * 4, 5),
    )


def shuffled():
    # Three blocks of a ShuffleNetV2: each joins a part of the block before with a branch of the other part.
    def run(net, x):
        left, right = torch.relu(net.left(x)), torch.relu(net.right(x))
        for branch in net.branches:
            x = torch.cat([left, torch.relu(branch(right))], 1)
            left, right = x.unflatten(1, (2, 4)).transpose(1, 2).flatten(1, 2).chunk(2, 1)
        return net.fc(torch.relu(net.last(torch.cat([left, right], 1))).flatten(1))

    return Net(
        run,
        left=nn.Conv2d(3, 4, 3, 2, 1),
        right=nn.Conv2d(3, 4, 3, 2, 1),
        branches=nn.ModuleList(nn.Conv2d(4, 4, 3, 1, 1) for _ in range(3)),
        last=nn.Conv2d(8, 6, 1),
        fc=nn.Linear(6 * 8 * 8, 5),
    )


def padded():
    return Net(
        lambda net, x: net.fc(torch.relu(net.last(torch.relu(net.middle(torch.relu(net.stem(x)))))).flatten(1)),
        stem=nn.Conv2d(3, 8, 3, 2, 1, padding_mode="reflect"),
        middle=nn.Conv2d(8, 8, 5, padding="same", padding_mode="replicate", groups=2),
        last=nn.Conv2d(8, 6, 3, 2, 1, padding_mode="reflect"),
        fc=nn.Linear(6 * 4 * 4, 5),
    )


def resized():
    # A convolution whose result is also read for its shape, as sizes of an open batch are computed.
    def run(net, x):
        x = torch.relu(net.stem(x))
        up = nn.functional.interpolate(net.low(x), size=x.shape[-2:])
        return net.fc(torch.relu(net.last(torch.cat([up, x], 1))).flatten(1))

    return Net(
        run,
        stem=nn.Conv2d(3, 8, 3, 1, 1),
        low=nn.Conv2d(8, 8, 3, 2, 1),
        last=nn.Conv2d(16, 6, 3, 4),
        fc=nn.Linear(6 * 4 * 4, 5),
    )


def clipped():
    # Linear layers and a product of two tensors, whose results are clipped and read by what has no form in 8 bits.
    def run(net, x):
        x = torch.relu(net.fc(net.norm(F.relu6(net.stem(x.flatten(1))))))
        x = net.rows((x * x.sigmoid()).reshape(-1, 8, 4))
        return net.last((torch.relu(x @ x.transpose(1, 2)).softmax(-1) @ x).flatten(1))

    return Net(
        run,
        stem=nn.Linear(768, 32),
        norm=nn.LayerNorm(32),
        fc=nn.Linear(32, 32, bias=False),
        rows=nn.Linear(4, 4),
        last=nn.Linear(32, 5),
    )


@pytest.mark.parametrize("way", ["file", "torch"])
@pytest.mark.parametrize(
    ("network", "concats"), [(repeated_pairs_branches, 1), (shuffled, 4), (padded, 0), (resized, 0), (clipped, 0)]
)
def test_every_layer_computes_in_integers(tmp_path, network, concats, way):
    model, x, out = with_statistics(network()), torch.randn(4, 3, 16, 16), tmp_path / "int8.onnx"
    quantized_file(way, model, x, compress.QuantSpec(target="onnxruntime"), out)
    kinds = kinds_on_engine(out)
    assert {"Conv", "FusedConv", "Gemm", "FusedGemm", "MatMul"}.isdisjoint(kinds)
    assert kinds.count("QLinearConcat") == concats
    assert sqnr(model(x), torch.from_numpy(run(out, x.numpy()))) > 25


def quantized(tensor, scale, zero_point="z"):
    return [
        helper.make_node("QuantizeLinear", [tensor, scale, zero_point], [f"{tensor}_q"]),
        helper.make_node("DequantizeLinear", [f"{tensor}_q", scale, zero_point], [f"{tensor}_d"]),
    ]


def joined(other_scale):
    nodes = [
        helper.make_node("Relu", ["x"], ["r"]),
        *quantized("x", "s"),
        *quantized("r", other_scale),
        helper.make_node("Concat", ["x_d", "r_d"], ["c"], axis=1),
        helper.make_node("Split", ["c"], ["a", "b"], axis=1, num_outputs=2),
        helper.make_node("Add", ["a", "b"], ["y"]),
    ]
    constants = {"s": np.float32(0.02), "same": np.float32(0.02), "wide": np.float32(0.03), "z": np.uint8(128)}
    return onnx_model(nodes, {"x": [2, 4]}, {"y": [2, 4], "a": [2, 4]}, constants)


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
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Softmax2d(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(72, 5)).eval()
    nn.init.zeros_(model[0].bias)
    x = torch.randn(4, 3, 8, 8)
    spec = compress.QuantSpec(target=target, activations=compress.ActivationSpec(calibrator="max"))
    path = compress.export_onnx(
        compress.quantize(model, x, [0.2 * x], spec=spec), x, tmp_path / "m.onnx"
    )  # calibrated with less
    (expected,) = ReferenceEvaluator(str(path)).run(None, {"input": x.numpy()})
    assert sqnr(torch.from_numpy(expected), torch.from_numpy(compute(path, x.numpy()))) > 30
    bounds = [node.op_type for node in onnx.load(path).graph.node].count("Min")
    assert bounds == (1 if target == "onnxruntime" else 0)


JOINED = {
    "part of a concat": joined_net(lambda a, b, g: torch.cat([a, b], 1)[:, ::2], 8),
    "crop of a concat": joined_net(lambda a, b, g: torch.cat([a, b], 1)[..., 1:-1, 1:], 16),
    "concat of rows": joined_net(lambda a, b, g: torch.cat([a, b], 2), 8),
    "constant in a concat": joined_net(lambda a, b, g: torch.cat([a, b, g.expand(len(b), 2, 8, 8)], 1), 18),
    "channels by a list": joined_net(lambda a, b, g: (a * b)[:, [3, 1, -1]], 3),
    "channels by a tensor": joined_net(lambda a, b, g: (a + b)[:, torch.tensor([3, 1, 0])], 3),
    "cast": joined_net(lambda a, b, g: (a + b).relu().bfloat16().float(), 8),
    "parts of two types": joined_net(lambda a, b, g: torch.cat([a.bfloat16().float(), b.relu()], 1), 16),
}


@pytest.mark.parametrize("way", ["file", "torch"])
@pytest.mark.parametrize("case", JOINED)
def test_openvino_carries_integers_through_joins_and_selections(case, way, tmp_path):
    x, path = torch.randn(2, 3, 8, 8), tmp_path / "int8.onnx"
    quantized_file(way, JOINED[case].eval(), x, compress.QuantSpec(target="openvino"), path)
    types = layer_types(compiled_by_openvino(path))
    assert len(types) == 3 and set(types) <= {"u8", "i8"}
    assert [row.int8 for row in compress.audit_onnx(path).rows] == [True] * 3


# What stands between two INT8 convolutions, which read 8x8 pixels: operator, attributes, further inputs.
IMAGES = np.random.default_rng(1).standard_normal((4, 3, 8, 8)).astype("f")
BETWEEN = {
    "cubic_smaller": ("Resize", {"mode": "cubic"}, [None, np.array([1, 1, 1.5, 0.5], "f")]),
    "axes": ("Resize", {"mode": "linear", "axes": [2, 3]}, [None, np.array([1.5, 2], "f")]),
    "axes_nearest": ("Resize", {"mode": "nearest", "axes": [-2, -1]}, [None, np.array([2, 2], "f")]),
    "axes_sizes": ("Resize", {"mode": "linear", "axes": [3, 2]}, [None, None, np.array([9, 5])]),
    "pad_axes": ("Pad", {}, [np.array([1, 2, 0, 1]), None, np.array([2, 3])]),
    "pad_axis": ("Pad", {"mode": "reflect"}, [np.array([1, 2]), None, np.array([-1])]),
    "crop": ("CenterCropPad", {"axes": [2, 3]}, [np.array([6, 10])]),
    "dilated_mean": ("AveragePool", {"kernel_shape": [2, 2], "dilations": [2, 2], "pads": [1] * 4}, []),
}


def _between(tmp_path, operator, attributes, further_inputs):
    generator = np.random.default_rng(0)
    held = {f"w{i}": generator.standard_normal((8, n, 3, 3)).astype("f") * 0.2 for i, n in enumerate((3, 8, 8))}
    names = [f"given{i}" if value is not None else "" for i, value in enumerate(further_inputs)]
    held |= {name: value for name, value in zip(names, further_inputs, strict=True) if name}
    nodes = [
        helper.make_node("Conv", ["x", "w0"], ["a"], name="first", pads=[1] * 4),
        helper.make_node(operator, ["a", *names], ["b"], name="between", **attributes),
        helper.make_node("Conv", ["b", "w1"], ["c"], name="second", pads=[1] * 4),
        helper.make_node("Conv", ["c", "w2"], ["d"], name="third", pads=[1] * 4),
        helper.make_node("GlobalAveragePool", ["d"], ["y"], name="mean"),
    ]
    onnx.save(onnx_model(nodes, {"x": ["N", 3, 8, 8]}, {"y": ["N", 8, 1, 1]}, held), tmp_path / "float.onnx")
    return tmp_path / "float.onnx"


@pytest.mark.parametrize("case", BETWEEN)
def test_onnxruntime_runs_what_stands_between_int8_convolutions(case, tmp_path):
    path, spec = _between(tmp_path, *BETWEEN[case]), compress.QuantSpec(target="onnxruntime")
    made = compress.quantize_onnx(path, [IMAGES], spec=spec, out=tmp_path / "int8.onnx")
    assert sqnr(*(torch.from_numpy(compute(one, IMAGES)) for one in (path, made))) > 25
    with compress.build_engine(made, "onnxruntime", profile="yes") as engine:
        assert sum(layer.kind == "QLinearConv" for layer in engine.runtime_layers()) == 3


@pytest.mark.parametrize("between", [BETWEEN["axes_nearest"], ("Gather", {"axis": 2}, [np.array([[0, 1], [2, 3]])])])
def test_openvino_reads_what_stands_between_int8_convolutions(between, tmp_path):
    path = _between(tmp_path, *between)
    if between[0] == "Gather":  # with one axis more, which the Reshape takes away
        model = onnx.load(path)
        (node,) = (node for node in model.graph.node if node.op_type == "Gather")
        node.output[0] = "table"
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([0, 8, 4, 8]), "four"))
        model.graph.node.insert(2, helper.make_node("Reshape", ["table", "four"], ["b"], name="flat"))
        onnx.save(model, path)
    spec = compress.QuantSpec(target="openvino", weights=WEIGHTS)
    made = compress.quantize_onnx(path, [IMAGES], spec=spec, out=tmp_path / "int8.onnx")
    found = on_engine(made, "openvino", IMAGES, precision="f32")
    assert sqnr(torch.from_numpy(compute(path, IMAGES)), found) > 25
    types = layer_types(compiled_by_openvino(made))
    assert len(types) == 3 and set(types) <= {"u8", "i8"}


def test_onnxruntime_runs_a_smaller_bicubic_image_of_torch(tmp_path):
    def run(net, x):
        return net.second(F.interpolate(net.first(x), size=(13, 5), mode="bicubic")).mean((2, 3))

    layers = {"first": nn.Conv2d(3, 8, 3, padding=1), "second": nn.Conv2d(8, 8, 3, padding=1)}
    model, x = Net(run, **layers), torch.randn(4, 3, 8, 8)
    _, path = exported(model, x, tmp_path / "int8.onnx", target="onnxruntime")
    assert sqnr(model(x).detach(), torch.from_numpy(compute(path, x.numpy()))) > 30


OTHERS = {
    "antialias": ({"antialias": 1}, np.array([1, 8, 4, 4])),
    "ratio": ({"axes": [2, 3], "keep_aspect_ratio_policy": "not_larger"}, np.array([4, 5])),
}


@pytest.mark.parametrize("case", OTHERS)
def test_a_resize_that_openvino_computes_otherwise_is_named(case, tmp_path):
    attributes, sizes = OTHERS[case]
    path = _between(tmp_path, "Resize", {"mode": "linear", **attributes}, [None, None, sizes])
    spec = compress.QuantSpec(target="openvino", weights=WEIGHTS)
    with pytest.warns(compress.CompressWarning, match=r"ignores antialias and keep_aspect_ratio_policy.* between "):
        compress.quantize_onnx(path, [np.ones((1, 3, 8, 8), "f")], spec=spec, out=tmp_path / "int8.onnx")


def check_on_openvino(net, target, folder, least, **options):
    # OpenVINO computes the file of a float model, or of one quantized for a target, to that many dB.
    model = compress.quantize(net, X, [X], spec=compress.QuantSpec(target=target)) if target else net
    path = compress.export_onnx(model, X, folder / "m.onnx", **options)
    assert sqnr(model(X), torch.from_numpy(compiled_by_openvino(path)(X.numpy())[0])) > least


@pytest.mark.parametrize("target", ["openvino", None])
@pytest.mark.parametrize("dynamic", [True, False])
def test_transforms_of_real_images_are_read(target, dynamic, tmp_path):
    # OpenVINO reads one-sided DFTs of other ranks than the file's.
    def spectral(net, x):
        spectrum = torch.fft.rfft2(net.a(x), norm="ortho")
        return net.b(torch.fft.irfft2(spectrum * net.filter[..., 0], s=(16, 16), norm="ortho")).relu()

    net = Net(spectral, a=nn.Conv2d(3, 8, 1), b=nn.Conv2d(8, 4, 1), filter=torch.rand(8, 16, 9, 1)).eval()
    check_on_openvino(net, target, tmp_path, 60, dynamic_batch=dynamic)


def test_padding_that_an_average_counts_stays_zero_beside_a_zero_point(tmp_path):
    # OpenVINO moved the zero point behind the average: padding was as low as the lowest value.
    def run(net, x):
        y = F.silu(net.a(x))
        return torch.cat([net.b(y).relu(), net.pool(y) * y.sigmoid()], 1)

    net = Net(run, a=nn.Conv2d(3, 8, 3, padding=1), b=nn.Conv2d(8, 8, 1), pool=nn.AvgPool2d(3, 1, 1)).eval()
    _, path = exported(net, X, tmp_path / "m.onnx", target="openvino")
    points = [t for t in onnx.load(path).graph.initializer if t.name.endswith(".zero_point") and t.data_type == 2]
    assert any(onnx.numpy_helper.to_array(point).any() for point in points)
    expected, got = compute(path, X.numpy(), optimize=False), compiled_by_openvino(path)(X.numpy())[0]
    assert sqnr(torch.from_numpy(expected), torch.from_numpy(got)) > 60


@pytest.mark.parametrize("target", ["openvino", None])
def test_windows_over_counted_padding_are_divided_as_in_torch(target, tmp_path):
    # OpenVINO divided them by another number, in float too.
    pool = nn.AvgPool2d(3, 2, 1, ceil_mode=True)
    net = Net(lambda net, x: pool(net.a(x)), a=nn.Conv2d(3, 8, 1)).eval()
    check_on_openvino(net, target, tmp_path, 45)
