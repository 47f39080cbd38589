"""A quantized model is a plain module: it copies, pickles, loads, trains and compiles."""

import copy
import io
import pickle
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from compress import (
    ActivationSpec,
    CalibrationReport,
    CompressWarning,
    QuantSpec,
    WeightSpec,
    calibrate,
    insert_quantizers,
    quantize,
)
from compress.errors import CalibrationError, QuantizationError
from compress.quantization.calibration.calibrate import calibrate_weights
from compress.quantization.quantizer import quantizers
from compress.quantization.sensitivity.compare import output_sqnr, sqnr, weight_sqnr
from tests.networks import TinyResNet, network

X = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
MAX = QuantSpec(activations=ActivationSpec(calibrator="max"))


@pytest.fixture
def qmodel():
    return quantize(network(), X[:2], [X], spec=MAX)


def test_close_to_the_float_model_and_better_with_more_bits():
    model = network()
    noise = {}
    for bits in (4, 8):
        spec = QuantSpec(weights=WeightSpec(num_bits=bits), activations=ActivationSpec(num_bits=bits, calibrator="max"))
        noise[bits] = sqnr(model(X), quantize(model, X[:2], [X], spec=spec)(X))
    assert noise[8] > 25
    assert noise[8] - noise[4] > 12  # 6 dB a bit in theory


def test_ranges_are_those_of_the_float_network(qmodel):
    model, seen = network(), {}
    model.fc.register_forward_hook(lambda m, i, o: seen.update(fc=i[0].detach()))
    model(X)
    amax = dict(quantizers(qmodel))["quantizers.avgpool"].amax
    torch.testing.assert_close(amax, seen["fc"].abs().max(), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(qmodel.fc.weight_quantizer.amax, model.fc.weight.detach().abs().amax(1))


def test_float_model_is_left_as_it_was():
    model = network().train()
    before = copy.deepcopy(model.state_dict())
    quantize(model, X[:2], [(X, torch.zeros(4))], spec=MAX)
    assert model.training and all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_state_dict_has_the_float_models_names(qmodel):
    own, names = set(qmodel.state_dict()), set(TinyResNet().state_dict())
    weights = {n for n in names if "bn" not in n and "downsample.1" not in n}
    assert weights <= own
    assert all("quantizer" in n or n.endswith(".bias") for n in own - names)
    fresh = insert_quantizers(TinyResNet(), X[:2], MAX)
    fresh.load_state_dict(qmodel.state_dict())
    assert torch.equal(fresh(X), qmodel(X))


def test_copies_and_pickles(qmodel):
    file = io.BytesIO()
    torch.save(qmodel, file)
    loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    for twin in (copy.deepcopy(qmodel), pickle.loads(pickle.dumps(qmodel)), loaded):
        assert torch.equal(twin(X), qmodel(X))
        assert twin.report == qmodel.report and twin.placement == qmodel.placement == qmodel.report.placement


def step(model, autocast=False):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(6):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = nn.functional.cross_entropy(model(X).float(), torch.arange(4))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("autocast", [False, True])
def test_trains(qmodel, autocast):
    losses = step(qmodel.train(), autocast)
    assert losses[-1] < losses[0]
    assert all(p.grad is not None for p in qmodel.parameters())


def test_compiles(qmodel):
    compiled = torch.compile(qmodel, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(X), qmodel(X))
    x = X.clone().requires_grad_()
    compiled(x).sum().backward()
    assert x.grad.abs().sum() > 0


def test_a_masked_weight_keeps_its_zeros():
    class Mask(nn.Module):
        def forward(self, weight):
            return weight * (torch.arange(weight.shape[1]) % 2 == 0)[:, None, None]

    model = network()
    parametrize.register_parametrization(model.block1.conv1, "weight", Mask())
    qmodel = quantize(model, X[:2], [X], spec=QuantSpec(batchnorm="keep", activations=ActivationSpec(calibrator="max")))
    layer = qmodel.block1.conv1
    assert (layer.quantized_weight[:, 1::2] == 0).all() and (layer.quantized_weight[:, ::2] != 0).any()
    step(qmodel.train())
    assert (layer.quantized_weight[:, 1::2] == 0).all()
    assert layer.parametrizations.weight.original.grad is not None


def test_calibration_refusals():
    model = network()
    qmodel = insert_quantizers(model, X[:2], MAX)
    with pytest.raises(CalibrationError, match="no images"):
        calibrate(qmodel, [])
    with pytest.raises(CalibrationError, match=r"quantizers\.x.*(NaN|nan|finite|Inf)"):
        calibrate(qmodel, [X * float("nan")])
    with pytest.raises(CalibrationError, match=r"quantizers\.x.*zero"):
        calibrate(qmodel, [X * 0])
    assert all(q.calibrator is None and q.enabled for _, q in quantizers(qmodel))


def test_refusals():
    model = network()
    with pytest.raises(QuantizationError, match="float16"):
        insert_quantizers(copy.deepcopy(model).half(), X[:2])
    with pytest.raises(QuantizationError, match="quantized already"):
        insert_quantizers(quantize(model, X[:2], [X], spec=MAX), X[:2])
    with pytest.raises(QuantizationError, match="not a model that compress quantized"):
        calibrate(model, [X])
    with pytest.raises(QuantizationError, match="num_bits is 9"):
        insert_quantizers(model, X[:2], QuantSpec(weights=WeightSpec(num_bits=9)))


def test_layerwise_sqnr_names_every_layer(qmodel):
    from compress.graph.fold import fold_batchnorm
    from compress.graph.trace import trace

    float_graph = trace(network(), X[:2])
    fold_batchnorm(float_graph)
    found = output_sqnr(float_graph, qmodel, [X[:2], X[2:]])
    assert set(found) == {w.path for w in qmodel.placement.weights} == set(weight_sqnr(qmodel))
    assert all(value > 20 for value in found.values())
    torch.testing.assert_close(found["fc"], sqnr(network()(X), qmodel(X)), rtol=1e-3, atol=1e-2)


def test_weights_recalibrate_after_training(qmodel):
    with torch.no_grad():
        qmodel.fc.weight.mul_(3)
    calibrate_weights(qmodel)
    torch.testing.assert_close(qmodel.fc.weight_quantizer.amax, qmodel.fc.weight.detach().abs().amax(1))


def test_the_share_beyond_the_ranges_is_reported():
    """Half of the values at 1, half at 100: a range of 10 cuts off half."""
    counts, edges = torch.zeros(100), torch.arange(101.0)
    counts[1], counts[99], counts[0] = 50, 50, 1000  # zeros lose nothing
    report = CalibrationReport(images=1, amax={"q": torch.tensor(10.0)}, histograms={"q": (counts, edges)})
    assert report.clipped == {"q": 0.5}
    assert replace(report, amax={"q": torch.tensor(100.0)}).clipped == {"q": 0.0}


def test_the_default_keeps_values_that_crowd_at_two_places():
    """Such values occur in drawings, and after a ReLU6."""
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 4, 1))
    with torch.no_grad():
        model[0].weight.zero_()
        model[0].bias.copy_(torch.tensor([0.05, 0.05, 0.05, 0.05, 0.05, 0.05, 0.05, 6.0]))
    x = torch.rand(4, 3, 8, 8)
    qmodel = quantize(model, x, [x])
    error = (qmodel(x) - model(x)).norm() / model(x).norm()
    assert error < 0.05


