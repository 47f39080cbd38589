# A gate that no calibration image opens leaves the layers behind it float, from torch and from a file.

import copy

import onnx
import pytest
import torch
from torch import nn

import compress
from tests.exact import compute, exported
from tests.further import further
from tests.networks import Net
from tests.onnx_ptq.files import quantized_file

X = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def gated(run):
    layers = {"first": nn.Conv2d(3, 8, 3, padding=1), "gate": nn.Conv2d(8, 8, 1)}
    net = Net(run, **layers, branch=nn.Conv2d(8, 8, 3, padding=1), last=nn.Conv2d(8, 4, 1))
    nn.init.constant_(net.gate.bias, -50.0)
    return net.eval()


def branched(net, x):
    x = net.first(x).relu()
    return net.last(x + net.branch(net.gate(x).relu())).mean((2, 3))


def attends(net, x):
    gates = net.gate(net.first(x).relu()).relu().flatten(2)
    return net.last(net.first(x)).mean((2, 3)) + (gates @ gates.reshape(gates.shape).mT).mean()


def noise(path, wanted):
    # The mean squared error of a file's results, as a share of their own.
    return (torch.from_numpy(compute(path, X.numpy())) - wanted).pow(2).mean() / wanted.pow(2).mean()


def layers_with_quantized_weights(path):
    graph = onnx.load(path).graph
    made = {name: node.op_type for node in graph.node for name in node.output}
    return [made.get(node.input[1]) == "DequantizeLinear" for node in graph.node if node.op_type == "Conv"]


@pytest.mark.parametrize("target", ["openvino", "onnxruntime", "tensorrt"])
@pytest.mark.parametrize("source", ["torch", "file"])
def test_a_closed_branch_stays_float_with_a_warning(target, source, tmp_path):
    model, out = gated(branched), tmp_path / "int8.onnx"
    with pytest.warns(compress.CompressWarning, match="branch"):
        quantized_file(source, model, X, compress.QuantSpec(target=target), out)
    first, gate, branch, last = layers_with_quantized_weights(out)
    assert first and last and not branch
    assert gate == (target != "onnxruntime")  # its kernels want a pair on both sides
    assert noise(out, model(X)) < 1e-3


def test_a_product_of_tensors_that_are_zero_stays_float():
    with pytest.warns(compress.CompressWarning, match="are zero on calibration images"):
        qmodel = compress.quantize(gated(attends), X[:1], [X], spec=compress.QuantSpec(target="openvino"))
    assert {weight.path for weight in qmodel.placement.weights} == {"first", "gate", "last"}


def test_a_generator_is_refused_since_it_can_be_read_once():
    with pytest.raises(compress.CompressError, match="all collected values are zero"):
        compress.quantize(gated(branched), X[:1], iter([X]), spec=compress.QuantSpec(target="openvino"))


def louder(*layers):
    for layer in layers:
        layer.weight.detach().mul_(15)


def joined(run, *channels, **more):
    a, b, c = (nn.Conv2d(n, 8, 3, padding=1) for n in channels)
    louder(a, b, c)
    return Net(run, a=a, b=b, c=c, d=nn.Conv2d(24, 4, 1), **more)


def dense():
    # Each result is ten times the one before, and all are joined.
    def run(net, x):
        a = net.a(x).relu()
        b = net.b(a).relu()
        return net.d(torch.cat([a, b, net.c(b).relu()], 1)).mean((2, 3))

    return joined(run, 3, 8, 8)


def grown():
    # A normalization, which is computed in float, reads what was joined before.
    def run(net, x):
        a = net.a(x)
        b = net.b(net.n(torch.cat([a], 1)).relu())
        return net.d(torch.cat([a, b, net.c(net.m(torch.cat([a, b], 1)).relu())], 1)).mean((2, 3))

    return joined(run, 3, 8, 16, n=nn.BatchNorm2d(8), m=nn.BatchNorm2d(16))


@pytest.mark.parametrize("source", ["torch", "file"])
@pytest.mark.parametrize(
    ("make", "target"), [(dense, "openvino"), (dense, "onnxruntime"), (dense, "tensorrt"), (grown, "onnxruntime")]
)
def test_ranges_far_apart_share_no_scale_where_another_layer_consumes_them(make, target, source, tmp_path):
    model, out = make().eval(), tmp_path / "int8.onnx"
    made = quantized_file(source, model, X, compress.QuantSpec(target=target), out)
    assert source == "file" or any("far apart" in row.reason for row in made.placement.decisions)
    assert noise(out, model(X)) < 2e-3  # one scale for all: 0.05 to 0.15


def skip():
    # A skip of a U-Net beside an up-convolution, whose result has a sign.
    def run(net, x):
        a = net.down(x).relu()
        return net.last(torch.cat([net.up(net.middle(a).relu()), a], 1)).relu().mean((2, 3))

    return Net(
        run,
        down=nn.Conv2d(3, 8, 3, padding=1),
        middle=nn.Conv2d(8, 8, 3, 2, 1),
        up=nn.ConvTranspose2d(8, 8, 2, 2),
        last=nn.Conv2d(16, 4, 1),
    )