class ZeroInit(nn.Module):
    """A residual branch that begins at zero, squeezed and excited, as timm makes them."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.conv = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(8)
        self.gate = nn.Conv2d(8, 8, 1)
        self.head = nn.Linear(8, 5)
        nn.init.zeros_(self.bn.weight)

    def forward(self, x):
        x = torch.relu(self.stem(x))
        y = self.bn(self.conv(x))
        y = y * torch.sigmoid(self.gate(y.mean((2, 3), keepdim=True)))
        return self.head(torch.relu(x + y).mean((2, 3)))


@pytest.mark.parametrize("target", ["tensorrt", "openvino", "onnxruntime"])
def test_a_branch_that_begins_at_zero_is_quantized_and_one_that_no_image_reaches_stays_float(target):
    torch.manual_seed(0)
    model, x = ZeroInit().eval(), torch.randn(4, 3, 8, 8)
    spec = QuantSpec(target=target)
    qmodel = quantize(model, x, [x], spec=spec)
    torch.testing.assert_close(qmodel(x), model(x), rtol=0.1, atol=0.1)
    report = calibrate(qmodel, [x])
    assert report.dead and set(report.dead) <= set(report.amax)
    assert all(report.amax[name] == 1 for name in report.dead)
    with torch.no_grad():
        model.stem.bias.fill_(-100)  # these images pass no ReLU, others would
    with pytest.warns(CompressWarning, match="stay float"):
        closed = quantize(model, x, [x], spec=spec)
    torch.testing.assert_close(closed(x), model(x), rtol=0.1, atol=0.1)


class Padded(nn.Module):
    """Largest values of windows that reach into an infinite margin (TensorFlow's SAME), and a filter by expansion."""

    def __init__(self):
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1)

    def forward(self, x):
        x = nn.functional.conv2d(self.conv(x), torch.full((1, 1, 2, 2), 0.25).expand(4, 1, 2, 2), groups=4)
        x = nn.functional.max_pool2d(nn.functional.pad(x, (0, 1, 0, 1), value=-float("inf")), 2, 2)
        return self.fc(x).mean((2, 3))


@pytest.mark.parametrize("target", ["tensorrt", "openvino", "onnxruntime"])
def test_infinite_margins_and_expanded_constants(target):
    torch.manual_seed(0)
    model, images = Padded().eval(), torch.randn(4, 3, 16, 16)
    qmodel = quantize(model, images, [images], spec=QuantSpec(target=target))
    assert len(qmodel.placement.weights) == 2
    with torch.no_grad():
        assert sqnr(model(images), qmodel(images)) > 30