def casts(dtype):
    def run(net, x):
        x = net.b(net.a(x).relu().to(dtype).float()).relu()
        return net.c(x.to(dtype).float()).relu().to(dtype).float()

    return Net(run, a=nn.Conv2d(3, 8, 3), b=nn.Conv2d(8, 8, 3), c=nn.Conv2d(8, 4, 3))


@pytest.mark.parametrize("make", [skip, lambda: casts(torch.float16), lambda: casts(torch.float64)])
def test_onnx_runtime_computes_as_many_convolutions_in_integers_as_the_audit_says(make, tmp_path):
    _, path = exported(make(), X, tmp_path / "q.onnx", target="onnxruntime")
    with compress.build_engine(path, "onnxruntime", batch_size=2, profile="yes") as engine:
        kinds = [layer.kind for layer in engine.runtime_layers()]
    rows = [row for row in compress.audit_onnx(path).rows if row.op_type == "Conv"]
    assert kinds.count("QLinearConv") == sum(row.int8 for row in rows) >= 2
    assert kinds.count("Conv") + kinds.count("FusedConv") == sum(not row.int8 for row in rows)
    assert make is not skip or all(row.int8 for row in rows)


@pytest.mark.parametrize("layer", [nn.Conv2d(8, 8, 3), nn.ConvTranspose2d(8, 8, 2, 2)])
def test_onnx_runtime_computes_a_layer_that_stays_float_in_float(layer, tmp_path):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), copy.deepcopy(layer), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()
    model[2].weight.data[:, 0] *= 100  # one scale for all of it, as the engine chose, leaves the others 1 bit
    spec = compress.QuantSpec(target="onnxruntime", rules=(compress.Rule(match="2", enable=False),))
    out = tmp_path / "q.onnx"
    assert noise(out, quantized_file("torch", model, X, spec, out)(X)) < 1e-4


@pytest.mark.parametrize("source", ["torch", "file"])
def test_a_maximum_with_masked_borders_keeps_its_scale(source, tmp_path):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ConstantPad2d(1, -1e4), nn.MaxPool2d(3), nn.Conv2d(8, 4, 1)).eval()
    quantized_file(source, model, X, compress.QuantSpec(), tmp_path / "int8.onnx")
    assert noise(tmp_path / "int8.onnx", model(X)) < 2e-3


@pytest.mark.parametrize(
    ("bias", "source"),
    further(
        [(b, s) for b in (-float("inf"), -1e9) for s in ("torch", "file")], [(-float("inf"), "torch"), (-1e9, "file")]
    ),
)
def test_a_bias_that_switches_a_class_off_leaves_the_others_as_they_are(bias, source, tmp_path):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
    model = nn.Sequential(*model, nn.Softmax(-1)).eval()
    model[4].bias.data[2] = bias
    for target in ("openvino", "onnxruntime", "tensorrt"):
        quantized_file(source, model, X, compress.QuantSpec(target=target), tmp_path / "int8.onnx")
        found = torch.from_numpy(compute(tmp_path / "int8.onnx", X.numpy()))
        torch.testing.assert_close(found, model(X).detach(), atol=0.02, rtol=0)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_transposed_convolutions_of_any_rank_are_quantized(rank):
    layer = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[rank - 1]
    model, x = layer(4, 6, 3, 2, output_padding=1).eval(), torch.randn(2, 4, *(5,) * rank)
    qmodel = compress.quantize(model, x, [x], spec=compress.QuantSpec(target="openvino"))
    assert len(qmodel.placement.weights) == 1
    wanted = model(x)
    assert (qmodel(x) - wanted).pow(2).mean() < 1e-3 * wanted.pow(2).mean()


@pytest.mark.parametrize(
    "forward",
    [
        lambda m, x: (x @ m.table).sin(),
        lambda m, x: torch.cat([(m.fc(x) * 2).reshape(4, -1).cos(), (m.fc(x) + 1).sin().flatten(1)], 1),
        lambda m, x: m.table @ x.transpose(1, 2),
        lambda m, x: torch.bmm(x, m.table.expand(4, 8, 8)),
    ],
)
def test_phases_and_products_with_a_parameter_stay_float_on_both_sides(forward):
    layers = {"table": nn.Parameter(torch.randn(8, 8)), "fc": nn.Linear(8, 8), "last": nn.LazyLinear(4)}
    model, x = Net(lambda net, x: net.last(forward(net, x)), **layers).eval(), torch.randn(4, 6, 8)
    model(x)
    placement = compress.quantize(model, x, [x], spec=compress.QuantSpec(target="openvino")).placement
    assert [site.path for site in placement.weights] == ["last"] and len(placement.activations) == 1
